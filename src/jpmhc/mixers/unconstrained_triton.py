"""The unconstrained mixer for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows

entries = entries_by_rows


@triton.jit
def mix(m, F: tl.constexpr):
    """Return the logits m, which are the entries of H."""
    return m


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Return the gradient of H, which is the gradient of the logits."""
    return grad
