"""Rotations of the stream differences for the fused kernels: the Cayley transform of U K Uᵀ.

K is a skew matrix, U is `complement_of_ones`, and `TritonForm` describes the arguments m, h, grad and F.
"""

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from jpmhc.mixers.base import TritonForm
from jpmhc.mixers.triton_matrices import (
    cayley,
    cayley_derivative,
    identity_matrix,
    no_entries,
    product,
    skew_entries,
    transpose,
)

PI = tl.constexpr(math.pi)


class Constants(NamedTuple):
    order: int
    scale: float


@triton.jit
def _basis(F: tl.constexpr):
    """Return U: the columns of `complement_of_ones`, and a last column that only meets zeros. [1, n, n]"""
    i = tl.arange(0, F.streams)[:, None].to(tl.float32) + 0.5
    k = tl.arange(0, F.streams)[None, :].to(tl.float32) + 1.0
    N: tl.constexpr = F.streams
    return (tl.cos(i * k * (PI / N)) * tl.sqrt(2.0 / N + i * 0.0))[None, :, :]


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the Cayley transform of U K Uᵀ with the basis U and the scaled skew matrices K. [tokens, n, n]"""
    if F.logits == 0:
        return m * 0.0 + identity_matrix(F.streams)
    else:
        u = _basis(F)
        return cayley(product(product(u, F.constants.scale * m), transpose(u)), F.streams)


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits, through the Cayley transform and U K Uᵀ."""
    if F.logits == 0:
        return m * 0.0
    else:
        u = _basis(F)
        g = product(product(transpose(u), cayley_derivative(h, grad, F.streams)), u)
        return F.constants.scale * (g - transpose(g))


@functools.cache
def make_form(streams: int, scale: float) -> TritonForm:
    n = streams
    logits = (n - 1) * (n - 2) // 2
    constants = Constants(n - 1, float(scale))
    if not logits:
        return TritonForm(n, 0, 1, 1, no_entries, mix, derivative, constants)
    return TritonForm(n, logits, n, n, skew_entries, mix, derivative, constants)
