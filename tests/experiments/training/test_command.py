"""The command `jpmhc train`: presets decide defaults, options override them, bad input is one sentence and status 2."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from jpmhc.cli import main
from jpmhc.cli import train as command
from jpmhc.cli.train import defaults_in
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.training import checkpoint, loop
from jpmhc.experiments.training.learner import Learner
from jpmhc.experiments.training.presets import PRESETS
from tests.cli.running import closed_pipe, fails_with

SIZE = ["--dim", "16", "--heads", "2", "--inner-multiple", "16", "--batch", "4", "--device", "cpu"]


@pytest.fixture
def gpu(monkeypatch):
    """Defaults as on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_preset_is_found_in_either_spelling():
    assert defaults_in(["--preset", "paper"]) is PRESETS["paper"]
    assert defaults_in(["--preset=trm", "--steps", "3"]) is PRESETS["trm"]
    assert defaults_in([]) is PRESETS["laptop"]


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.usefixtures("gpu")
def test_every_task_goes_with_every_preset(monkeypatch, preset, kind):
    """The task's own options follow, and everything else stays that of the preset."""
    ran = []
    monkeypatch.setattr("jpmhc.cli.train.run_training", ran.append)
    main(["train", f"--task.kind={kind}", "--preset", preset, "--task.seed", "7"])
    [config] = ran
    assert type(config.task) is TASKS[kind]
    assert config.task.seed == 7
    if type(PRESETS[preset].task) is TASKS[kind]:
        assert config == dataclasses.replace(PRESETS[preset], task=dataclasses.replace(PRESETS[preset].task, seed=7))
    else:
        assert config.task == TASKS[kind](seed=7)
    assert (config.model, config.steps) == (PRESETS[preset].model, PRESETS[preset].steps)
    assert type(config).from_json(config.to_json()) == config


def test_a_cpu_compiles_only_if_asked(monkeypatch):
    def compiles(*words):
        asked = []
        monkeypatch.setattr(command, "run_training", asked.append)
        command.main([*words, "--preset", "arc-small"])
        return asked[0].compile

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not compiles()
    assert compiles("--compile")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compiles()
    assert not compiles("--device", "cpu")


def test_a_run_is_gone_on_with_by_its_folder_alone(tmp_path, capsys):
    """Every option is the checkpoint's, and a run in two pieces is the run in one."""
    options = ["--task.puzzles", "9", "--mixer", "cayley", "--streams", "2", "--mixer-scale", "0.2", "--steps", "4"]
    main(["train", *SIZE, *options, "--decay-at", "0.5", "--decay-to", "0.1", "--out", str(tmp_path / "whole")])
    first, last = ["--stop-at", "1"], ["--resume", "latest"]
    main(["train", *SIZE, *options, "--decay-at", "0.5", "--decay-to", "0.1", *first, "--out", str(tmp_path / "two")])
    assert "finished after 1 steps" in capsys.readouterr().out
    main(["train", *last, "--stop-at", "3", "--out", str(tmp_path / "two")])
    main(["train", *last, "--out", str(tmp_path / "two")])
    assert "no setting changed" in capsys.readouterr().err
    whole, two = (tmp_path / name / "checkpoints" / "step-00000004" / "shared.pt" for name in ("whole", "two"))
    assert_equal(torch.load(whole, weights_only=True), torch.load(two, weights_only=True))
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (config["task"]["puzzles"], config["model"]["mixer_scale"], config["stop_at"]) == (9, 0.2, None)
    out = ["--out", str(tmp_path / "two")]
    fails_with(capsys, "has done more than the 3 steps", "train", *last, "--stop-at", "3", *out)
    fails_with(capsys, "at most 4, not 5", "train", *last, "--stop-at", "5", *out)
    fails_with(capsys, "there is no checkpoint in", "train", *last, "--out", str(tmp_path / "none"))


def test_a_basis_from_the_command_generators_is_trained(tmp_path):
    basis, run = tmp_path / "basis.json", tmp_path / "run"
    main(["generators", "--streams", "3", "--size", "2", "--json", str(basis)])
    options = ["--mixer", "permutation", "--streams", "3", "--basis", str(basis), "--steps", "1"]
    main(["train", *SIZE, *options, "--out", str(run)])
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["mixer_basis"] == json.loads(basis.read_text())["perms"]
    weights = torch.load(run / "checkpoints" / "step-00000001" / "shared.pt", weights_only=True)["core"]
    trained = [value.tolist() for name, value in weights.items() if name.endswith("mixer.basis")]
    assert trained == [config["model"]["mixer_basis"]] * 4


def test_the_same_command_starts_a_run_and_goes_on_with_it(tmp_path, capsys):
    words = ["train", *SIZE, "--task.puzzles", "9", "--steps", "2", "--resume", "auto", "--out", str(tmp_path)]
    (tmp_path / "config.json").touch()  # of a run that died before its first checkpoint
    main([*words, "--stop-at", "1"])
    assert "going on" not in capsys.readouterr().err
    main(words)
    assert "going on" in capsys.readouterr().err
    main(["train", "--resume", "auto", "--out", str(tmp_path)])
    assert "has done all 2 steps" in capsys.readouterr().err


def assert_equal(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def test_options_of_another_task_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--task.kind", "sudoku", "--preset", "paper", "--task.augmentations", "3"])
    assert stopped.value.code == 2
    assert "--task.augmentations" in capsys.readouterr().err


def test_options_override_the_preset_and_the_resolved_configuration_is_saved(tmp_path, capsys):
    options = [
        "--steps",
        "2",
        "--mixer",
        "cayley",
        "--streams",
        "2",
        "--task.test-puzzles",
        "8",
        "--out",
        str(tmp_path),
    ]
    main(["train", "--preset", "laptop", *SIZE, *options])
    assert "step-00000002" in capsys.readouterr().out
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["steps"], saved["model"]["mixer"], saved["model"]["dim"]) == (2, "cayley", 16)
    assert saved["task"] == {**saved["task"], "kind": "sudoku", "test_puzzles": 8}
    assert saved["lr"] == PRESETS["laptop"].lr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--mixer", "cayley"], "needs at least 2 streams"),
        (["--mixer", "fancy", "--streams", "2"], "no mixer is called 'fancy'"),
        (["--mixer", "fancy"], "no mixer is called 'fancy'; choose one of identity"),
        (["--mixer", "kronecker", "--streams", "3"], "power of two"),
        (["--mixer", "cayley", "--streams", "2", "--kernels", "fused"], "need a CUDA device"),
        (["--kernels", "fused"], "kernels=fused has no effect on the plain model"),
        (["--mixer-temperature", "nan"], "mixer_temperature must be positive and finite"),
        (["--attend", "cudnn"], "attend=cudnn is not possible on cpu"),
        (["--expansion", "0"], "expansion must be positive"),
        (["--inner-multiple", "0"], "inner_multiple must be"),
        (["--lr", "nan"], "lr must lie in [0, inf), got nan"),
        (["--puzzle-lr", "inf"], "puzzle_lr must lie in [0, inf)"),
        (["--decay-at", "0.5", "--decay-to", "-1"], "decay_to must lie in [0, 1]"),
        (["--task.kind", "chess"], "--task.kind takes one of sudoku, arc, not 'chess'"),
        (["--task.puzzles", "0"], "puzzles must be a whole number"),
        (["--frame-iterations", "0"], "frame_iterations must be"),
        (["--seed", "99999999999999999999999"], "seed must lie between"),
        (["--accumulate", "3"], "batch (4) must be a multiple of processes × accumulate (1 × 3)"),
        (["--strategy", "zero1"], "ZeRO shards over several processes"),
        (["--preset", "arc-small", "--evaluate-variants", "0"], "evaluate_variants must be"),
        (["--resume", "latest"], "no checkpoint"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch, options, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["train", *SIZE, "--out", str(tmp_path / "run"), *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error.replace("\n", " ")
    assert "preparing" not in error  # nor any other work
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path):
    """As in `jpmhc train 2>&1 | head`."""
    with closed_pipe():
        main(["train", *SIZE, "--steps", "2", "--task.puzzles", "8", "--out", str(tmp_path)])
    assert [path.name for path in checkpoint.list_folders(tmp_path)] == ["step-00000002"]


def test_a_refusal_that_nobody_reads_has_its_status(tmp_path):
    with closed_pipe(), pytest.raises(SystemExit) as stopped:
        main(["train", *SIZE, "--resume", "latest", "--out", str(tmp_path)])
    assert stopped.value.code == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(("owner", "name"), [(Learner, "take_step"), (loop, "fill_scorer")])
def test_a_run_ended_by_a_signal_has_its_status(tmp_path, capsys, monkeypatch, number, status, owner, name):
    """128 + the signal's number, as shells have it, in a step and in an evaluation alike."""
    whole = getattr(owner, name)

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), number)
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["train", *SIZE, "--steps", "1", "--task.puzzles", "8", "--out", str(tmp_path)])
    assert stopped.value.code == status
    said = capsys.readouterr().out.replace("\n", "")
    assert f"stopped by a signal after 1 steps; checkpoint: {tmp_path / 'checkpoints' / 'step-00000001'}" in said


def test_ctrl_c_while_the_puzzles_are_prepared_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TASKS["sudoku"], "build", lambda task: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as stopped:
        main(["train", *SIZE, "--out", str(tmp_path / "run")])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "preparing the puzzles\njpmhc: interrupted\n"


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--variants", "0"], "variants must be a whole number, at least 1, got 0"),
        (["--batch", "0"], "batch must be a whole number, at least 1, got 0"),
        (["--variants", "1", "--sample-seed", str(10**23)], "sample_seed must lie between"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_first(tmp_path, capsys, command, options, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([command, str(tmp_path), *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert sentence in error
    assert "checkpoint" not in error


def test_a_checkpoint_that_the_device_cannot_run_is_refused_before_the_puzzles(tmp_path, capsys):
    main(["train", *SIZE, "--attend", "math", "--steps", "1", "--task.puzzles", "8", "--out", str(tmp_path)])
    (folder,) = checkpoint.list_folders(tmp_path)
    written = (folder / "manifest.json").read_text()
    checkpoint.write_manifest(folder, json.loads(written.replace('"attend": "math"', '"attend": "cudnn"')))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(tmp_path), "--device", "cpu"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "attend=cudnn is not possible on cpu" in error
    assert "preparing" not in error
