"""What training and evaluation show while they go on."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

_SECONDS = 10.0  # between lines of a job where the output is not a terminal


@dataclass
class _Job:
    bar: TaskID
    first: int  # done when it was first shown: a resumed run does not begin at 0
    started: float
    spoken: float
    detail: str = ""


class Display:
    """Jobs as bars on a terminal, as a line now and then elsewhere; nothing where it does not speak.

    Args:
        speaks: Whether this process shows anything: the first of several does.
    """

    def __init__(self, speaks: bool = True) -> None:
        # Lines are never broken: a terminal folds them by itself, and a file keeps them whole.
        self.console = Console(stderr=True, quiet=not speaks, soft_wrap=True, highlight=False)
        # On a narrow terminal the detail is what is cut.
        detail = TextColumn("{task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (TextColumn("{task.description}"), TextColumn("{task.fields[count]}"), BarColumn(bar_width=10))
        hidden = not (speaks and self.console.is_terminal)
        self.bars = Progress(*columns, TimeRemainingColumn(), detail, console=self.console, expand=True, disable=hidden)
        self.jobs: dict[str, _Job] = {}

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.console.print(line, markup=False)

    def show(self, name: str, done: int, total: int, detail: str | None = None) -> None:
        """`done` of `total` of a job; its detail stays until there is a new one."""
        now = time.monotonic()
        job = self.jobs.get(name)
        if job is None:
            bar = self.bars.add_task(name, total=total, completed=done, count="", detail="")
            job = self.jobs[name] = _Job(bar, done, now, now)
        if detail is not None:
            job.detail = detail
        self.bars.update(job.bar, completed=done, count=f"{done}/{total}", detail=job.detail)
        if not self.console.is_terminal and now - job.spoken >= _SECONDS and done > job.first:
            job.spoken = now
            left = (now - job.started) / (done - job.first) * (total - done)
            self.say(" · ".join(part for part in (f"{name} {done}/{total}", job.detail, f"{left:.0f} s left") if part))

    def finish(self, name: str) -> None:
        """Take a job's bar away."""
        if name in self.jobs:
            self.bars.remove_task(self.jobs.pop(name).bar)

    @contextlib.contextmanager
    def preparing(self, what: str) -> Iterator[None]:
        """Around work of unknown length."""
        bar = self.bars.add_task(what, total=None, count="", detail="")
        if not self.console.is_terminal:
            self.say(what)
        try:
            yield
        finally:
            self.bars.remove_task(bar)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()
