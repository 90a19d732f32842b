"""The processes of a run or an evaluation: how they join, exchange values, and detect a lost process.

PyTorch's connections report only a closed connection or a timeout, not the process at fault. So every process writes a
new number, its pulse, to the group's store twice a second; a process that died or was stopped has no pulse. If all
processes have a pulse, the process at fault is the one that does not time out with the others, because it is busy.

Libraries open connections with other timeouts. So each process also watches the others' pulses, and ends itself if a
pulse is missing for longer than its patience. The store does not answer if its own process was stopped, so a second
thread watches the store.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

PATIENCE = 600.0  # seconds
_BEAT = 0.5  # seconds between two pulses
_SILENCE = 3.0  # seconds without a new pulse after which a process counts as lost
_GRACE = 5.0  # seconds within which processes that wait for the same process time out

_LEFT = b"left"  # the last pulse of a process that has ended normally


@dataclass(frozen=True)
class World:
    """The number of this process, the number of all processes, and the device of this process."""

    rank: int
    size: int
    device: torch.device
    pulse: "Pulse | None" = None
    """Detects lost processes; None if there is one process."""

    def rows(self, batch: int, accumulate: int) -> range:
        """Return the range of a batch's rows that belong to this process."""
        if batch % (self.size * accumulate):
            raise ValueError(
                f"batch ({batch}) must be a multiple of processes × accumulate ({self.size} × {accumulate})"
            )
        count = batch // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def sum(self, values: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes, and return it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until every process has called this method."""
        if self.size > 1:
            dist.barrier()

    def collect(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their numbers."""
        if self.size == 1:
            return [value]
        values = [value] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = World(0, 1, torch.device("cpu"))


@contextlib.contextmanager
def join_processes(device: str, patience: float = PATIENCE) -> Iterator[World]:
    """Join the processes that torchrun started, and yield the `World`; without torchrun, this process is alone.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        patience: Seconds that a process waits for another process before it ends.
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


class LostProcess(ConnectionError):
    """The error for a process that died or does not answer; the message names the process and says what to do."""


class Pulse:
    """The sign of life of this process for the others, and a check of the others' signs of life.

    Args:
        rank: Number of this process.
        size: Number of processes.
        patience: Seconds without a pulse of another process after which this process ends itself.
    """

    def __init__(self, rank: int, size: int, patience: float = math.inf) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.describe: Callable[[], str] = lambda: "before the end: start the processes again"
        """A function that returns the end of a sentence: when a process was lost, and how to resume."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Two connections, because a connection that waits for an answer would keep the thread from writing.
        self.beating, self.asking = (
            dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_GRACE)) for _ in range(2)
        )
        self.ended, self.number = threading.Event(), 0
        self.thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.thread.start()
        threading.Thread(target=self._watch_store, name="answers of the store", daemon=True).start()

    def _beat(self) -> None:
        looked = time.monotonic()
        heard = {rank: (b"", looked) for rank in range(self.size) if rank != self.rank}  # last number, and when
        with contextlib.suppress(dist.DistError):  # without the store's process there is nobody to tell
            while not self.ended.is_set():
                self.number += 1
                self.beating.set(f"pulse {self.rank}", str(self.number))
                if (now := time.monotonic()) - looked > self.patience / 10:
                    looked = now
                    self._watch(heard, now)
                self.ended.wait(_BEAT)
            self.beating.set(f"pulse {self.rank}", _LEFT.decode())

    def _watch(self, heard: dict[int, tuple[bytes, float]], now: float) -> None:
        """End this process, whose main thread may wait for ever, if another process has had no pulse for too long."""
        for rank, (before, when) in heard.items():
            pulse = self.beating.get(f"pulse {rank}") if self.beating.check([f"pulse {rank}"]) else b""
            if pulse != before:
                heard[rank] = (pulse, now)
            elif pulse != _LEFT and now - when > self.patience + _SILENCE + _GRACE:
                self._give_up(rank)

    def _watch_store(self) -> None:
        """End this process if the store has not answered the other thread for too long."""
        before, silent = self.number, 0.0  # `silent` counts only seconds in which this process was running
        while not self.ended.wait(_BEAT) and self.thread.is_alive():
            before, silent = self.number, silent + _BEAT if self.number == before else 0.0
            if silent > self.patience + _SILENCE + _GRACE:
                self._give_up(0)

    def _give_up(self, rank: int) -> None:
        os.write(2, f"jpmhc: rank {rank} was lost {self.describe()}\n".encode())
        os._exit(2)

    def end(self) -> None:
        """Stop the pulse, and tell the other processes that this process has ended normally."""
        self.ended.set()
        self.thread.join(_SILENCE)

    def find_silent(self) -> list[int]:
        """Return the numbers of processes that have no pulse and did not end normally; takes some seconds."""
        return self._ask(self._compare_pulses)

    def find_lost(self) -> list[int]:
        """Return the numbers of processes without a pulse; if all have one, of processes that have not timed out."""
        return self._ask(self._compare_pulses_and_patience)

    def _ask(self, question: Callable[[], list[int]]) -> list[int]:
        """Run a query of the store in a thread with a time limit; without an answer, return [0]."""
        answers: list[list[int]] = []

        def ask() -> None:
            with contextlib.suppress(dist.DistError):  # the store's process is gone
                answers.append(question())

        asking = threading.Thread(target=ask, name="pulse of the others", daemon=True)
        asking.start()
        asking.join(2 * (_SILENCE + _GRACE))
        return answers[0] if answers else [0]  # the first process has the store, unless torchrun does

    def _compare_pulses(self) -> list[int]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        before = {rank: self._read(f"pulse {rank}") for rank in others}
        time.sleep(_SILENCE)
        after = {rank: self._read(f"pulse {rank}") for rank in others}
        silent = [rank for rank in others if after[rank] == before[rank] != _LEFT]
        if self.rank == 0:
            time.sleep(_SILENCE)  # the store may be this process's: the others still ask it
        return silent

    def _compare_pulses_and_patience(self) -> list[int]:
        self.asking.set(f"gave up {self.rank}", "yes")
        if silent := self._compare_pulses():
            return silent
        waiting = {rank for rank in range(self.size) if rank != self.rank}
        until = time.monotonic() + _GRACE
        while waiting and time.monotonic() < until:
            waiting = {rank for rank in waiting if self._read(f"gave up {rank}") is None}
            time.sleep(_BEAT)
        return sorted(waiting)

    def _read(self, key: str) -> bytes | None:
        return self.asking.get(key) if self.asking.check([key]) else None


@contextlib.contextmanager
def naming_lost_processes(pulse: Pulse | None) -> Iterator[None]:
    """Turn errors of connections between processes into a `LostProcess` that names the lost processes."""
    try:
        yield
    except RuntimeError as error:
        if pulse is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostProcess(f"{name_ranks(pulse.find_lost())} lost {pulse.describe()}") from None


def name_ranks(ranks: list[int]) -> str:
    """Return the beginning of a sentence about lost processes, such as "ranks 1 and 2 were"."""
    if not ranks:
        return "the connection between the processes was"
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} were"
