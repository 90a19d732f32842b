"""Kronecker products of 2 × 2 matrices for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows, pick

entries = entries_by_rows


@triton.jit
def _factor(a, K: tl.constexpr, F: tl.constexpr):
    """Return the K-th factor of each entry of H, which is a or 1 - a, and the factor's derivative by a.

    Factor 0 is the leftmost of the product: it belongs to the highest bit of H's indices.
    [tokens, columns] → [tokens, n, n] each
    """
    i = tl.arange(0, F.streams)[None, :, None]
    j = tl.arange(0, F.streams)[None, None, :]
    same = (((i ^ j) >> (F.logits - 1 - K)) & 1) == 0
    value = pick(a, K, F)
    return tl.where(same, value, 1.0 - value), tl.where(same, 1.0, -1.0)


@triton.jit
def _sigmoid(m):
    """Return the sigmoid of the logits. [tokens, 1, columns] → [tokens, columns]"""
    return 1.0 / (1.0 + tl.exp(-tl.sum(m, axis=1)))


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the Kronecker product of [[a, 1 - a], [1 - a, a]], a = sigmoid(l), over the logits l in m. [T, n, n]"""
    COUNT: tl.constexpr = F.logits
    a = _sigmoid(m)
    h, _ = _factor(a, 0, F)
    for k in tl.static_range(1, COUNT):
        factor, _ = _factor(a, k, F)
        h *= factor
    return h


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits m, by the product rule."""
    COUNT: tl.constexpr = F.logits
    a = _sigmoid(m)
    column = tl.arange(0, F.columns)[None, :]
    g = a * 0.0
    for k in tl.static_range(COUNT):
        _, term = _factor(a, k, F)
        term = term * grad
        for other in tl.static_range(COUNT):
            if other != k:
                factor, _ = _factor(a, other, F)
                term = term * factor
        g = tl.where(column == k, tl.sum(tl.sum(term, axis=2), axis=1)[:, None], g)
    return (g * a * (1.0 - a))[:, None, :]
