"""What a command says while it works: the stage that goes on, and warnings in one line each."""

import math
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_SECONDS = 2.0  # between lines where the output is not a terminal


class StageProgress:
    """Shows which stage of the work goes on: with a bar on a terminal, as a line now and then elsewhere."""

    def __init__(self, stages: int | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.console, self.spoken = Console(stderr=True, soft_wrap=True, highlight=False), -math.inf
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=stages)
        self.begun = False

    def __enter__(self) -> "StageProgress":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def show(self, stage: str) -> None:
        """Show that a stage begins and the one before it has ended."""
        self.bar.update(self.task, description=stage, advance=1 if self.begun else 0)
        self.begun = True
        if not self.console.is_terminal and time.monotonic() - self.spoken > _SECONDS:
            self.spoken = time.monotonic()
            self.console.print(f"{stage} …", markup=False)

    def finish(self, sentence: str) -> None:
        """Say that all stages have ended, where they were said as lines; on a terminal the bar goes away by itself."""
        if not self.console.is_terminal and self.begun:
            self.console.print(sentence, markup=False)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings without the line of code they come from, as a user of a command should see them."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place: print(f"jpmhc: warning: {message}", file=sys.stderr)
        yield
