"""Dataclasses of the library in the form in which the command line takes them.

tyro reads from annotations how a field is typed. The library does not import tyro, so a command makes a form of the
library's dataclass here, with annotations of its own, and turns what was typed back into the library's.
"""

import dataclasses
from typing import Any, TypeVar

Library = TypeVar("Library")


def make_option_form(default: Any, **fields: tuple[Any, Any]) -> Any:
    """Make an instance of a derived dataclass in which some fields have other annotations and values.

    Args:
        default: An instance of the library's dataclass; all other values are taken from it.
        fields: The annotation and the value of each field that differs, or that is new.
    """
    cls = type(default)
    new = [(name, hint, dataclasses.field(default=value)) for name, (hint, value) in fields.items()]
    form = dataclasses.make_dataclass(cls.__name__, new, bases=(cls,), frozen=True, namespace={"__doc__": cls.__doc__})
    known = {field.name: getattr(default, field.name) for field in dataclasses.fields(cls)}
    return form(**{**known, **{name: value for name, (_, value) in fields.items()}})


def read_option_form(form: Any, cls: type[Library], **changes: Any) -> Library:
    """Turn what was typed back into the library's dataclass, with some fields changed."""
    fields = {field.name: getattr(form, field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{**fields, **changes})
