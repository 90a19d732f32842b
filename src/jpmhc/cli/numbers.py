"""Reading numbers from the command line, so that a word that is none is answered in plain English."""

from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_NAMES = {int: "a whole number", float: "a number"}


def make_registry() -> ConstructorRegistry:
    """Return the rules by which tyro reads numbers while the registry is entered."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_read_number)
    return registry


def _read_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind: Any = info.type
    if kind is not int and kind is not float:
        return None

    def read(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:  # after a TypeError tyro tries no other meaning of the word, and keeps the sentence
            raise TypeError(f"takes {_NAMES[kind]}, not {words[0]!r}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int if kind is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )
