"""The command line: what users type wrong ends in one sentence, before any work."""

import re
from pathlib import Path

import pytest

import jpmhc
from jpmhc import cli


def fails_with(capsys, pattern: str, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.search(pattern, lines[0])


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"jpmhc {jpmhc.__version__}"


@pytest.mark.parametrize("command", ["demo", "spectrum", "panel", "generators", "train", "evaluate", "predict"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"Example: jpmhc {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named", "help"),
    [
        (["train", "--stesp", "3"], "--steps", "jpmhc train --help"),
        (["train", "--steps", "many"], "'many'", "jpmhc train --help"),
        (["evaluate", "--varants", "3"], "--variants", "jpmhc evaluate --help"),
        (["trian"], "trian", "jpmhc --help"),
    ],
)
def test_mistakes_point_to_the_help_of_their_command(words, named, help, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert named in said
    assert {line for line in re.findall(r"jpmhc[a-z ]* --help", said)} == {help}


@pytest.mark.parametrize("command", ["demo", "spectrum", "panel"])
def test_results_that_cannot_be_written_are_refused_before_the_work(command, capsys, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    fails_with(capsys, "cannot write to .*file", command, "--out", str(occupied))


def test_generators_refuses_an_unwritable_file_before_the_search(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to", "generators", "--json", str(tmp_path / "file" / "n4.json"))
    fails_with(capsys, "is a folder", "generators", "--json", str(tmp_path))


def test_demo_runs_end_to_end(capsys, tmp_path):
    sizes = ["--depth", "2", "--dim", "8", "--steps", "3", "--batch", "4", "--streams", "3"]
    cli.main(["demo", *sizes, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "cayley" in out
    assert "kronecker" not in out  # three streams are no power of two
    assert (Path(tmp_path) / "demo.png").stat().st_size > 10_000


def test_demo_names_the_option_that_is_wrong(capsys, tmp_path):
    fails_with(capsys, "steps must be at least 1, got 0", "demo", "--steps", "0", "--out", str(tmp_path))
    fails_with(capsys, "diverged at step .* learning rate", "demo", "--learning-rate", "1e30", "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--matrix", "nowhere.npy"], "there is no file nowhere.npy"),
        (["--weight-scale", "2"], "--weight-scale .* needs --activation"),
        (["--matrix", "a.npy", "--streams", "3"], "--streams describes random skips, and --matrix gives them"),
        (["--matrix", "a.npy", "--mixer", "cayley"], "--mixer describes random skips, and --matrix gives them"),
        (["--samples", "3"], "--samples .* needs --simulate"),
        (["--noise", "-1"], "noise must be finite and not negative"),
        (["--depth", "0"], "depth must be a whole number, at least 1, not 0"),
        (["--mixer", "foo"], "no random skip is called 'foo'"),
    ],
)
def test_spectrum_refuses_in_one_line(options, pattern, capsys, tmp_path):
    fails_with(capsys, pattern, "spectrum", *options, "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_spectrum_runs_end_to_end(capsys, tmp_path):
    (tmp_path / "skip.csv").write_text("0.6,-0.8\n0.8,0.6\n")
    options = ["--matrix", str(tmp_path / "skip.csv"), "--depth", "2", "--method", "z1", "--simulate", "--samples", "3"]
    cli.main(["spectrum", *options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "z1 (exact)" in out
    assert "1.05062 exactly" in out.replace("\n", " ")  # (1 + 0.025)^2
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    assert (tmp_path / "spectrum.csv").read_text().startswith("x,density_x,")


@pytest.mark.filterwarnings("default")
def test_spectrum_warns_in_one_line(capsys, tmp_path):
    options = ["--mixer", "gaussian", "--streams", "2", "--depth", "2", "--shared", "--method", "z1"]
    cli.main(["spectrum", *options, "--out", str(tmp_path)])
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert re.search("jpmhc: warning: method 'z1'.*'chain' is exact", said[0])


def test_panel_runs_end_to_end_and_refuses_before_the_first_cell(capsys, tmp_path):
    sizes = ["--mixers", "identity", "--depths", "1", "--samples", "2", "--streams", "2", "--width", "5"]
    cli.main(["panel", *sizes, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    for name in ("panel.png", "panel_log.png", "panel.csv"):
        assert f"wrote {tmp_path / name}" in out
        assert (tmp_path / name).stat().st_size > 100
    fails_with(capsys, "no random skip is called 'foo'", "panel", "--mixers", "identity", "foo")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted() -> None:
        """Wait."""
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "panel", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["panel"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "jpmhc: interrupted\n"
