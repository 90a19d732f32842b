"""Modes of torch that change what a computation is: tensors without numbers, transforms, traces."""

import contextlib

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def with_real_numbers() -> contextlib.AbstractContextManager[object]:
    """Return a context whose tensors hold numbers, also where `FakeTensorMode` gives all others a shape alone."""
    return _disable_current_modes()


def is_transformed() -> bool:
    """Say whether the code runs under `torch.func`, forward-mode differentiation or `torch.jit.trace`."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch._C._is_tracing()


def is_exported() -> bool:
    """Say whether `torch.export` traces the code that runs now.

    Inside every compilation torch 2.11 answers True to `torch.compiler.is_exporting()`; the flag behind it is right.
    """
    return torch.compiler._is_exporting_flag
