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

    The number is uniform on 2, …, maximum with the given probability, and otherwise 0. It depends only on the seed, the
    step and the row's number in the batch, so processes may divide the rows in any way.
    """
    if maximum < 2:
        return np.zeros(len(rows), np.int32)
    explores = counter.uniform(seed, _EXPLORE, step, rows) < probability
    drawn = 2 + counter.below(maximum - 1, seed, _MINIMUM, step, rows)
    return np.where(explores, drawn, 0).astype(np.int32)


def make_batch(task: Task, config: TrainConfig, rows: range, step: int) -> tuple[Batch, Tensor]:
    """Return a part of a step's batch: the rows numbered `rows`, and the result of `minimum_steps` for each row."""
    numbers, model = np.asarray(rows), config.model
    minimum = minimum_steps(config.seed, step, numbers, model.halt_exploration, model.halt_max_steps)
    return task.examples(step * config.batch + numbers), torch.from_numpy(minimum)


def prefetch_batches(
    task: Task, config: TrainConfig, rows: range, device: torch.device, steps: range
) -> Iterator[tuple[int, Batch, Tensor]]:
    """Yield each step with the results of `make_batch` on the device; a thread prepares two steps in advance."""

    def make(step: int) -> tuple[Batch, Tensor]:
        batch, minimum = make_batch(task, config, rows, step)
        if device.type == "cuda":  # pinned, so that the copy to the device does not wait
            return batch.pin_memory(), minimum.pin_memory()
        return batch, minimum

    for (batch, minimum), step in zip(prefetch(make, steps, ahead=2), steps):
        yield step, batch.to(device, non_blocking=True), minimum.to(device, non_blocking=True)
