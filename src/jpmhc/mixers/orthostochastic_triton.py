"""The orthostochastic mixer for the fused kernels: squared entries of an orthogonal matrix, averaged over blocks.

`TritonForm` describes the arguments m, h, grad and F.
"""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import cayley, cayley_derivative, skew_entries, transpose

entries = skew_entries


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H: the squared entries of the Cayley transform, summed over each block and divided by s. [tokens, n, n]"""
    q = cayley(F.constants.scale * m, F.rows)
    squares = tl.reshape(q * q, [m.shape[0], F.streams, F.constants.blocks, F.streams, F.constants.blocks])
    return tl.sum(tl.sum(squares, axis=4), axis=2) / F.constants.blocks


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits, through blocks, squares and the Cayley transform."""
    q = cayley(F.constants.scale * m, F.rows)
    shape: tl.constexpr = [m.shape[0], F.streams, F.constants.blocks, F.streams, F.constants.blocks]
    wide = tl.reshape(tl.broadcast_to(grad[:, :, None, :, None], shape), m.shape)
    g = cayley_derivative(q, 2.0 * q * wide / F.constants.blocks, F.rows)
    return F.constants.scale * (g - transpose(g))
