"""What the functions ask of their arguments, each refusal in one sentence."""

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def whole(value: int, name: str, least: int = 1) -> int:
    """The value as an int, if it is a whole number and large enough."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, at least {least}, not {value!r}")
    return number


def positive(value: float, name: str) -> float:
    """The value as a float, if it is a positive finite number."""
    number = _number(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value!r}")
    return number


def not_negative(value: float, name: str) -> float:
    """The value as a float, if it is a finite number and not negative."""
    number = _number(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and not negative, not {value!r}")
    return number


def _number(value: float) -> float:
    """A real number; NaN for whatever is none, which every comparison refuses."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def real(value: Tensor | np.ndarray | Sequence | float, name: str) -> Tensor:
    """The value as a finite float64 tensor."""
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            value = torch.stack(value)
        # Through NumPy, because torch would make Python numbers single precision.
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, RuntimeError):
        raise ValueError(f"{name} must be real numbers in an array of equal rows, not {_shown(value)}") from None
    if tensor.is_complex():
        raise ValueError(f"{name} must be real, not {tensor.dtype}")
    tensor = tensor.detach().to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite, without NaN or infinity")
    return tensor


def vectors(value: Tensor | Sequence, name: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    """One vector per layer [L, n], or one [n] for all of them, as [L, n]."""
    tensor = real(value, name).to(device)
    if tensor.ndim == 1:
        tensor = tensor.expand(shape[0], -1)
    if tensor.shape != shape:
        raise ValueError(f"{name} must be [L, n] = {list(shape)}, not {list(tensor.shape)}")
    return tensor


def _shown(value: object) -> str:
    """A value in few letters, or its type where it is long."""
    words = repr(value)
    return words if len(words) <= 40 and "\n" not in words else f"what this {type(value).__name__} holds"
