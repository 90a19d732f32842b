"""The fused steps of one connection, for streams of any leading shape. `HyperConnection` checks what it hands over."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jpmhc.kernels import autograd, operators
from jpmhc.kernels.decode import are_few
from jpmhc.kernels.launch import count_tokens
from jpmhc.kernels.read_backward import weight_column_bytes
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.write_to_read import one_kernel_pays

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class State(NamedTuple):
    """What a read leaves for the write of the same connection.

    Args:
        x: The streams that were read. [..., n or 1, d]
        link: Carries the streams' gradient from the write to the read, without memory of its own. [..., n, d]
        coefficients: Each token's n read weights, n write weights and H by rows; one row if they are static.
        spec: The connection.
    """

    x: Tensor
    link: Tensor | None
    coefficients: Tensor
    spec: Spec


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, State]:
    r"""The sublayer's input $h = \sum_j r_j x_j$, and r, w and H from the logits $W\,\mathrm{norm}(x) + b$.

    Args:
        x: The streams, in float32, bfloat16 or float16; equal ones may be held once. [..., n or 1, d]
        weight: The projection W in float32, multiplied by `spec.scale`; if None, the logits are the bias. [K, n·d]
        bias: b in float32. [K]
        spec: The connection; `spec.logits` is K.

    Returns:
        h, in the streams' type [..., d], and the state for `write`.
    """
    h, link, coefficients = _steps().read(x, weight, bias, spec)
    return h, State(x, link, coefficients, spec)


def write(y: Tensor, state: State, x: Tensor | None = None, mean: bool = False) -> Tensor:
    r"""$H x + w \otimes y$, normed if `spec.post_norm` says so.

    Args:
        y: The sublayer's output. [..., d]
        state: From the read.
        x: Other streams than those that were read. [..., n or 1, d]
        mean: Ask for the mean of the new streams, which saves moving them.

    Returns:
        The new streams [..., n, d], or their mean [..., d].
    """
    spec = state.spec
    streams, link = (state.x, state.link) if x is None or x is state.x else (x, None)
    return _steps().write(streams, link, y, state.coefficients, spec, mean)


def write_read(
    y: Tensor, state: State, weight: Tensor | None, bias: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, State]:
    """`write`, then `read` of the next connection from its result, in one kernel.

    Args:
        y: The sublayer's output. [..., d]
        state: From the read of the connection that ends.
        weight, bias, spec: Of the connection that begins. Where it has no weight, or one kernel would be slower
            (`write_to_read.one_kernel_pays`), the two steps run one after the other.

    Returns:
        The streams between the two [..., n, d], the next sublayer's input [..., d], and the state for its write.
    """
    old = state.spec
    if weight is None or not (one_kernel_pays(old, spec) or _is_decoded(state)):
        out = write(y, state)
        return out, *read(out, weight, bias, spec)
    out, h, link, coefficients = _steps().write_read(
        state.x, state.link, y, state.coefficients, old, weight, bias, spec
    )
    return out, h, State(out, link, coefficients, spec)


def _is_decoded(state: State) -> bool:
    """Say whether a write and a read of these streams have a kernel of their own: few tokens without gradients."""
    return not torch.is_grad_enabled() and not state.spec.post_norm and are_few(count_tokens(state.x, state.spec.d))


def _steps() -> Any:
    """Return the module that has the steps for this moment: a compiler wants operators."""
    return operators if torch.compiler.is_compiling() else autograd


def why_not(spec: Spec, dtype: torch.dtype, dynamic: bool = True) -> str | None:
    """Say why the kernels do not take this connection in that type; None if they do. `dynamic`: it has a weight."""
    if dtype not in DTYPES:
        return f"x must be float32, bfloat16 or float16, got {dtype}"
    if dynamic and dtype != torch.bfloat16 and 16 * weight_column_bytes(spec, dtype) > 200 * 1024:
        return f"the weight of {spec.logits} logits for {spec.n} streams fits on chip in bfloat16 only, not in {dtype}"
    return None
