"""The precision of small matrices: float32 or float64, independent of the model's type and of autocast."""

import contextlib

import torch
from torch import Tensor

_UNCHANGED = contextlib.nullcontext()


def single_or_double(tensor: Tensor) -> Tensor:
    """Return a float64 tensor unchanged, and any other floating-point tensor as float32."""
    if not tensor.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, got {tensor.dtype}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast is off on the tensor's device."""
    if not torch._C._is_any_autocast_enabled():
        return _UNCHANGED
    device = tensor.device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return _UNCHANGED
    return torch.autocast(device, enabled=False)


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# torch 2.11 cannot trace this function. `torch.compiler.assume_constant_result` sets the same attribute, but calling it
# here would import the whole compiler.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]
