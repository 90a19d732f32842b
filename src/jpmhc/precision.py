"""The precision of small matrices: float32 or float64, whatever type a model has and whatever autocast asks for."""

import contextlib

import torch
from torch import Tensor

_UNCHANGED = contextlib.nullcontext()


def single_or_double(tensor: Tensor) -> Tensor:
    """Return the tensor in the precision of small matrices: float64 stays, other types become float32."""
    if not tensor.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, got {tensor.dtype}")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autocast leaves the small matrices on this tensor's device in full precision."""
    if not torch._C._is_any_autocast_enabled():
        return _UNCHANGED
    device = tensor.device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return _UNCHANGED
    return torch.autocast(device, enabled=False)


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# torch 2.11 cannot trace the question. This is what torch.compiler.assume_constant_result sets; calling it here would
# import all of the compiler.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]
