"""Reading numbers from the command line, so that a word that is none is answered with one sentence."""

from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_NAMES = {int: "a whole number", float: "a number"}


class NotANumber(Exception):
    """A word stands where a number belongs. It is no ValueError, because tyro would put one into a box."""

    def __init__(self, word: str, wanted: str) -> None:
        super().__init__(word, wanted)
        self.word, self.wanted = word, wanted

    def explain(self, words: list[str]) -> str:
        """Say which option of the command line was given the word."""
        joined = [word.partition("=")[0] for word in words if word.endswith(f"={self.word}")]
        place = words.index(self.word) if self.word in words else 0
        options = joined or [word for word in words[:place] if word.startswith("--")][-1:]
        return f"{options[0] if options else 'this'} takes {self.wanted}, not {self.word!r}"


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
        except ValueError:
            raise NotANumber(words[0], _NAMES[kind]) from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int if kind is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )
