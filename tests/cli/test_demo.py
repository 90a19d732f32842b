"""The command `jpmhc demo`."""

from pathlib import Path

from jpmhc import cli
from tests.cli.running import fails_with


def test_runs_end_to_end(capsys, tmp_path):
    sizes = ["--depth", "2", "--dim", "8", "--steps", "3", "--batch", "4", "--streams", "3"]
    cli.main(["demo", *sizes, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "cayley" in out
    assert "kronecker" not in out  # three streams are no power of two
    assert (Path(tmp_path) / "demo.png").stat().st_size > 10_000


def test_the_option_that_is_wrong_is_named(capsys, tmp_path):
    fails_with(capsys, "steps must be at least 1, got 0", "demo", "--steps", "0", "--out", str(tmp_path))
    fails_with(capsys, "diverged at step .* learning rate", "demo", "--learning-rate", "1e30", "--out", str(tmp_path))


def test_an_unwritable_folder_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to .*file", "demo", "--out", str(tmp_path / "file"))
