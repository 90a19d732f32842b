"""The command `jpmhc spectrum`."""

import re

import pytest

from jpmhc import cli
from tests.cli.running import fails_with


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--matrix", "nowhere.npy"], "there is no file nowhere.npy"),
        (["--weight-scale", "2"], "--weight-scale .* needs --activation"),
        (["--matrix", "a.npy", "--streams", "3"], "--streams describes random skips, and --matrix gives them"),
        (["--matrix", "a.npy", "--mixer", "cayley"], "--mixer describes random skips, and --matrix gives them"),
        (["--samples", "3"], "--samples .* needs --simulate"),
        (["--noise", "-1"], "noise must be finite and not negative"),
        (["--depth", "0"], "depth must be a whole number, at least 1, got 0"),
        (["--mixer", "foo"], "no random skip is called 'foo'"),
    ],
)
def test_refuses_in_one_line(options, pattern, capsys, tmp_path):
    fails_with(capsys, pattern, "spectrum", *options, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_runs_end_to_end(capsys, tmp_path):
    (tmp_path / "skip.csv").write_text("0.6,-0.8\n0.8,0.6\n")
    options = ["--matrix", str(tmp_path / "skip.csv"), "--depth", "2", "--method", "z1", "--simulate", "--samples", "3"]
    cli.main(["spectrum", *options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "z1 (exact)" in out
    assert "1.05062 exactly" in out.replace("\n", " ")  # (1 + 0.025)^2
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    assert (tmp_path / "spectrum.csv").read_text().startswith("x,density_x,")


@pytest.mark.filterwarnings("default")
def test_warns_in_one_line(capsys, tmp_path):
    options = ["--mixer", "gaussian", "--streams", "2", "--depth", "2", "--shared", "--method", "z1"]
    cli.main(["spectrum", *options, "--out", str(tmp_path)])
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert re.search("jpmhc: warning: method 'z1'.*'chain' is exact", said[0])


def test_an_unwritable_folder_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to .*file", "spectrum", "--out", str(tmp_path / "file"))
