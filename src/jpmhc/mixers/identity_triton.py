"""The identity for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import identity_matrix, no_entries

entries = no_entries


@triton.jit
def mix(m, F: tl.constexpr):
    """Return the identity matrix for every token."""
    return m * 0.0 + identity_matrix(F.streams)


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Return zeros of m's shape, because there are no logits."""
    return m * 0.0
