"""What a measurement will cost, and which method it takes: decided and said before it begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jpmhc.diagnose.jacobian import Jacobian
from jpmhc.machine import free_memory

METHODS = ("auto", "dense", "lanczos")
# Seconds of one multiplication and addition in a singular value decomposition, and the largest matrix it is asked for.
_SVD = 4e-10
_LARGEST = 6000
# The share of the free memory that one measurement may take.
_SHARE = 0.4
_FEWEST_STEPS, _FEWEST_PROBES = 24, 2
# Rows at a time: more gain nothing.
_CHUNK = 64


@dataclass(frozen=True)
class Part:
    """One planned measurement.

    Attributes:
        what: What is measured.
        shape: The Jacobian's rows and columns.
        method: "dense" or "lanczos".
        chunk: Rows at a time, where it is dense.
        probes: Random vectors of Lanczos.
        steps: Steps for each.
        seconds: What it will take.
        bytes: What it will hold in memory beside the model's own run.
        shortened: Whether it does less than was asked for, to keep to the limit.
    """

    what: str
    shape: tuple[int, int]
    method: str
    chunk: int
    probes: int
    steps: int
    seconds: float
    bytes: int
    shortened: bool = False

    @property
    def products(self) -> int:
        """How many rows or products it needs."""
        return self.shape[0] if self.method == "dense" else self.probes * (2 * self.steps - 1)

    def __str__(self) -> str:
        how = f"dense, {self.shape[0]} backward passes"
        if self.method == "lanczos":
            how = f"Lanczos, {self.probes} probes of {self.steps} steps"
            if self.shortened:
                how += " (shortened to keep to the limit)"
        size = f"{self.shape[0]} x {self.shape[1]}"
        return f"{self.what}: {size}, {how}, about {describe_time(self.seconds)} and {describe_bytes(self.bytes)}"


def plan_part(what: str, jacobian: Jacobian, saved: int, seconds: float, method: str, probes: int, steps: int) -> Part:
    """Choose how one Jacobian is measured.

    Args:
        what: What it is called.
        jacobian: The Jacobian.
        saved: Bytes that the model's graph holds.
        seconds: What the measurement may take.
        method: "auto", or a method to take whatever it costs.
        probes: Random vectors to take by Lanczos.
        steps: Steps to take.
    """
    (rows, columns), at = jacobian.shape, jacobian.at
    room = _SHARE * free_memory(at.y.device)
    # A batched backward pass holds about a quarter of the graph for each row at its peak.
    chunk = max(1, min(_CHUNK, rows, int(room / max(saved / 4, 1)))) if at.batched else min(_CHUNK, rows)
    small = min(rows, columns)
    dense_seconds = rows * at.seconds["row"] + _SVD * rows * columns * small
    dense_bytes = rows * columns * (at.y.dtype.itemsize + 16) + chunk * saved // 4 * at.batched
    fits = dense_bytes < _SHARE * free_memory(torch.device("cpu")) and small <= _LARGEST
    if method == "dense" or (method == "auto" and fits and dense_seconds < seconds):
        return Part(what, (rows, columns), "dense", chunk, 0, 0, dense_seconds, dense_bytes)
    asked = (probes, min(steps, small))
    steps = max(1, min(steps, small, int(room / (16 * (rows + columns)))))
    product = at.seconds["forward"] + at.seconds["backward"]
    if method == "auto":
        probes = max(min(probes, _FEWEST_PROBES), min(probes, int(seconds / (steps * product))))
        steps = max(min(steps, _FEWEST_STEPS), min(steps, int(seconds / (probes * product))))
    cost = probes * steps * product
    held = 16 * steps * (rows + columns)
    return Part(what, (rows, columns), "lanczos", 1, probes, steps, cost, held, asked != (probes, steps))


def describe_time(seconds: float) -> str:
    """Return a duration as a person says it."""
    if seconds < 1:
        return "a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def describe_bytes(count: int) -> str:
    """Return an amount of memory as a person says it."""
    return f"{max(count / 2**20, 1):.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
