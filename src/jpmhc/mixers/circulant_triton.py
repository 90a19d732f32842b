"""Weighted cyclic shifts for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows, pick, softmax_derivative, softmax_row

entries = entries_by_rows


@triton.jit
def _shift(K: tl.constexpr, N: tl.constexpr):
    """Return a mask of the ones in the matrix of the cyclic shift by K streams. [1, n, n]"""
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    return (i - j + N) % N == K


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the sum of the cyclic shifts with the softmax weights of the logits m. [tokens, n, n]"""
    COUNT: tl.constexpr = F.streams
    p = softmax_row(m, F)
    h = tl.where(_shift(0, F.streams), pick(p, 0, F), 0.0)
    for k in tl.static_range(1, COUNT):
        h += tl.where(_shift(k, F.streams), pick(p, k, F), 0.0)
    return h


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits m, by sums over the ones of each shift's matrix."""
    COUNT: tl.constexpr = F.streams
    p = softmax_row(m, F)
    column = tl.arange(0, F.columns)[None, :]
    g = p * 0.0
    for k in tl.static_range(COUNT):
        inner = tl.sum(tl.sum(tl.where(_shift(k, F.streams), grad, 0.0), axis=2), axis=1)
        g = tl.where(column == k, inner[:, None], g)
    return softmax_derivative(p, g)
