"""The progress display of commands: bars on a terminal, lines in other outputs."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS = 10.0  # between two lines about a job, if the output is not a terminal


@dataclass
class _Job:
    first: int  # units done when the job was first shown; not 0 in a resumed run
    started: float
    spoken: float
    bar: "TaskID | None" = None
    detail: str = ""


class Display:
    """A display of jobs: bars on a terminal; elsewhere one line when a job begins, and one every ten seconds.

    With `speaks=False` nothing is shown; of several processes only the first has `speaks=True`.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.speaks = speaks
        self.jobs: dict[str, _Job] = {}
        self.bars = make_bars() if speaks and sys.stderr.isatty() else None

    def say(self, line: str) -> None:
        """Print a line permanently, above the bars."""
        if self.bars is not None:
            self.bars.console.print(line, markup=False)
        elif self.speaks:
            print(line, file=sys.stderr, flush=True)

    def show(self, name: str, done: int, total: int, detail: str | None = None) -> None:
        """Show that `done` of `total` units of a job are done; without a new detail, the old detail stays."""
        now = time.monotonic()
        job = self.jobs.setdefault(name, _Job(done, now, now))
        if detail is not None:
            job.detail = detail
        if self.bars is not None:
            if job.bar is None:
                job.bar = self.bars.add_task(name, total=total, completed=done, count="", detail="")
            self.bars.update(job.bar, completed=done, count=f"{done}/{total}", detail=job.detail)
        elif done == 0:  # so that a log shows the job before its first unit is done
            self.say(" · ".join(filter(None, (f"{name} 0/{total}", detail))))
        elif now - job.spoken >= _SECONDS and done > job.first:
            job.spoken = now
            left = (now - job.started) / (done - job.first) * (total - done)
            self.say(" · ".join(part for part in (f"{name} {done}/{total}", job.detail, f"{left:.0f} s left") if part))

    def counting(self, name: str, total: int) -> Callable[[str], None]:
        """Return a function that shows a job of `total` units, and is called before each unit with the unit's name."""
        done = itertools.count()
        return lambda detail: self.show(name, next(done), total, detail)

    def finish(self, name: str) -> None:
        """Remove a job and its bar."""
        job = self.jobs.pop(name, None)
        if self.bars is not None and job is not None and job.bar is not None:
            self.bars.remove_task(job.bar)

    @contextlib.contextmanager
    def preparing(self, sentence: str) -> Iterator[None]:
        """Return a context in which `sentence` is shown beside an animated bar; without bars, it is printed once."""
        if self.bars is None:
            self.say(sentence)
            yield
            return
        bar = self.bars.add_task(sentence, total=None, count="", detail="")
        try:
            yield
        finally:
            self.bars.remove_task(bar)

    def __enter__(self) -> Self:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars is not None:
            self.bars.stop()


def make_bars() -> "Progress | None":
    """Return rich's progress bars with a count, the time left and a detail, or None if rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column
    except ModuleNotFoundError:
        return None
    # rich does not break lines, because terminals wrap them.
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    # On a narrow terminal the detail is shortened.
    detail = TextColumn("{task.fields[detail]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}"), TextColumn("{task.fields[count]}"), BarColumn(bar_width=10))
    return Progress(*columns, TimeRemainingColumn(), detail, console=console, expand=True)
