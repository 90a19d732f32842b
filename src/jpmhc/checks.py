"""What every manifold asks of its input: shapes, ranges, finite entries, and a precision to compute in."""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import torch
from torch import Tensor

_UNCHECKED = contextvars.ContextVar("unchecked", default=False)


def working(matrix: Tensor) -> Tensor:
    """The matrix in the precision it is computed in: float64 stays, everything else becomes float32."""
    if not matrix.is_floating_point():
        raise ValueError(f"expected a floating-point tensor, got {matrix.dtype}")
    return matrix if matrix.dtype == torch.float64 else matrix.float()


def square(matrix: Tensor, what: str = "matrix") -> int:
    """The order n of a batch of square matrices [..., n, n]."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] < 1:
        raise ValueError(f"expected {what} of shape [..., n, n], got {list(matrix.shape)}")
    return matrix.shape[-1]


def tall(frame: Tensor) -> tuple[int, int]:
    """Rows n and rank p of a batch of frames [..., n, p] with 1 <= p <= n."""
    if frame.ndim < 2 or not 1 <= frame.shape[-1] <= frame.shape[-2]:
        raise ValueError(f"expected a frame of shape [..., n, p] with 1 <= p <= n, got {list(frame.shape)}")
    return frame.shape[-2], frame.shape[-1]


def at_least_one(value: int | None, what: str) -> None:
    """Refuse what is no count, or a count below one."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{what} must be a whole number and at least 1, got {value!r}")


def positive(value: float | None, what: str) -> None:
    """Refuse zero, negative, infinite, NaN, and what is no number."""
    if value is not None and not (_number(value) and 0 < value < math.inf):
        raise ValueError(f"{what} must be positive and finite, got {value!r}")


def number(value: float, what: str) -> None:
    """Refuse infinite, NaN, and what is no number."""
    # By comparisons, which torch.compile can trace for a setting that differs from module to module.
    if not (_number(value) and -math.inf < value < math.inf):
        raise ValueError(f"{what} must be a finite number, got {value!r}")


def switch(value: bool, what: str) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}")


def _number(value: object) -> bool:
    return isinstance(value, int | float | torch.SymFloat) and not isinstance(value, bool)


def finite(matrix: Tensor, what: str = "logits") -> Tensor:
    """The matrix itself, with NaN and infinities refused where looking at values is free.

    Eager CPU code raises. Under `torch.compile`, under `torch.func` transforms and on the GPU the check would force a
    synchronisation or a graph break, so there a bad entry makes its own matrix NaN, and no other. So it does within
    `unchecked`.
    """
    if matrix.device.type != "cpu" or torch.compiler.is_compiling() or _UNCHECKED.get():
        return matrix
    if not _transformed(matrix):
        good = torch.isfinite(matrix.detach())
        if not bool(good.all()):
            raise ValueError(f"{what} must be finite, got {int((~good).sum())} NaN or infinite entries")
    return matrix


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """A context in which `finite` lets NaN through, for a caller that checks its result and can say more about it."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


def _transformed(matrix: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(matrix) or torch._C._are_functorch_transforms_active()


def uncast(matrix: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast leaves the small matrices alone: they are computed in full precision."""
    if not torch.amp.is_autocast_available(matrix.device.type):
        return contextlib.nullcontext()
    return torch.autocast(matrix.device.type, enabled=False)
