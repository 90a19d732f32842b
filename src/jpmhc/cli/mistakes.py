"""What is said of a wrong command line: one sentence, where tyro would draw a box of many lines.

tyro's hook for this, `tyro._errors.on_parse_error`, is not yet part of its public interface; pyproject.toml therefore
names the versions that have it.
"""

import contextlib
import difflib
import io
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tyro import _errors
from tyro._arguments import ArgumentDefinition

from jpmhc.cli.command import Main
from jpmhc.cli.numbers import make_registry


@contextlib.contextmanager
def refusing_in_one_sentence(main: Main, words: Sequence[str]) -> Iterator[None]:
    """Make tyro raise a ValueError of one sentence on a wrong command line.

    Args:
        main: The command's function, which is asked for its options where a name is misspelt.
        words: What was typed after the command's name.
    """

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise ValueError(_explain(event, main, words))

    with make_registry(), _errors.on_parse_error(refuse):
        yield


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
    """Say that an argument without a default is missing, and what its help says of it up to the first semicolon."""
    wanted = str(argument.field.helptext).partition(";")[0]
    return f"{argument.display_name()} is missing: {' '.join(wanted.split())}"


def _name_values(argument: ArgumentDefinition) -> str:
    """Return what stands for the option's values in its help, such as INT."""
    return str(argument.lowered.metavar).removeprefix("{None}|")


def _list_options(main: Main, words: Sequence[str]) -> list[str]:
    """Return the names of the command's options, read from its help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help", *words])
    lines = re.findall(r"^\W*--([a-z].*)", text.getvalue(), re.MULTILINE)
    return [name for line in lines for name in re.findall(r"^[\w.-]+|(?<=, --)[\w.-]+", line)]
