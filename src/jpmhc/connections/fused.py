"""When a connection runs on the fused Triton kernels, and how it is handed to them."""

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jpmhc.kernels.spec import Spec

if TYPE_CHECKING:
    from jpmhc.connections.hyper import CoefficientMap


def plan(coefficients: "CoefficientMap", post_norm: str | None, eps: float) -> Spec | str:
    """What the kernels are told of this connection, or one sentence saying why it cannot be fused."""
    settings = coefficients.mixer.fused()
    if isinstance(settings, str):
        return settings
    try:
        return Spec(
            n=coefficients.mixer.streams,
            d=coefficients.dim,
            norm=coefficients.norm,
            eps=eps,
            read=coefficients.read,
            write=coefficients.write,
            temperature=coefficients.temperature,
            post_norm=post_norm is not None,
            **settings,
        )
    except ValueError as refusal:
        return f"the kernels do not cover this connection: {refusal}"


def chosen(kernels: str, plan: Spec | str, x: Tensor) -> bool:
    """Whether these streams run fused; a reason against it on CUDA is said, never swallowed."""
    if kernels == "reference" or (kernels == "auto" and x.device.type != "cuda"):
        return False
    reason = _reason_against(plan, x)
    if reason is None:
        return True
    if kernels == "fused":
        raise ValueError(f'kernels="fused" is not possible: {reason}')
    if not torch.compiler.is_compiling():
        warnings.warn(f"hyper-connection runs on the PyTorch reference: {reason}", stacklevel=3)
    return False


def _reason_against(plan: Spec | str, x: Tensor) -> str | None:
    if isinstance(plan, str):
        return plan
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels need a CUDA device, the streams are on {x.device}"
    if torch._C._are_functorch_transforms_active():
        return "the kernels have no rules for torch.func transforms"
    from jpmhc.kernels.connection import uncovered  # Triton is not there on every platform

    return uncovered(plan, x.dtype)


def read(coefficients: "CoefficientMap", plan: Spec | str, x: Tensor) -> tuple[Tensor, Any]:
    """The sublayer's input and the kernels' state for `write`."""
    from jpmhc.kernels import connection

    assert isinstance(plan, Spec)
    return connection.read(x, *coefficients.linear(), plan)


def write(x: Tensor, y: Tensor, state: Any, mean: bool = False) -> Tensor:
    """The streams after the sublayer's output has been written back, or their mean."""
    from jpmhc.kernels import connection

    return connection.write(y.to(x.dtype), state, x, mean)


def write_read(
    x: Tensor, y: Tensor, state: Any, following: "CoefficientMap", plan: Spec | str
) -> tuple[Tensor, Tensor, Any]:
    """Write of one connection and read of the next: the streams between, the next sublayer's input, its state."""
    from jpmhc.kernels import connection

    assert isinstance(plan, Spec)
    return connection.write_read(y.to(x.dtype), state, *following.linear(), plan)
