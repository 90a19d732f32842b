"""The command `jpmhc demo`."""

from jpmhc import cli
from tests.cli.running import fails_with


def test_runs_end_to_end(capsys, tmp_path):
    sizes = ["--mixers", "cayley", "--depth", "2", "--dim", "8", "--steps", "3", "--batch", "4", "--seeds", "1"]
    cli.main(["demo", *sizes, "--workers", "1", "--out", str(tmp_path)])
    told = capsys.readouterr()
    assert "training 2 pre-norm MLP layers" in told.err
    assert "2 pre-norm MLP layers" in told.out
    assert "±" not in told.out.partition("loss: held-out")[0] + told.out.partition("1. Loss")[2]  # one seed: no spread
    assert "1 seed:" in told.out
    assert f"open {tmp_path / 'demo.html'}" in told.out
    assert (tmp_path / "demo.html").stat().st_size > 10_000


def test_the_option_that_is_wrong_is_named(capsys, tmp_path):
    fails_with(capsys, "steps must be a whole number, at least 1, got 0", "demo", "--steps", "0")
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to .*file", "demo", "--out", str(tmp_path / "file"))
