"""Detect and leave PyTorch's special modes: tensors without values, function transforms, tracing, export."""

import contextlib

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def with_real_numbers() -> contextlib.AbstractContextManager[object]:
    """Return a context in which new tensors have values, even inside `FakeTensorMode`, where they have only shapes."""
    return _disable_current_modes()


def is_transformed() -> bool:
    """Return whether the code runs under `torch.func`, forward-mode differentiation or `torch.jit.trace`."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing()


def is_exported() -> bool:
    """Return whether `torch.export` is tracing the running code.

    In torch 2.11 `torch.compiler.is_exporting()` returns True in every compilation; the private flag is right.
    """
    return torch.compiler._is_exporting_flag
