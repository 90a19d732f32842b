"""Measure the spectrum of one Jacobian, as a matrix or by Lanczos quadrature, and estimate the cost beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from jpmhc.diagnose.jacobian import Jacobian
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.machine import free_memory
from jpmhc.spectra import trace

Method = Literal["auto", "dense", "lanczos"]
# Seconds per multiplication and addition in a singular value decomposition, and the largest size to decompose.
SVD_SECONDS = 4e-10
_LARGEST = 6000
# The share of the free memory that one measurement may use.
_SHARE = 0.4
_FEWEST_STEPS, _FEWEST_PROBES = 24, 2
# The largest number of rows per backward pass: more are no faster.
_CHUNK = 64


@dataclass(frozen=True)
class Part:
    """One planned measurement.

    Attributes:
        name: The name of the map.
        shape: The Jacobian's rows and columns.
        method: "dense" or "lanczos".
        chunk: The number of rows per backward pass of a dense measurement.
        probes: The number of random vectors of Lanczos quadrature.
        steps: The number of Lanczos steps per random vector.
        seconds: The estimated time.
        bytes: The estimated memory, without the memory of the model's own run.
        shortened: Whether probes or steps were reduced below the requested numbers to keep to the limits.
    """

    name: str
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
        """The number of rows of a dense measurement, or of products with the Jacobian in Lanczos quadrature."""
        return self.shape[0] if self.method == "dense" else self.probes * (2 * self.steps - 1)

    def __str__(self) -> str:
        how = f"dense, {self.shape[0]} backward passes"
        if self.method == "lanczos":
            how = f"Lanczos, {self.probes} probes of {self.steps} steps"
            if self.shortened:
                how += " (shortened to keep to the limit)"
        size = f"{self.shape[0]} x {self.shape[1]}"
        return f"{self.name}: {size}, {how}, about {describe_time(self.seconds)} and {describe_bytes(self.bytes)}"


def plan_part(name: str, jacobian: Jacobian, saved: int, seconds: float, method: str, probes: int, steps: int) -> Part:
    """Choose the method, the size and the cost of the measurement of one Jacobian.

    Args:
        name: The name of the map.
        saved: The bytes that the model's autograd graph saves.
        seconds: The time limit of the measurement.
        method: "dense" or "lanczos" to use this method at any cost; "auto" for dense if it fits into memory and time,
            otherwise Lanczos, shortened to fit.
        probes: The requested number of random vectors of Lanczos quadrature.
        steps: The requested number of Lanczos steps per random vector.
    """
    (rows, columns), at = jacobian.shape, jacobian.at
    free_bytes = _SHARE * free_memory(at.y.device)
    # At its peak, a batched backward pass needs about a quarter of the graph's memory per row.
    chunk = max(1, min(_CHUNK, rows, int(free_bytes / max(saved / 4, 1)))) if at.batched else min(_CHUNK, rows)
    small = min(rows, columns)
    dense_seconds = rows * at.seconds["row"] + SVD_SECONDS * rows * columns * small
    dense_bytes = rows * columns * (at.y.dtype.itemsize + 16) + chunk * saved // 4 * at.batched
    fits = dense_bytes < _SHARE * free_memory(torch.device("cpu")) and small <= _LARGEST
    if method == "dense" or (method == "auto" and fits and dense_seconds < seconds):
        return Part(name, (rows, columns), "dense", chunk, 0, 0, dense_seconds, dense_bytes)
    asked = (probes, min(steps, small))
    steps = max(1, min(steps, small, int(free_bytes / (16 * (rows + columns)))))
    product = at.seconds["forward"] + at.seconds["backward"]
    if method == "auto":
        probes = max(min(probes, _FEWEST_PROBES), min(probes, int(seconds / (steps * product))))
        steps = max(min(steps, _FEWEST_STEPS), min(steps, int(seconds / (probes * product))))
    cost = probes * steps * product
    basis_bytes = 16 * steps * (rows + columns)
    return Part(name, (rows, columns), "lanczos", 1, probes, steps, cost, basis_bytes, asked != (probes, steps))


def describe_time(seconds: float) -> str:
    """Return a duration in words, such as "90 s" or "3 min"."""
    if seconds < 1:
        return "a second"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def describe_bytes(count: int) -> str:
    """Return a number of bytes in words, such as "20 MiB"."""
    return f"{max(count / 2**20, 1):.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def measure_matrix(jacobian: Jacobian, chunk: int, progress: Callable[[int], None] | None = None) -> Tensor:
    """Compute J as a matrix on the CPU. [M, N]

    Args:
        chunk: The number of rows per backward pass.
        progress: Called with the number of rows computed since the last call.
    """
    rows, columns = jacobian.shape
    like = jacobian.at.y
    matrix = torch.empty(rows, columns, dtype=like.dtype)
    for begin in range(0, rows, chunk):
        count = min(chunk, rows - begin)
        units = torch.zeros(count, rows, dtype=like.dtype, device=like.device)
        units[torch.arange(count), torch.arange(begin, begin + count)] = 1
        matrix[begin : begin + count] = jacobian.multiply_transposed(units).cpu()
        if progress is not None:
            progress(count)
    return matrix


def spectrum_of(matrices: Tensor, precision: torch.dtype | None = None) -> Spectrum:
    """Compute all singular values of a matrix, or of several, in float64 without squaring the matrix.

    Args:
        matrices: The matrices. [..., M, N]
        precision: The type in which the matrices were computed, which sets the spectrum's floor; by default their type.
    """
    values = np.sort(torch.linalg.svdvals(matrices.double()).numpy(), axis=None)[None]
    rows, columns = matrices.shape[-2:]
    floor = torch.finfo(precision or matrices.dtype).eps * float(values.max()) * max(rows, columns) ** 0.5
    return Spectrum(values, np.full_like(values, 1 / values.shape[1]), (rows, columns), "dense", floor)


def measure_quadrature(
    jacobian: Jacobian, probes: int, steps: int, seed: int, progress: Callable[[int], None] | None = None
) -> Spectrum:
    """Estimate the spectrum by Golub–Kahan–Lanczos quadrature from random vectors.

    The random vectors have the size of the map's input or output, whichever is smaller. JᵀJ is never formed, so small
    singular values keep their digits.

    Args:
        probes: The number of random vectors; their scatter gives the error bars.
        steps: The number of Lanczos steps per random vector, each with one product with J and one with Jᵀ.
        progress: Called with the number of products computed since the last call.
    """
    rows, columns = jacobian.shape
    ahead, back, size = jacobian.multiply, jacobian.multiply_transposed, columns
    if rows < columns:
        ahead, back, size = back, ahead, rows
    steps = min(steps, size)

    def counted(product: trace.Operator) -> trace.Operator:
        def multiply(vectors: Tensor) -> Tensor:
            result = product(vectors)
            if progress is not None:
                progress(1)
            return result

        return multiply

    device, generator = jacobian.at.x.device, torch.Generator().manual_seed(seed)
    nodes, weights = [], []
    for _ in range(probes):
        # One vector at a time, so that only one Lanczos basis is in memory; products take one vector anyway.
        start = trace.probes(1, size, generator=generator).to(device)
        quadrature = trace.singular_quadrature(counted(ahead), counted(back), start, steps)
        order = quadrature.nodes[0].argsort()
        nodes.append(quadrature.nodes[0][order].sqrt().cpu().numpy())
        weights.append(quadrature.weights[0][order].cpu().numpy())
    values = np.stack(nodes)
    floor = torch.finfo(jacobian.at.x.dtype).eps * float(values.max()) * max(rows, columns) ** 0.5
    return Spectrum(values, np.stack(weights), jacobian.shape, "lanczos", floor)
