"""The Cayley transform for the fused kernels, exact or by the paper's iteration; `TritonForm` describes m, h and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import (
    cayley,
    cayley_derivative,
    identity_matrix,
    product,
    skew_entries,
    transpose,
)

entries = skew_entries


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the Cayley transform of the skew matrices m times the scale, exact or iterated. [tokens, n, n]"""
    skew = F.constants.scale * m
    if F.constants.iterations is None:
        return cayley(skew, F.streams)
    else:
        ITERATIONS: tl.constexpr = F.constants.iterations
        y = identity_matrix(F.streams) + skew
        for _ in tl.static_range(ITERATIONS):
            y = identity_matrix(F.streams) + 0.5 * (skew + product(skew, y))  # eq. cayley-iter-main
        return y


@triton.jit
def _iteration_derivative(skew, grad, F: tl.constexpr):
    """Turn the gradient of the iterated transform into the gradient of the scaled skew matrices. [tokens, n, n]"""
    ITERATIONS: tl.constexpr = F.constants.iterations
    iterates = (identity_matrix(F.streams) + skew,)
    for k in tl.static_range(ITERATIONS):
        iterates = iterates + (identity_matrix(F.streams) + 0.5 * (skew + product(skew, iterates[k])),)
    total = skew * 0.0
    for k in tl.static_range(ITERATIONS):
        total += 0.5 * (grad + product(grad, transpose(iterates[ITERATIONS - 1 - k])))
        grad = -0.5 * product(skew, grad)
    return total + grad


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits, which are in m at (i, j) and negated at (j, i)."""
    if F.constants.iterations is None:
        g = cayley_derivative(h, grad, F.streams)
    else:
        g = _iteration_derivative(F.constants.scale * m, grad, F)
    return F.constants.scale * (g - transpose(g))
