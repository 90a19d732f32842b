"""The folder of a run: no second run gets in, whether the first is going on or has ended."""

import errno
import os
import shutil
import subprocess
import sys

import pytest

from jpmhc.experiments.training import run_folder
from jpmhc.experiments.training.learner import Learner
from jpmhc.experiments.training.loop import train
from tests.experiments.training.small_run import small, trained


def test_two_runs_at_a_time_are_refused_until_the_first_dies(tmp_path):
    """The second one is refused also where it found the folder empty at first, as it does until the first writes."""
    script = f"""
import time
from pathlib import Path
from jpmhc.experiments.training import run_folder
with run_folder.lock_folder(Path({str(tmp_path)!r}), new=True):
    print("held", flush=True)
    time.sleep(600)
"""
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"another process is training in .*: wait for its end"):
            train(small(tmp_path))
        with pytest.raises(ValueError, match="another process is training"):
            trained(small(tmp_path))
    finally:
        first.kill()
        first.wait()
    assert os.listdir(tmp_path) == [".lock"]
    assert train(small(tmp_path)).step == 4  # what is left of a killed process keeps nobody out


def test_a_run_that_is_resumed_is_held_too(tmp_path):
    trained(small(tmp_path, steps=2))
    before = (tmp_path / "config.json").read_text()
    with run_folder.lock_folder(tmp_path, new=False), pytest.raises(ValueError, match="another process is training"):
        train(small(tmp_path, steps=4, resume="latest"))
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize(
    ("left", "advice"),
    [(["config.json", "log.jsonl"], "or remove them"), (["log.jsonl"], "or remove it")],
)
def test_what_a_failed_run_left_is_not_mixed_with_a_new_one(tmp_path, left, advice):
    for name in left:
        (tmp_path / name).write_text("{}\n")
    for begin in (train, trained):
        with pytest.raises(
            ValueError, match=rf"holds {' and '.join(left)} of .* before its first checkpoint.*{advice}"
        ):
            begin(small(tmp_path))
    assert [(tmp_path / name).read_text() for name in left] == ["{}\n"] * len(left)


def test_a_run_that_cannot_be_written_to_is_refused_in_words(tmp_path):
    trained(small(tmp_path, steps=2))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=rf"^cannot write to {tmp_path} \(Is a directory\): name another --out$"):
        train(small(tmp_path, steps=3, resume="latest"))


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_folder_that_goes_under_a_run_ends_it_in_one_line(tmp_path, monkeypatch, capfd, how):
    run, step = tmp_path / "run", Learner.take_step

    def losing(learner, *arguments, **options):
        if learner.step == 2:
            shutil.rmtree(run) if how == "removed" else run.rename(tmp_path / "elsewhere")
            if how == "replaced":
                run.mkdir()
        return step(learner, *arguments, **options)

    monkeypatch.setattr(Learner, "take_step", losing)
    said = rf"^{run} was removed or renamed while the run wrote to it, after step \d: .*--resume latest$"
    with pytest.raises(run_folder.FolderGone, match=said):
        train(small(run, steps=6, checkpoint_every=4))
    assert not (run / "checkpoints").exists()
    assert capfd.readouterr().err == "preparing the puzzles\n"


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("jpmhc.experiments.training.run_folder.fcntl.flock", unsupported)
    message = r"cannot be locked \(Function not implemented\)"
    with pytest.warns(UserWarning, match=message), run_folder.lock_folder(tmp_path / "run", new=True):
        assert (tmp_path / "run").is_dir()


def test_a_run_that_goes_on_is_not_resumed_whatever_its_checkpoints_are(tmp_path):
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)  # half written
    with (
        run_folder.lock_folder(tmp_path, new=False),
        pytest.raises(ValueError, match=f"another process is training in {tmp_path}"),
    ):
        train(small(tmp_path, steps=3, resume="latest"))
