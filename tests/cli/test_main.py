"""The command line as a whole: help, version, what is imported, and what is said of wrong commands."""

import re
import subprocess
import sys

import pytest

import jpmhc
from jpmhc import cli
from jpmhc.cli import panel
from tests.cli.running import fails_with

HEAVY = ("matplotlib", "rich", "scipy", "torch", "tyro")


def loaded(code: str) -> set[str]:
    """The modules that are loaded after the code has run in a Python of its own."""
    script = f"{code}\nimport sys\nprint('loaded:', *sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ended.stdout.splitlines()[-1].split()[1:])


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"jpmhc {jpmhc.__version__}"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option):
    found = loaded(f"from jpmhc.cli import main; main(['{option}'])")
    assert not found & set(HEAVY)
    assert {name for name in found if name.startswith("jpmhc")} == {"jpmhc", "jpmhc.cli"}


def test_help_of_a_command_imports_that_command_alone():
    found = loaded("from jpmhc.cli import main\ntry: main(['generators', '--help'])\nexcept SystemExit: pass")
    assert {name for name in found if re.fullmatch(r"jpmhc\.cli\.\w+", name)} == {
        "jpmhc.cli.command",
        "jpmhc.cli.generators",
    }
    assert not found & {"jpmhc.connections", "jpmhc.experiments", "matplotlib"}


def test_help_of_the_commands_does_not_wait_for_what_draws():
    """It is matplotlib that would bring it over 1.3 times `import torch`."""
    asking = (
        "from jpmhc import cli\nfor name in cli.COMMANDS:\n try: cli.main([name, '--help'])\n except SystemExit: pass"
    )
    assert not loaded(f"from jpmhc import cli\n{asking}") & {"matplotlib", "scipy"}


def test_help_lists_every_command_with_its_description(capsys):
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, description in cli.COMMANDS.items():
        assert f"  {name:10}  {description}" in lines
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_its_description_and_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert cli.COMMANDS[command] in said
    examples = [line for line in said.splitlines() if "Example:" in line]
    assert examples
    assert all(line.startswith(f"Example: jpmhc {command} ") and line.count("jpmhc") == 1 for line in examples)


def test_the_help_of_an_option_is_filled_whatever_lines_the_source_has(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "None: the last step. --resume latest continues to the last step." in capsys.readouterr().out


def test_no_command_is_answered_with_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "usage: jpmhc COMMAND" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_a_guess(capsys):
    fails_with(capsys, r"no command 'trian' \(did you mean train\?\); jpmhc --help", "trian")
    fails_with(capsys, r"no command '--frobnicate'; jpmhc --help", "--frobnicate")


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("demo", "rich", "cli"), ("panel", "matplotlib", "cli"), ("train", "tyro", "cli")]
)
def test_a_missing_extra_is_one_sentence(command, package, extra):
    script = f"import sys; sys.modules[{package!r}] = None\nfrom jpmhc.cli import main\nmain([{command!r}])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == f"jpmhc {command} needs {package}: pip install 'jpmhc[{extra}]'\n"


def test_ctrl_c_while_packages_are_imported_is_one_line():
    script = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from jpmhc.cli import main
main(["train"])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == "jpmhc: interrupted\n"


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(panel, "main", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["panel"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "jpmhc: interrupted\n"
