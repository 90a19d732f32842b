"""The command `jpmhc compare`."""

import json

import pytest

from jpmhc.cli import main
from tests.cli.running import closed_pipe, fails_with
from tests.experiments.text_files import make_token_folder

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
SIZES = {"dim": 16, "heads": 2, "layers": 1, "length": 16, "batch": 2, "steps": 3, "final-validation-rows": 4}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def test_it_prints_a_table_and_draws_a_figure(tmp_path, capsys):
    words = ["--text", str(make_token_folder()), "--preset", "tiny", *TINY, "--arms", "plain", "cayley:streams=2"]
    main(["compare", "language", *words, "--seeds", "0", "1", "--device", "cpu", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "| arm | runs | parameters | learning rate | loss | minus plain | 95 % interval |" in shown
    assert (tmp_path / "comparison.md").read_text() in shown
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "Comparison of mixers" in (tmp_path / "comparison.html").read_text()
    row = json.loads((tmp_path / "comparison.json").read_text())["summary"][1]
    assert f"| cayley:streams=2 | 2 | {row['parameters']:,} | 0.003 | {row['metrics']['loss']['mean']:.4f} ±" in shown


def test_the_help_says_what_a_run_takes(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    shown = capsys.readouterr().out
    assert "jpmhc compare language --text docs src --preset tiny" in shown
    assert "59 million tokens" in shown


def test_it_goes_on_when_nobody_reads_its_output(tmp_path):
    text = ["--text", str(make_token_folder()), "--preset", "tiny"]
    options = ["--arms", "plain", "cayley", "--processes", "2", "--device", "cpu"]
    with closed_pipe():
        main(["compare", *text, *TINY, *options, "--out", str(tmp_path)])
    assert (tmp_path / "comparison.html").exists()


def test_the_options_are_those_of_the_task(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    text = ["language", "--text", str(make_token_folder())]
    fails_with(capsys, "dim must be a multiple of 2 · heads", "compare", *text, "--dim", "10", *out)
    fails_with(capsys, "so training would read them", "compare", *text, *out)
    fails_with(capsys, "needs at least 2 streams", "compare", "sudoku", "--preset", "laptop", "--streams", "1", *out)
    fails_with(capsys, "decay_at must", "compare", "sudoku", "--decay-at", "2", "--decay-to", "1", *out)
    fails_with(capsys, "no mixer is called 'none'", "compare", *text, "--preset", "tiny", "--arms", "none", *out)
    assert not list(tmp_path.iterdir())
