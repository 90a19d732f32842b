"""Functions that all commands share, to parse options, refuse a wrong command line in one sentence, and print warnings.

A form is an instance of a dataclass that is derived from a dataclass of the library. The derived class adds
annotations, which tell tyro how a user gives each field. The library does not import tyro: a command makes a form from
the library's dataclass, lets tyro fill it in, and turns the result back into the library's dataclass.

tyro reads a command's options from the arguments of its function. By default, tyro prints a box of many lines about a
wrong command line. The hook `tyro._errors.on_parse_error`, which replaces that box, and the function that reads a
field's help are not public yet; pyproject.toml names the versions of tyro that have them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import tyro
from tyro import _errors
from tyro._arguments import ArgumentDefinition
from tyro._docstrings import get_field_docstring
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

Form = Any  # an instance of a dataclass that `make_option_form` has derived
Field = tuple[Any, Any]  # the annotation and the value of a form's field
Main = Callable[[Sequence[str]], None]  # runs a command; its argument is the words after the command's name
_NUMBERS = {int: "a whole number", float: "a number"}


def make_main(function: Callable[..., None]) -> Main:
    """Return the `main` of a command, which is named after its function: `import_trm` is `jpmhc import-trm`."""

    def main(words: Sequence[str]) -> None:
        parse_and_call(function, f"jpmhc {function.__name__.replace('_', '-')}", words)

    return main


def parse_and_call(function: Callable[..., None], program: str, words: Sequence[str]) -> None:
    """Parse the words after a command's name as a function's arguments, and call the function.

    The function's docstring becomes the help of the program, with each "Example:" on a line of its own.
    """
    text = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
    tyro.cli(function, prog=program, args=words, description=re.sub(r"\n+Example:", "\n\nExample:", text))


def options_of(function: Callable[..., Any], *names: str) -> Any:
    """Return an annotation that makes the keyword arguments `names` of a library function options of a command.

    The options have no prefix, and their help comes from the function's docstring. The value of the command's annotated
    argument is a dict of the keyword arguments.
    """

    def keep(**options: Any) -> dict[str, Any]:
        return options

    signature = inspect.signature(function, eval_str=True)
    chosen = [signature.parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]
    keep.__signature__ = signature.replace(parameters=chosen, return_annotation=dict)  # type: ignore[attr-defined]
    keep.__annotations__ = {parameter.name: parameter.annotation for parameter in chosen}
    keep.__doc__ = function.__doc__
    return Annotated[dict, tyro.conf.arg(name="", constructor=keep)]


def make_option_form(default: Any, **fields: Field) -> Form:
    """Return a form of the dataclass of `default`, in which `fields` are changed or new.

    A field of `fields` is a pair of an annotation and a value, which may be another form. All other fields have the
    values of `default`, which may be the dataclass itself. The values of a form are not checked. The form's docstring
    has each field's help on one line, because tyro keeps the line breaks of indented docstrings, and finds comments
    beside fields only where a class has source code.
    """
    cls: Any = default if isinstance(default, type) else type(default)
    new = [(name, hint, dataclasses.field(default=value)) for name, (hint, value) in fields.items()]
    helps = {field.name: get_field_docstring(cls, field.name, ()) for field in dataclasses.fields(cls)}
    lines = [f"    {name}: {' '.join((text or '').split())}" for name, text in helps.items()]
    namespace = {"__doc__": "\n".join([cls.__doc__ or "", "", "Args:", *lines]), "_library_class": cls}
    namespace["__post_init__"] = lambda form: None
    form = dataclasses.make_dataclass(cls.__name__, new, bases=(cls,), frozen=True, namespace=namespace)
    known = {field.name: getattr(default, field.name) for field in dataclasses.fields(cls) if field.name not in fields}
    return form(**known, **{name: value for name, (_, value) in fields.items()})


def read_option_form(form: Form, **changes: Any) -> Any:
    """Return an instance of the library's dataclass with a form's values, some of them replaced by `changes`.

    A field that is a form becomes an instance of its dataclass, too.
    """
    cls = form._library_class
    values = {field.name: getattr(form, field.name) for field in dataclasses.fields(cls)} | changes
    return cls(**{name: read_option_form(v) if hasattr(v, "_library_class") else v for name, v in values.items()})


def is_first_process() -> bool:
    """Return whether this process prints: of torchrun's processes, only the first one prints."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Return a context in which a warning is one printed line, without the line of code that raised the warning."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *source: print(f"jpmhc: warning: {message}", file=sys.stderr)
        yield


@contextlib.contextmanager
def refusing_in_one_sentence(main: Main, words: Sequence[str]) -> Iterator[None]:
    """Return a context in which tyro raises a ValueError with one sentence for a wrong command line.

    The help of the command's `main` gives the option names for suggestions.
    """

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        raise ValueError(_explain(event, main, words))

    registry = ConstructorRegistry()
    registry.primitive_rule(_read_number)
    with registry, _errors.on_parse_error(refuse):
        yield


def _read_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Return tyro's rule to parse a number, with errors in plain English; None for other types."""
    kind: Any = info.type
    if kind is not int and kind is not float:
        return None

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:  # after a TypeError tyro tries no other type, and keeps the message
            raise TypeError(f"takes {_NUMBERS[kind]}, not {words[0]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int if kind is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )


def _explain(event: _errors.ParseErrorEvent, main: Main, words: Sequence[str]) -> str:
    """Return a sentence that says what is wrong with the command line, and what would be right."""
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
    """Return a sentence about a missing argument, with the first clause of the argument's help."""
    wanted = str(argument.field.helptext).partition(";")[0].rstrip(".")
    return f"{argument.display_name()} is missing: {' '.join(wanted.split())}"


def _name_values(argument: ArgumentDefinition) -> str:
    """Return the placeholder of an option's values in the help, such as INT."""
    return str(argument.lowered.metavar).removeprefix("{None}|")


def _list_options(main: Main, words: Sequence[str]) -> list[str]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help", *words])
    lines = re.findall(r"^\W*--([a-z].*)", text.getvalue(), re.MULTILINE)
    return [name for line in lines for name in re.findall(r"^[\w.-]+|(?<=, --)[\w.-]+", line)]
