"""A wrong command line is answered with one sentence, and nothing is written."""

import re

import pytest

from jpmhc import cli
from tests.cli.running import fails_with

# Words that a command takes without an option.
REQUIRED = {"diagnose": ["m:f"], "predict": ["run"], "import-trm": ["file"]}
# The option that takes a file or folder, if it is not --out.
FILE_OPTION = {"generators": "--json"}
TASKS = "--task.kind takes one of sudoku, arc, not 'chess'"
MODEL = "model is missing: FILE.py:FUNCTION or MODULE:FUNCTION, a function"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_refuses_an_unknown_option(capsys, command):
    sentence = f"^jpmhc: there is no option --xyzzy; jpmhc {command} --help explains the options$"
    fails_with(capsys, sentence, command, *REQUIRED.get(command, []), "--xyzzy=3")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_refuses_a_word_too_many(capsys, command):
    if command == "compare":  # its first word is a task
        fails_with(
            capsys,
            "^jpmhc: no task is called 'stray'; choose one of language, arc-decoder, sudoku, arc$",
            command,
            "stray",
        )
    elif command in ("evaluate", "report"):  # they take any number of words
        fails_with(capsys, "no option --xyzzy;", command, "run", "another", "--xyzzy")
    else:
        sentence = f"^jpmhc: the word 'stray' belongs to no option; jpmhc {command} --help explains the options$"
        fails_with(capsys, sentence, command, *REQUIRED.get(command, []), "stray")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_refuses_an_option_without_its_value(capsys, command):
    option = FILE_OPTION.get(command, "--out")
    fails_with(capsys, f"^jpmhc: {option} must be followed by PATH; jpmhc {command} --help", command, option)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train --stesp 3", "there is no option --stesp (did you mean --steps?); jpmhc train --help"),
        ("train --no-compil", "there is no option --no-compil (did you mean --no-compile?); jpmhc train --help"),
        ("train --task.knd=arc", "there is no option --task.knd (did you mean --task.kind?); jpmhc train --help"),
        ("train --task.kind arc --task.sde 4", "there is no option --task.sde (did you mean --task.side?);"),
        ("evaluate --varants 3", "there is no option --varants (did you mean --variants?); jpmhc evaluate --help"),
        ("compare sudoku --arm cayley", "there is no option --arm (did you mean --arms?); jpmhc compare --help"),
        ("spectrum -dept 3", "there is no option -dept (did you mean --depth?); jpmhc spectrum --help"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_name(capsys, words, sentence):
    fails_with(capsys, f"^jpmhc: {re.escape(sentence)}", *words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("spectrum --noise abc", "--noise takes a number, not 'abc'; jpmhc spectrum --help"),
        ("spectrum --depth=2.5", "--depth takes a whole number, not '2.5'; jpmhc spectrum --help"),
        ("spectrum --mixer two --depth two", "--depth takes a whole number, not 'two'; jpmhc spectrum --help"),
        ("panel --depths 1 two", "--depths takes a whole number, not 'two'; jpmhc panel --help"),
        ("train --task.puzzles many", "--task.puzzles takes a whole number, not 'many'; jpmhc train --help"),
        ("recommend --scales 1 b", "--scales takes a number, not 'b'; jpmhc recommend --help"),
        ("recommend --scales 1", "--scales must be followed by FLOAT FLOAT; jpmhc recommend --help"),
        ("train --task.kind chess", f"{TASKS}; jpmhc train --help"),
        ("train --task.kind", "--task.kind must be followed by {sudoku,arc}; jpmhc train --help"),
        ("recommend --norm middle", "--norm takes one of pre, post, not 'middle'; jpmhc recommend --help"),
        ("diagnose", MODEL),
        ("diagnose --xyzzy", MODEL),
        ("diagnose m:f --between a", "--between must be followed by FIRST LAST; jpmhc diagnose --help"),
        ("diagnose json:dumps", "json:dumps has arguments; name a function without arguments"),
        ("diagnose json:", "a model is named FILE.py:FUNCTION or MODULE:FUNCTION, and 'json:' lacks one of the two"),
        ("diagnose json:loads --device tpu", "device must be cpu or cuda, not 'tpu'"),
        ("spectrum --mixer nonsense", "no random skip is called 'nonsense'; choose one of identity,"),
        ("spectrum --method guess", "no method is called 'guess'; choose one of chain,"),
        ("spectrum --eta 0", "eta must be positive and finite, got 0.0"),
        ("panel --samples 1", "a panel needs at least one mixer, at least one depth and as many sample counts"),
        ("demo --mixers", "mixers must name at least one mixer, such as rotation,"),
        ("compare sudoku --arms", "arms must be one or more, each named once, not none"),
        ("recommend --spectra -1", "spectra must be a whole number, at least 0, got -1"),
        ("recommend --depth-range 3 0", "depth must be a whole number, at least 1, got 0"),
        ("explore --out page", "a page's name must end in .html, got page"),
        ("generators --json /", "--json names a file for the result, and / is a folder"),
    ],
)
def test_a_wrong_value_is_answered_with_what_would_be_right(capsys, words, sentence):
    fails_with(capsys, f"^jpmhc: {re.escape(sentence)}", *words.split())
