"""What a run shows on the terminal while it goes on."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from jpmhc.training.config import TrainConfig
from jpmhc.training.evaluation import summary

_SECONDS = 10.0  # between lines where the output is not a terminal


class Progress:
    """A progress bar on a terminal, a line now and then elsewhere, nothing on ranks that do not speak.

    Args:
        config: The run.
        speaks: Whether this rank shows anything.
    """

    def __init__(self, config: TrainConfig, speaks: bool) -> None:
        self.steps, self.speaks = config.steps, speaks
        self.console = Console(stderr=True, quiet=not speaks)
        self.bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (speaks and self.console.is_terminal),
        )
        self.job = self.bar.add_task("", total=config.steps)
        self.spoken = 0.0

    def advance(self, step: int) -> None:
        """A step is done."""
        self.bar.update(self.job, completed=step + 1)

    def show(self, step: int, values: dict[str, Any]) -> None:
        """New numbers."""
        largest = f"largest {values['largest_layer_gradient_norm']:.3g} in {values['largest_layer']}"
        text = (
            f"loss {values['loss']:.4f} · exact {values['exact_accuracy']:.1%} · "
            f"gradient {values['gradient_norm']:.3g} ({largest}) · {values['sequences_per_second']:.0f} sequences/s"
        )
        if self.console.is_terminal:
            self.bar.update(self.job, description=text)
        elif time.monotonic() - self.spoken > _SECONDS:
            self.spoken = time.monotonic()
            self.console.print(f"step {step + 1}/{self.steps} · {text} · {values['eta_seconds']:.0f} s left")

    def evaluated(self, step: int, metrics: dict[str, Any]) -> None:
        """An evaluation is done."""
        self.console.print(f"step {step + 1}: held out: {summary(metrics)}")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
