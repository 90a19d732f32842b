"""How far an evaluation has come."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS = 10.0  # between lines where the output is not a terminal


class RowProgress:
    """A bar for each checkpoint on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("rows"))
        self.bar = Bar(*columns, TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal)
        self.jobs: dict[str, TaskID] = {}
        self.started = self.spoken = time.monotonic()

    def show(self, name: str, done: int, total: int) -> None:
        """`done` of `total` rows of the evaluation called `name` are answered."""
        if name not in self.jobs:
            self.jobs[name] = self.bar.add_task(name, total=total)
        self.bar.update(self.jobs[name], completed=done)
        if not self.console.is_terminal and time.monotonic() - self.spoken > _SECONDS:
            self.spoken = time.monotonic()
            self.console.print(f"{name}: {done} of {total} rows after {self.spoken - self.started:.0f} s")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
