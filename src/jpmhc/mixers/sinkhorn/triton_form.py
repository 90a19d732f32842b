"""Sinkhorn–Knopp for the fused kernels."""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from jpmhc.manifolds import birkhoff
from jpmhc.mixers.base import TritonForm
from jpmhc.mixers.triton_matrices import entries_by_rows

LOGIT_BOUND = tl.constexpr(float(birkhoff.LOGIT_BOUND))


class Constants(NamedTuple):
    iterations: int


@triton.jit
def mix(m, F: tl.constexpr):
    """Row-then-column normalisations of exp(clamp(logits)), kept as two scalings.

    With |logits| ≤ 10 every factor stays inside e^±40, so this is the log-space iteration without its logarithms.
    """
    ITERATIONS: tl.constexpr = F.constants.iterations
    x = tl.clamp(m, -LOGIT_BOUND, LOGIT_BOUND, propagate_nan=tl.PropagateNan.ALL)
    kernel = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    column = tl.max(x, axis=1) * 0.0 + 1.0
    for _ in tl.static_range(ITERATIONS):
        row = 1.0 / tl.sum(kernel * column[:, None, :], axis=2)
        column = 1.0 / tl.sum(kernel * row[:, :, None], axis=1)
    return kernel * row[:, :, None] * column[:, None, :]


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    r"""Solve eq. implicit-grad directly: $P \odot (G - u 1^\top - 1 v^\top)$ with the true row and column sums of P.

    Eliminating v leaves the Laplacian of the graph with weights P diag(1/c) Pᵀ. Its nodes are eliminated one by one
    without a subtraction, so that a sharp P, a nearly disconnected graph, costs no accuracy.
    """
    N: tl.constexpr = F.streams
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    node = tl.arange(0, N)[None, :]
    q = h / tl.sum(h, axis=1)[:, None, :]
    mean = tl.sum(q * grad, axis=1)[:, None, :]  # of G down each column
    centred = grad - mean
    right = tl.sum(h * centred, axis=2)  # [tokens, n]
    weights = tl.sum(q[:, :, None, :] * h[:, None, :, :], axis=3)
    links = ()
    loads = ()
    for k in tl.static_range(N - 1):
        row = tl.sum(tl.where((i == k) & (j > k), weights, 0.0), axis=1)  # [tokens, n]
        degree = tl.sum(row, axis=1)[:, None]
        link = tl.where(degree > 0.0, row / tl.where(degree > 0.0, degree, 1.0), 0.0)
        load = tl.sum(tl.where(node == k, right, 0.0), axis=1)[:, None]
        right += link * load
        weights += row[:, :, None] * link[:, None, :]
        links = links + (link,)
        loads = loads + (tl.where(degree > 0.0, load / tl.where(degree > 0.0, degree, 1.0), 0.0),)
    u = right * 0.0
    for step in tl.static_range(N - 1):
        value = loads[N - 2 - step] + tl.sum(links[N - 2 - step] * u, axis=1)[:, None]
        u = tl.where(node == N - 2 - step, value, u)
    across = tl.sum(q * u[:, :, None], axis=1)[:, None, :]
    clipped = (m < -LOGIT_BOUND) | (m > LOGIT_BOUND)
    return tl.where(clipped, 0.0, h * (centred - (u[:, :, None] - across)))


@functools.cache
def make_form(streams: int, iterations: int) -> TritonForm:
    """Describe a Sinkhorn mixer of so many iterations."""
    n = streams
    return TritonForm(n, n * n, n, n, entries_by_rows, mix, derivative, Constants(iterations))
