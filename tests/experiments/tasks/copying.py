"""A task that the package does not have: copy the input. It shows what a new task must bring, and that it is enough."""

from dataclasses import dataclass

import numpy as np
import torch

from jpmhc import checks
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.task import Batch, Task, TaskConfig


@dataclass(frozen=True)
class CopyingConfig(TaskConfig):
    """Which rows to draw."""

    width: int = 5
    """Tokens of a row."""
    seed: int = 0
    """Decides the rows."""

    def __post_init__(self) -> None:
        checks.whole_number(self.width, "width")

    def build(self) -> "Copying":
        return Copying(self)


class Copying(Task):
    """Random rows whose labels are their inputs."""

    vocabulary, test_rows = 4, 12

    def __init__(self, config: CopyingConfig) -> None:
        self.config = config
        self.length = config.width

    def examples(self, positions: np.ndarray) -> Batch:
        return self._draw(0, positions)

    def test_examples(self, rows: np.ndarray) -> Batch:
        return self._draw(1, rows)

    def _draw(self, purpose: int, rows: np.ndarray) -> Batch:
        tokens = 1 + counter.below(3, self.config.seed, purpose, rows[:, None], np.arange(self.length))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(tokens), torch.zeros(len(rows), dtype=torch.int64))

    def describe(self, identifiers: np.ndarray) -> list[str]:
        return ["rows to copy" for _ in identifiers]

    def fingerprint(self) -> str:
        return repr(self.config)
