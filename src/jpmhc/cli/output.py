"""The output of commands: the folder of results, the progress, and the process that prints."""

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

_SECONDS = 2.0  # between lines where the output is not a terminal


@contextlib.contextmanager
def result_folder(folder: Path) -> Iterator[None]:
    """Make the folder for the results before any work is done that could be lost; remove it if the work fails."""
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
        with contextlib.suppress(OSError):  # a folder that holds something stays
            for one in new_folders:
                one.rmdir()
        raise


def is_first_process() -> bool:
    """Return whether this process prints: of the processes of torchrun only the first does."""
    return int(os.environ.get("RANK", "0")) == 0


class StageProgress:
    """Shows the current stage of the work: with a bar on a terminal, elsewhere as a line now and then."""

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
        """Show that a stage begins and the one before it has ended."""
        self.bar.update(self.task, description=stage, advance=1 if self.has_begun else 0)
        self.has_begun = True
        if not self.console.is_terminal and time.monotonic() - self.last_line > _SECONDS:
            self.last_line = time.monotonic()
            self.console.print(f"{stage} …", markup=False)

    def finish(self, sentence: str) -> None:
        """Print that all stages have ended; on a terminal the bar goes away by itself."""
        if not self.console.is_terminal and self.has_begun:
            self.console.print(sentence, markup=False)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings without the line of code that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *source: print(f"jpmhc: warning: {message}", file=sys.stderr)
        yield
