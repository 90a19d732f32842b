"""The command `jpmhc train`: presets decide defaults, options override them, bad input is one sentence and status 2."""

import json

import pytest

from jpmhc.cli import main, preset_in
from jpmhc.training.config import PRESETS

SIZE = ["--dim", "16", "--heads", "2", "--inner-multiple", "16", "--batch", "4", "--device", "cpu"]


def test_preset_is_found_in_either_spelling():
    assert preset_in(["train", "--preset", "paper"]) is PRESETS["paper"]
    assert preset_in(["train", "--preset=trm", "--steps", "3"]) is PRESETS["trm"]
    assert preset_in(["train"]) is PRESETS["laptop"]


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
        (["--mixer", "fancy", "--streams", "2"], "unknown mixer 'fancy'"),
        (["--resume", "latest"], "no checkpoint"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch, options, sentence):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--preset", "laptop", *SIZE, "--out", str(tmp_path / "run"), *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error.replace("\n", " ")
    assert not (tmp_path / "run").exists()
