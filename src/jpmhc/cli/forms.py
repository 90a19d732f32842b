"""Forms: dataclasses that extend the library's dataclasses by annotations for the command line.

tyro reads from annotations how a user gives a field. The library does not import tyro, so a command makes a form with
annotations from the library's dataclass, lets tyro fill it in, and turns the result back into the library's dataclass.
"""

import dataclasses
from typing import Any, TypeVar

Library = TypeVar("Library")


def make_option_form(default: Any, **fields: tuple[Any, Any]) -> Any:
    """Return a form: an instance of a derived dataclass with new annotations and values of some fields.

    Args:
        default: An instance of the library's dataclass, which has the values of all other fields.
        fields: The annotation and the value of each changed or new field.
    """
    cls = type(default)
    new = [(name, hint, dataclasses.field(default=value)) for name, (hint, value) in fields.items()]
    form = dataclasses.make_dataclass(cls.__name__, new, bases=(cls,), frozen=True, namespace={"__doc__": cls.__doc__})
    known = {field.name: getattr(default, field.name) for field in dataclasses.fields(cls)}
    return form(**{**known, **{name: value for name, (_, value) in fields.items()}})


def read_option_form(form: Any, cls: type[Library], **changes: Any) -> Library:
    """Turn a form with the parsed options back into the library's dataclass.

    Args:
        form: The form.
        cls: The library's dataclass.
        changes: Values that replace the form's values.
    """
    fields = {field.name: getattr(form, field.name) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{**fields, **changes})
