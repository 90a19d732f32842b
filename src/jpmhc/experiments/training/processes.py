"""The processes that share a run or an evaluation: which one this is, and how they exchange values."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jpmhc.experiments.training.lost_processes import LostProcess, Pulse, naming_lost_processes

PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class World:
    """The number of this process, how many there are, and the device it uses."""

    rank: int
    size: int
    device: torch.device
    pulse: Pulse | None = None
    """Finds out which of the others was lost, where there are others."""

    def rows(self, batch: int, accumulate: int) -> range:
        """Return this process's part of the rows of a batch."""
        if batch % (self.size * accumulate):
            raise ValueError(
                f"batch ({batch}) must be a multiple of processes × accumulate ({self.size} × {accumulate})"
            )
        count = batch // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()

    def collect(self, value: Any) -> list[Any]:
        """Return every process's object, in the order of their numbers."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


@contextlib.contextmanager
def join_processes(device: str, patience: float = PATIENCE) -> Iterator[World]:
    """Enter the group of processes that torchrun started; without torchrun, this process is alone.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        patience: Seconds that a process waits for another one before it gives up.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda was asked for, but PyTorch sees no CUDA device")
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    if size == 1:
        yield World(0, 1, where)
        return
    wait = timedelta(seconds=patience)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=where if cuda else None, timeout=wait)
        pulse = Pulse(rank, size, patience)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise LostProcess(f"the processes did not meet within {patience:g} s: start them again ({said})") from error
    try:
        with naming_lost_processes(pulse):
            yield World(rank, size, where, pulse)
    finally:
        pulse.end()
        dist.destroy_process_group()
