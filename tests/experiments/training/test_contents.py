"""Files of checkpoints that hold something else than a run needs: refused in one sentence with file and key."""

import shutil

import pytest
import torch

from jpmhc.cli import main
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from tests.experiments.training.small_run import SMALL, small, trained
from tests.experiments.training.wrong_contents import CHANGES, FILES, change_content, replace_file

PUZZLES = SMALL.task.build()
FRAMES = {"mixer": "grassmann", "streams": 2, "mixer_dynamic": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with frames, averages and rows in flight."""
    folder = tmp_path_factory.mktemp("whole")
    trained(small(folder, steps=1, model=FRAMES))
    return folder


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    """A copy of that run, whose puzzles are made once."""
    monkeypatch.setattr(SudokuConfig, "build", lambda config: PUZZLES)
    return shutil.copytree(whole, tmp_path / "run")


def resume(run):
    """Load everything that a resumed run loads."""
    found = checkpoint.choose_checkpoint(run, "latest")
    Trainer(small(run, steps=2, model=FRAMES), World(0, 1, torch.device("cpu")), found)


def refusal_of(call, *arguments):
    """The one line in which a call refuses."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the caller looks at the message
        call(*arguments)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("file", "change", "key"), CHANGES)
def test_wrong_content_is_refused_with_file_and_key(run, file, change, key):
    (folder,) = checkpoint.list_folders(run)
    change_content(folder, file, change)
    message = refusal_of(resume, run)
    assert message.startswith(str(folder / file))
    assert key in message.removeprefix(str(folder / file))
    assert len(message) < len(str(folder)) + 300


@pytest.mark.parametrize("written", FILES.values(), ids=FILES)
def test_a_file_that_is_something_else_is_refused_by_name(run, written):
    (folder,) = checkpoint.list_folders(run)
    replace_file(folder, "rank-0.pt", written)
    assert refusal_of(resume, run).startswith(str(folder / "rank-0.pt"))


def test_evaluate_refuses_wrong_weights_with_file_and_key(run, capsys):
    (folder,) = checkpoint.list_folders(run)
    for key, change in (("average", lambda content: {**content, "average": {}}), ("shape", lambda content: {})):
        change_content(folder, "shared.pt", change)
        capsys.readouterr()
        with pytest.raises(ValueError, match=key):
            checkpoint.load_model(checkpoint.locate_checkpoint(run))
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--device", "cpu"])
    assert capsys.readouterr().err == f"preparing the puzzles\njpmhc: {folder / 'shared.pt'} has no entry shape\n"
