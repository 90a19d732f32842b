"""A command's `main`: it parses the words of a command line, and explains wrong ones in one sentence.

tyro reads the options of a command from the arguments of its function, and would draw a box of many lines about a wrong
command line. Its hook for errors, `tyro._errors.on_parse_error`, is not public yet; pyproject.toml names the versions
that have it.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from typing import Any, NoReturn

import tyro
from tyro import _errors
from tyro._arguments import ArgumentDefinition
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Main = Callable[[Sequence[str]], None]  # runs a command with the words after its name
_NUMBERS = {int: "a whole number", float: "a number"}


def make_main(function: Callable[..., None]) -> Main:
    """Return the `main` of a command from its function: `import_trm` is the command `jpmhc import-trm`."""

    def main(words: Sequence[str]) -> None:
        parse_and_call(function, f"jpmhc {function.__name__.replace('_', '-')}", words)

    return main


def parse_and_call(function: Callable[..., None], program: str, words: Sequence[str]) -> None:
    """Call a function with the arguments that the words name.

    Args:
        function: The function. Its docstring becomes the help, with each "Example:" in a line of its own.
        program: The name of the command in its help.
        words: The words after the command's name.
    """
    text = cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
    tyro.cli(function, prog=program, args=words, description=re.sub(r"\n+Example:", "\n\nExample:", text))


@contextlib.contextmanager
def refusing_in_one_sentence(main: Main, words: Sequence[str]) -> Iterator[None]:
    """Make tyro raise a ValueError of one sentence on a wrong command line.

    Args:
        main: The command's `main`, which lists the options where a name is misspelt.
        words: The words after the command's name.
    """

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise ValueError(_explain(event, main, words))

    registry = ConstructorRegistry()
    registry.primitive_rule(_read_number)
    with registry, _errors.on_parse_error(refuse):
        yield


def _read_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return the rule by which tyro reads a number, so that its errors are in plain English."""
    kind: Any = info.type
    if kind is not int and kind is not float:
        return None

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:  # after a TypeError tyro tries no other meaning of the word, and keeps the sentence
            raise TypeError(f"takes {_NUMBERS[kind]}, not {words[0]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int if kind is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )


def _explain(event: _errors.ParseErrorEvent, main: Main, words: Sequence[str]) -> str:
    """Say what is wrong with the command line, and what would be right."""
    more = f"{event.prog} --help explains the options"
    match event:
        case _errors.UnrecognizedArgs(tokens=[word, *_]) | _errors.MissingArgs(unrecognized_tokens=[word, *_]):
            if not word.startswith("-") or "--" in words:  # after -- nothing is an option
                return f"the word {word!r} belongs to no option; {more}"
            typed = word.partition("=")[0]
            near = difflib.get_close_matches(typed.lstrip("-"), _list_options(main, words), n=1)
            guess = f" (did you mean --{near[0]}?)" if near else ""
            return f"there is no option {typed}{guess}; {more}"
        case _errors.InvalidChoice(argument=argument, value=value, choices=choices):
            return f"{argument.display_name()} takes one of {', '.join(choices)}, not {value!r}; {more}"
        case _errors.MissingArgs(missing_arguments=[first, *_]):
            return f"{_describe_missing(first.arg)}; {more}"
        case _errors.BadValue(argument=argument) if argument.is_positional():
            return f"{_describe_missing(argument)}; {more}"
        case _errors.BadValue(argument=argument):
            return f"{argument.display_name()} must be followed by {_name_values(argument)}; {more}"
        case _errors.InstantiationFailure(message=message, argument=ArgumentDefinition() as argument):
            reason = message if message.startswith("takes ") else f"must be followed by {_name_values(argument)}"
            return f"{argument.display_name()} {reason}; {more}"
        case _errors.InstantiationFailure(message=message):
            return message
    return f"{event.prog} does not understand its options; {more}"


def _describe_missing(argument: ArgumentDefinition) -> str:
    """Say that an argument without a default is missing, with the first clause of its help."""
    wanted = str(argument.field.helptext).partition(";")[0]
    return f"{argument.display_name()} is missing: {' '.join(wanted.split())}"


def _name_values(argument: ArgumentDefinition) -> str:
    """Return the placeholder of the option's values in its help, such as INT."""
    return str(argument.lowered.metavar).removeprefix("{None}|")


def _list_options(main: Main, words: Sequence[str]) -> list[str]:
    """Return the names of the command's options, read from its help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help", *words])
    lines = re.findall(r"^\W*--([a-z].*)", text.getvalue(), re.MULTILINE)
    return [name for line in lines for name in re.findall(r"^[\w.-]+|(?<=, --)[\w.-]+", line)]
