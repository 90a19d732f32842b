"""The command `jpmhc compare`."""

import json

from jpmhc.cli import main
from tests.cli.running import closed_pipe, fails_with

SIZES = {"dim": 16, "heads": 2, "layers": 1, "length": 16, "batch": 2, "steps": 3, "validation-windows": 4}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def test_it_prints_a_table_and_draws_a_figure(tmp_path, capsys):
    main(
        [
            "compare",
            *TINY,
            "--mixers",
            "plain",
            "cayley",
            "--seeds",
            "0",
            "1",
            "--device",
            "cpu",
            "--out",
            str(tmp_path),
        ]
    )
    shown = capsys.readouterr().out
    assert "| mixer | runs | parameters | loss | difference to plain | 95 % interval |" in shown
    assert (tmp_path / "comparison.md").read_text() in shown
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "Comparison of mixers" in (tmp_path / "comparison.html").read_text()
    row = json.loads((tmp_path / "comparison.json").read_text())["summary"][1]
    assert f"| cayley | 2 | {row['parameters']:,} | {row['metrics']['loss']['mean']:.4f} ±" in shown


def test_it_goes_on_when_nobody_reads_its_output(tmp_path):
    options = ["--mixers", "plain", "cayley", "--seeds", "0", "--processes", "2", "--device", "cpu"]
    with closed_pipe():
        main(["compare", *TINY, *options, "--out", str(tmp_path)])
    assert (tmp_path / "comparison.html").exists()


def test_the_options_are_those_of_the_task(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    fails_with(capsys, "dim must be a multiple of 2 · heads", "compare", "--dim", "10", *out)
    fails_with(capsys, "needs at least 2 streams", "compare", "--preset", "laptop", "--streams", "1", *out)
    fails_with(capsys, "decay_at must", "compare", "--task.kind", "sudoku", "--decay-at", "2", "--decay-to", "1", *out)
    fails_with(capsys, "no mixer is called 'none'", "compare", "--mixers", "none", *out)
    assert not list(tmp_path.iterdir())
