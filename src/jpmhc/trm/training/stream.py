"""The rows of training, fetched ahead of the step that needs them."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from jpmhc.trm.tasks import counter
from jpmhc.trm.tasks.batch import Batch, Task

_EXPLORE, _MINIMUM = counter.key_of("halting exploration"), counter.key_of("halting minimum")


def minimum_steps(seed: int, step: int, rows: np.ndarray, probability: float, maximum: int) -> np.ndarray:
    """Steps before which rows may not halt: with the given probability uniform on 2..maximum, otherwise 0.

    A pure function of (seed, step, row), so that every sharding of the rows draws the same numbers.
    """
    if maximum < 2:
        return np.zeros(len(rows), np.int32)
    explores = counter.uniform(seed, _EXPLORE, step, rows) < probability
    drawn = 2 + counter.below(maximum - 1, seed, _MINIMUM, step, rows)
    return np.where(explores, drawn, 0).astype(np.int32)


class Stream:
    """Batches and halting minima from one step onwards, made by a thread while earlier steps run.

    Args:
        task: Where rows come from.
        batch: Rows of a step over all ranks.
        rows: Which of them this rank works on.
        seed: Seed of the exploration.
        probability: Probability that a row explores.
        maximum: Largest number of supervision steps.
        device: Where the batches go.
        ahead: How many steps to prepare in advance.
    """

    def __init__(
        self,
        task: Task,
        batch: int,
        rows: range,
        seed: int,
        probability: float,
        maximum: int,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self.task, self.batch, self.seed = task, batch, seed
        self.rows = np.arange(rows.start, rows.stop)
        self.probability, self.maximum = probability, maximum
        self.device, self.ahead = device, ahead

    def __call__(self, step: int) -> tuple[Batch, Tensor]:
        """The rows and minima of one step, on the host."""
        rows = self.task.examples(step * self.batch + self.rows)
        minimum = torch.from_numpy(minimum_steps(self.seed, step, self.rows, self.probability, self.maximum))
        if self.device.type == "cuda":  # pinned, so that the copy to the device does not wait
            rows = Batch(rows.inputs.pin_memory(), rows.labels.pin_memory(), rows.identifiers.pin_memory())
            minimum = minimum.pin_memory()
        return rows, minimum

    def steps(self, start: int, stop: int) -> Iterator[tuple[int, Batch, Tensor]]:
        """Step numbers with their rows and minima on the device."""
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            waiting: list[Future[tuple[Batch, Tensor]]] = [
                pool.submit(self, step) for step in range(start, min(start + self.ahead, stop))
            ]
            try:
                for step in range(start, stop):
                    rows, minimum = waiting.pop(0).result()
                    if step + self.ahead < stop:
                        waiting.append(pool.submit(self, step + self.ahead))
                    yield step, rows.to(self.device, non_blocking=True), minimum.to(self.device, non_blocking=True)
            finally:
                for future in waiting:
                    future.cancel()
