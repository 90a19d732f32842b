"""Projectors onto the span of a frame, for the fused kernels; `TritonForm` describes the arguments m, h, grad and F.

The kernels get a static frame as logits, too.
"""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows, identity_matrix, inverse, product, transpose

entries = entries_by_rows


@triton.jit
def _spread(frame, F: tl.constexpr):
    """Return U (UᵀU)⁻¹ of the frame U, with zeros in the padding columns. [tokens, n, columns]"""
    a = tl.arange(0, F.columns)[None, :, None]
    b = tl.arange(0, F.columns)[None, None, :]
    gram = tl.sum(frame[:, :, :, None] * frame[:, :, None, :], axis=1)
    gram = tl.where((a == b) & (a >= F.constants.rank), 1.0, gram)
    return product(frame, inverse(gram, F.columns))


@triton.jit
def _lengths(m):
    """Return each column's largest absolute entry, or 1 for a column of zeros. [tokens, n, C] → [tokens, 1, C]"""
    largest = tl.max(tl.abs(m), axis=1)[:, None, :]
    return tl.where(largest > 0.0, largest, 1.0)


@triton.jit
def mix(m, F: tl.constexpr):
    """Return the projectors onto the spans of the frames m. [tokens, n, columns] → [tokens, n, n]"""
    if F.constants.rank == F.streams:  # the whole space
        return m * 0.0 + identity_matrix(F.streams)
    else:
        m = m / _lengths(m)
        return tl.sum(_spread(m, F)[:, :, None, :] * m[:, None, :, :], axis=3)


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of P = H into the gradient of the frame U = m, from dP = (I - P) dU (UᵀU)⁻¹ Uᵀ + transpose."""
    if F.constants.rank == F.streams:
        return m * 0.0
    else:
        side = product(identity_matrix(F.streams) - h, grad + transpose(grad))
        lengths = _lengths(m)
        return product(side, _spread(m / lengths, F)) / lengths
