"""A thread that prepares the batches of the next training steps."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.task import Batch, Task
from jpmhc.experiments.training.config import TrainConfig

Key = TypeVar("Key")
Result = TypeVar("Result")

_EXPLORE, _MINIMUM = counter.key_of("halting exploration"), counter.key_of("halting minimum")


def prefetch(make: Callable[[Key], Result], keys: Iterable[Key], ahead: int) -> Iterator[Result]:
    """Yield `make(key)` for each key, in order. A thread makes up to `ahead` results in advance."""
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for key in keys:
                waiting.append(pool.submit(make, key))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def minimum_steps(seed: int, step: int, rows: np.ndarray, probability: float, maximum: int) -> np.ndarray:
    """Return the random number of supervision steps before which each row may not halt. [rows]

    With the given probability, the number is uniform on 2..maximum, and otherwise 0. It depends only on seed, step and
    row, and so not on the division of rows among processes.
    """
    if maximum < 2:
        return np.zeros(len(rows), np.int32)
    explores = counter.uniform(seed, _EXPLORE, step, rows) < probability
    drawn = 2 + counter.below(maximum - 1, seed, _MINIMUM, step, rows)
    return np.where(explores, drawn, 0).astype(np.int32)


class Prefetcher:
    """A thread that prepares batches and halting minima (see `minimum_steps`) while earlier steps run.

    `rows` are the rows of each batch that belong to this process; `ahead` steps are prepared in advance.
    """

    def __init__(self, task: Task, config: TrainConfig, rows: range, device: torch.device, ahead: int = 2) -> None:
        self.task, self.config, self.device, self.ahead = task, config, device, ahead
        self.rows = np.arange(rows.start, rows.stop)

    def make_batch(self, step: int) -> tuple[Batch, Tensor]:
        """Return the rows and the halting minima of one step, in the host's memory."""
        config, model = self.config, self.config.model
        rows = self.task.examples(step * config.batch + self.rows)
        minimum = torch.from_numpy(
            minimum_steps(config.seed, step, self.rows, model.halt_exploration, model.halt_max_steps)
        )
        if self.device.type == "cuda":  # pinned, so that the copy to the device does not wait
            return rows.pin_memory(), minimum.pin_memory()
        return rows, minimum

    def prefetch_batches(self, start: int, stop: int) -> Iterator[tuple[int, Batch, Tensor]]:
        """Yield each step from `start` to `stop` - 1 with its rows and halting minima, on the device."""
        steps = range(start, stop)
        for (rows, minimum), step in zip(prefetch(self.make_batch, steps, self.ahead), steps):
            yield step, rows.to(self.device, non_blocking=True), minimum.to(self.device, non_blocking=True)
