"""When a connection runs on the fused Triton kernels, and how it is handed to them."""

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from jpmhc.kernels.spec import Spec

if TYPE_CHECKING:
    from jpmhc.connections.hyper import CoefficientMap, HyperConnection


def plan(coefficients: "CoefficientMap", post_norm: str | None, eps: float) -> Spec | str:
    """What the kernels are told of this connection, or one sentence saying why it cannot be fused."""
    kind = type(coefficients.mixer)
    described = next(base for base in kind.__mro__ if "fused" in vars(base))
    if kind.forward is not getattr(described, "forward", None):
        return f"the mixer {kind.__name__} has a forward of its own, which the kernels do not know"
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


def chosen(connection: "HyperConnection", x: Tensor) -> bool:
    """Whether these streams run fused; a reason against it on CUDA is said, never swallowed."""
    kernels = connection.kernels
    if kernels == "reference" or (kernels == "auto" and x.device.type != "cuda"):
        return False
    reason = _reason_against(connection, x)
    if reason is None:
        return True
    if kernels == "fused":
        raise ValueError(f'kernels="fused" is not possible: {reason}')
    if not torch.compiler.is_compiling():
        warnings.warn(f"hyper-connection runs on the PyTorch reference: {reason}", stacklevel=3)
    return False


def _reason_against(connection: "HyperConnection", x: Tensor) -> str | None:
    plan, coefficients = connection.plan, connection.map
    if isinstance(plan, str):
        return plan
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels need a CUDA device, the streams are on {x.device}"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "the kernels have no rules for torch.func transforms and forward-mode derivatives"
    if coefficients.logits.dtype != torch.float32:
        return f"the coefficients must be float32, they are {coefficients.logits.dtype}"
    from jpmhc.kernels.connection import uncovered  # Triton is not there on every platform

    return uncovered(plan, x.dtype, coefficients.weight is not None)


def read(connection: "HyperConnection", x: Tensor) -> tuple[Tensor, Any]:
    """The sublayer's input and the kernels' state for `write`."""
    from jpmhc.kernels import connection as kernels

    assert isinstance(connection.plan, Spec)
    return kernels.read(x, *connection.map.linear(), connection.plan)


def write(connection: "HyperConnection", x: Tensor, y: Tensor, state: Any, mean: bool = False) -> Tensor:
    """The streams after the sublayer's output has been written back, or their mean."""
    from jpmhc.kernels import connection as kernels

    assert isinstance(connection.plan, Spec)
    if not isinstance(state, kernels.State) or state.spec.key != connection.plan.key:
        raise ValueError("the state must be what this connection's read returned")
    return kernels.write(y.to(x.dtype), state, x, mean)


def write_read(y: Tensor, state: Any, following: "HyperConnection") -> tuple[Tensor, Tensor, Any]:
    """Write of one connection and read of the next: the streams between, the next sublayer's input, its state."""
    from jpmhc.kernels import connection as kernels

    assert isinstance(following.plan, Spec)
    return kernels.write_read(y.to(state.x.dtype), state, *following.map.linear(), following.plan)
