"""When a connection runs on the fused Triton kernels, and how it is handed to them."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jpmhc.connections.hyper import CoefficientMap

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plan(coefficients: "CoefficientMap", post_norm: str | None, eps: float) -> dict[str, Any] | str:
    """The fields of `jpmhc.kernels.Spec` for this connection, or one sentence saying why it cannot be fused."""
    mixer = coefficients.mixer
    settings = mixer.fused()
    if isinstance(settings, str):
        return settings
    if mixer.streams not in (2, 4, 8):
        return f"the kernels take 2, 4 or 8 streams, not {mixer.streams}"
    if coefficients.dim % 8 or coefficients.dim > 8192:
        return f"the kernels take a width that is a multiple of 8 and at most 8192, not {coefficients.dim}"
    return {
        "n": mixer.streams,
        "d": coefficients.dim,
        "norm": coefficients.norm,
        "eps": eps,
        "read": coefficients.read,
        "write": coefficients.write,
        "temperature": coefficients.temperature,
        "post_norm": post_norm is not None,
        **settings,
    }


def chosen(kernels: str, plan: dict[str, Any] | str, x: Tensor) -> bool:
    """Whether these streams run fused; a reason against it on CUDA is said, never swallowed."""
    if kernels == "reference" or (kernels == "auto" and x.device.type != "cuda"):
        return False
    reason = plan if isinstance(plan, str) else None
    if reason is None and x.dtype not in DTYPES:
        reason = f"the kernels take float32, bfloat16 or float16 streams, not {x.dtype}"
    if reason is None and torch._C._are_functorch_transforms_active():
        reason = "the kernels have no rules for torch.func transforms"
    if reason is None:
        return True
    if kernels == "fused":
        raise ValueError(f'kernels="fused" is not possible: {reason}')
    if not torch.compiler.is_compiling():
        warnings.warn(f"hyper-connection runs on the PyTorch reference: {reason}", stacklevel=3)
    return False


def read(coefficients: "CoefficientMap", plan: dict[str, Any] | str, x: Tensor) -> tuple[Tensor, Any]:
    """The sublayer's input and the kernels' state for `write`."""
    from jpmhc import kernels  # Triton is not there on every platform

    assert isinstance(plan, dict)
    return kernels.read(x, *coefficients.linear(), kernels.Spec(**plan))


def write(x: Tensor, y: Tensor, state: Any) -> Tensor:
    """The streams after the sublayer's output has been written back."""
    from jpmhc import kernels

    return kernels.write(y.to(x.dtype), state, x)


def write_read(
    x: Tensor, y: Tensor, state: Any, following: "CoefficientMap", plan: dict[str, Any] | str
) -> tuple[Tensor, Tensor, Any]:
    """Write of one connection and read of the next: the streams between, the next sublayer's input, its state."""
    from jpmhc import kernels

    assert isinstance(plan, dict)
    return kernels.write_read(y.to(x.dtype), state, *following.linear(), kernels.Spec(**plan))
