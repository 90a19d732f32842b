"""Mixtures of permutations for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows, identity_matrix, pick, softmax_derivative, softmax_row

entries = entries_by_rows


@triton.jit
def _matrix(CODE: tl.constexpr, N: tl.constexpr):
    """Return the permutation matrix of CODE, whose bits 3j to 3j + 2 are the row of the one in column j. [1, n, n]"""
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    return (((CODE >> (3 * j)) & 7) == i).to(tl.float32)


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the sum of the permutation matrices with the softmax weights of the logits m. [tokens, n, n]"""
    COUNT: tl.constexpr = F.logits
    p = softmax_row(m, F)
    h = tl.sum(p, axis=1)[:, None, None] * (identity_matrix(F.streams) * 0.0)
    for k in tl.static_range(COUNT):
        h += pick(p, k, F) * _matrix(F.constants.codes[k], F.streams)
    return h


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits m, by inner products with the permutation matrices."""
    COUNT: tl.constexpr = F.logits
    p = softmax_row(m, F)
    column = tl.arange(0, F.columns)[None, :]
    g = p * 0.0
    for k in tl.static_range(COUNT):
        inner = tl.sum(tl.sum(grad * _matrix(F.constants.codes[k], F.streams), axis=2), axis=1)
        g = tl.where(column == k, inner[:, None], g)
    return softmax_derivative(p, g)
