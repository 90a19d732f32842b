"""A command's `main`: it parses what was typed into the arguments of the command's function, and calls that."""

from collections.abc import Callable, Sequence

import tyro

Main = Callable[[Sequence[str]], None]


def make_main(function: Callable[..., None]) -> Main:
    """Return the `main` of a command that is a function: `import_trm` is the command `jpmhc import-trm`."""

    def main(words: Sequence[str]) -> None:
        tyro.cli(function, prog=f"jpmhc {function.__name__.replace('_', '-')}", args=words)

    return main
