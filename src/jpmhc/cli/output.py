"""The output of commands: the results' folder, the progress display, warnings, and which process prints."""

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_SECONDS = 2.0  # between progress lines if the output is not a terminal


@contextlib.contextmanager
def result_folder(folder: Path) -> Iterator[None]:
    """Make the folder for the results at the beginning of the context; remove it if the context raises an error."""
    new_folders = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as refusal:
        raise ValueError(f"cannot write to {folder} ({refusal.strerror}); name a folder that can be made") from refusal
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for one in new_folders:
                one.rmdir()
        raise


def is_first_process() -> bool:
    """Return whether this process prints: of torchrun's processes, only the first one prints."""
    return int(os.environ.get("RANK", "0")) == 0


class StageProgress:
    """A display of the current stage: a bar on a terminal, or elsewhere a line every few seconds."""

    def __init__(self, stages: int | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.console, self.last_line = Console(stderr=True, soft_wrap=True, highlight=False), -math.inf
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=stages)
        self.has_begun = False

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, stage: str) -> None:
        """Show the name of a stage that begins, and count the previous stage as finished."""
        self.bar.update(self.task, description=stage, advance=1 if self.has_begun else 0)
        self.has_begun = True
        if not self.console.is_terminal and time.monotonic() - self.last_line > _SECONDS:
            self.last_line = time.monotonic()
            self.console.print(f"{stage} …", markup=False)

    def finish(self, sentence: str) -> None:
        """Print a closing sentence, except on a terminal, where the bar disappears."""
        if not self.console.is_terminal and self.has_begun:
            self.console.print(sentence, markup=False)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print each warning in one line, without the line of code that raised the warning."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *source: print(f"jpmhc: warning: {message}", file=sys.stderr)
        yield
