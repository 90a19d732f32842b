"""The processes of a run or an evaluation: how they join, exchange values, and detect a lost process.

torchrun's agent notices a dead process, and PyTorch's connections notice a process that does not answer; neither names
the process that hangs. So every process writes a pulse, a number that grows, twice a second to the store, a key-value
server that all processes share, and reads the pulses of the others. A process that died or was stopped has no pulse. If
all processes have a pulse, the process at fault is the one that does not time out with the others, because it is busy.

Libraries open connections with other timeouts. So a process also ends itself if another process's pulse or the store's
answer is missing for longer than a set time, the patience.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")

PATIENCE = 600.0  # seconds
_BEAT = 0.5  # seconds between two pulses
_SILENCE = 3.0  # seconds without a new pulse after which a process counts as lost
_GRACE = 5.0  # seconds within which processes that wait for the same process time out

# A pulse ends with one of these words if the process has timed out, or has ended normally.
_WAITS, _LEFT = b"waits", b"left"


@dataclass(frozen=True)
class World:
    """The number of this process (its rank), the number of all processes, and the device of this process."""

    rank: int
    size: int
    device: torch.device
    pulse: "Pulse | None" = None  # detects lost processes; None if there is one process

    def rows(self, batch: int, accumulate: int) -> range:
        """Return the range of a batch's rows that this process handles; `accumulate` must divide its length."""
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
        """Return the values that all processes passed, in the order of the processes' numbers."""
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
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        raise ValueError(
            "torchrun --max-restarts hands restarted processes the addresses of lost ones: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, with --standalone or --rdzv-backend c10d"
        )
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


@contextlib.contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Return a context in which SIGTERM and Ctrl-C call `handle` instead of ending the process."""
    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class LostProcess(ConnectionError):
    """The error for a process that died or does not answer; the message names the process and says what to do."""


class Pulse:
    """A sender of this process's pulse, and a watcher of the other processes' pulses.

    Args:
        rank: Number of this process.
        size: Number of processes.
        patience: Seconds without a pulse of another process after which this process ends itself.
    """

    def __init__(self, rank: int, size: int, patience: float = math.inf) -> None:
        self.rank, self.patience = rank, patience
        self.describe: Callable[[], str] = lambda: "before the end: start the processes again"
        """A function that returns the end of a sentence: when a process was lost, and how to resume."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_GRACE))
        self.number, self.waits, self.ended = 0, False, threading.Event()
        self.pulses = {other: b"" for other in range(size) if other != rank}
        # Seconds of watching until now, until the store's last answer, and until each other process's last pulse.
        self.watched, self.answered, self.heard = 0.0, 0.0, dict.fromkeys(self.pulses, 0.0)
        self.beating = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self.beating.start()
        threading.Thread(target=self._watch, name="pulses of the others", daemon=True).start()

    def _beat(self) -> None:
        """Write this process's pulse and read the others' until this process ends."""
        with contextlib.suppress(dist.DistError):  # the store's process is gone
            while not self.ended.is_set():
                self.store.set(f"pulse {self.rank}", f"{self.number} {_WAITS.decode() if self.waits else ''}")
                for other in self.pulses:
                    if self.store.check([f"pulse {other}"]):
                        self.pulses[other] = self.store.get(f"pulse {other}")
                self.number += 1
                self.ended.wait(_BEAT)
            self.store.set(f"pulse {self.rank}", _LEFT.decode())

    def _watch(self) -> None:
        """Record when the store and each process last answered; end this process if one is silent for too long.

        This has its own thread, because `_beat` blocks if the process with the store is stopped. The time is the number
        of this loop's rounds, so that seconds in which this process itself was stopped do not count.
        """
        number, before = self.number, dict(self.pulses)
        while not self.ended.wait(_BEAT) and self.beating.is_alive():
            self.watched += _BEAT
            if self.number != number:
                number, self.answered = self.number, self.watched
                for other, pulse in self.pulses.items():
                    if pulse != before[other] or pulse == _LEFT:
                        before[other], self.heard[other] = pulse, self.watched
            if lost := self._list_silent(self.patience + _SILENCE + _GRACE):
                os.write(2, f"jpmhc: {name_ranks(lost)} lost {self.describe()}\n".encode())
                os._exit(2)

    def _list_silent(self, seconds: float) -> list[int]:
        if self.rank and self._misses_store(seconds):
            return [0]  # the first process has the store, unless torchrun does
        return [other for other, when in self.heard.items() if self.answered - when >= seconds]

    def _misses_store(self, seconds: float) -> bool:
        silence = self.watched - self.answered
        return silence >= max(seconds, 2 * (_SILENCE + _GRACE)) or not self.beating.is_alive()

    def end(self) -> None:
        """Stop the pulse, and tell the other processes that this process has ended normally."""
        self.ended.set()
        self.beating.join(_SILENCE)

    def find_silent(self) -> list[int]:
        """Wait some seconds, then return the ranks of processes that have no pulse and did not end normally."""
        enough = self.watched + 2 * _SILENCE  # a process that has just died may have a last pulse that was not read yet
        while self.answered < enough and not self._misses_store(_SILENCE):
            time.sleep(_BEAT)
        silent = self._list_silent(_SILENCE)
        if self.rank == 0:
            time.sleep(_SILENCE)  # the store may be this process's: the others still ask it
        return silent

    def find_lost(self) -> list[int]:
        """Return the ranks of processes without a pulse or, if there are none, of processes that did not time out."""
        self.waits = True
        if silent := self.find_silent():
            return silent
        until = time.monotonic() + _GRACE
        while (
            lost := [k for k, pulse in self.pulses.items() if not pulse.endswith(_WAITS)]
        ) and time.monotonic() < until:
            time.sleep(_BEAT)
        return lost


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
