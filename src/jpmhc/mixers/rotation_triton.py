"""Rotations of the stream differences for the fused kernels: the Cayley transform of U K Uᵀ.

K is a skew matrix, U is `complement_of_ones`, and `TritonForm` describes the arguments m, h, grad and F.
"""

import math

import triton
import triton.language as tl

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


@triton.jit
def entries(F: tl.constexpr):
    """Return the entries of a skew matrix; two streams have no logits."""
    if F.logits == 0:
        return no_entries(F)
    else:
        return skew_entries(F)


@triton.jit
def _basis(F: tl.constexpr):
    """Return U: the columns of `complement_of_ones`, and a last column, which is only multiplied by zeros. [1, n, n]"""
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
