"""Operations on a hidden state [..., d], applied to each of n streams [..., n, d].

Every operation here takes the streams x [..., n, d] and the arguments of the operation on the hidden state [..., d]. It
returns the new streams, or None if it cannot act on each stream because it changes the last dimension.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Operation = Callable[..., Tensor | None]


def _numbers(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the sizes as a tuple, from a call such as `view(2, 3)`, `view((2, 3))` or `view(torch.Size([2, 3]))`."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes


def _leading(dim: int, x: Tensor) -> bool:
    """Return whether `dim` is a dimension of the hidden state [..., d] before the last; x is [..., n, d]."""
    return -(x.ndim - 1) <= dim < x.ndim - 2 and dim != -1


def _from_front(dim: int, x: Tensor) -> int:
    """Return `dim`, which may count from the end of the hidden state [..., d], as a number from the front."""
    return dim if dim >= 0 else dim + x.ndim - 1


def reshape(x: Tensor, *sizes: Any, shape: Any = None) -> Tensor | None:
    """Reshape the hidden state's dimensions [...], except its last one, in the streams x [..., n, d]."""
    new_shape = _numbers(sizes) if shape is None else tuple(shape)
    if not new_shape or isinstance(new_shape[0], torch.dtype):
        return None
    n, d = x.shape[-2:]
    tokens = x.shape[:-2].numel()
    leading = new_shape[:-1]
    if new_shape[-1] == -1:
        if -1 in leading or torch.Size(leading).numel() != tokens:
            return None
    elif new_shape[-1] != d:
        return None
    return x.reshape(*leading, n, d)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor | None:
    """Exchange two dimensions of the hidden state, except its last one, in the streams x."""
    if not (_leading(dim0, x) and _leading(dim1, x)):
        return None
    return x.transpose(_from_front(dim0, x), _from_front(dim1, x))


def permute(x: Tensor, *dims: Any) -> Tensor | None:
    """Reorder the dimensions of the hidden state, except its last one, in the streams x."""
    order = [_from_front(dim, x) for dim in _numbers(dims)]
    return x.permute(*order[:-1], x.ndim - 2, x.ndim - 1) if order[-1] == x.ndim - 2 else None


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    """Join neighbouring dimensions of the hidden state, except its last one, in the streams x."""
    if not (_leading(start_dim, x) and _leading(end_dim, x)):
        return None
    return x.flatten(_from_front(start_dim, x), _from_front(end_dim, x))


def unsqueeze(x: Tensor, dim: int) -> Tensor | None:
    """Insert a dimension of size one, at any place before the hidden state's last dimension, in the streams x."""
    position = dim if dim >= 0 else dim + x.ndim
    return x.unsqueeze(position) if position <= x.ndim - 2 else None


def squeeze(x: Tensor, *dims: Any, dim: int | None = None) -> Tensor | None:
    """Remove the given dimensions of size one of the hidden state from the streams x."""
    squeezed = _numbers(dims) if dim is None else (dim,)
    if not squeezed or not all(_leading(dim, x) for dim in squeezed):
        return None
    return x.squeeze(tuple(_from_front(dim, x) for dim in squeezed))


def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor | None:
    """Shift the streams x cyclically along dimensions of the hidden state, except its last one."""
    rolled = dims if isinstance(dims, Sequence) else [] if dims is None else [dims]
    if not rolled or not all(_leading(dim, x) for dim in rolled):
        return None
    return x.roll(shifts, [_from_front(dim, x) for dim in rolled])


def getitem(x: Tensor, index: Any) -> Tensor | None:
    """Index the streams x in dimensions of the hidden state, except its last one."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis or isinstance(part, list) for part in parts):
        return None
    taken = sum(
        part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else part is not None for part in parts
    )
    return x[index] if taken < x.ndim - 1 else None


def _beside(x: Tensor, other: Any) -> Any:
    """Return a factor of the hidden state, reshaped to broadcast over the streams x; None if that is impossible."""
    if not isinstance(other, Tensor) or other.ndim <= 1:
        return other if not isinstance(other, Tensor) or other.ndim == 0 or other.shape[0] in (1, x.shape[-1]) else None
    shape = (*x.shape[:-2], x.shape[-1])
    fits = other.ndim <= len(shape) and all(a in (1, b) for a, b in zip(reversed(other.shape), reversed(shape)))
    return other.unsqueeze(-2) if fits else None


def mul(x: Tensor, other: Any) -> Tensor | None:
    """Return the streams x times a number, or times a tensor that broadcasts to the hidden state."""
    factor = _beside(x, other)
    return None if factor is None else x * factor


def div(x: Tensor, other: Any, **kwargs: Any) -> Tensor | None:
    """Return the streams x divided by a number, or by a tensor that broadcasts to the hidden state."""
    divisor = _beside(x, other)
    return None if divisor is None or kwargs else x / divisor


def shift(x: Tensor, other: Any) -> Tensor | None:
    """Return the streams x plus a number or a bias [d]; this is not a residual addition."""
    term = _beside(x, other)
    return None if term is None else x + term


def clone(x: Tensor, **_: Any) -> Tensor:
    """Return the streams x themselves, because streams are never changed in place."""
    return x


def _normalise(function: Callable[..., Tensor]) -> Operation:
    """Return an operation that applies a norm's function to streams, if the norm is only over the last dimension."""

    def normalise(x: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        return function(x, normalized_shape, *args, **kwargs) if tuple(normalized_shape) == x.shape[-1:] else None

    return normalise


def _dropout(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the streams x after dropout; x is not changed, even with `inplace`."""
    return F.dropout(x, *args, **{key: value for key, value in kwargs.items() if key != "inplace"})


# The operations by name; a `StreamStep.name` is one of these names, "add", or "module" with the module's name.
OPERATIONS: dict[str, Operation] = {
    "clone": clone,
    "div": div,
    "dropout": _dropout,
    "flatten": flatten,
    "getitem": getitem,
    "layer_norm": _normalise(F.layer_norm),
    "mul": mul,
    "permute": permute,
    "reshape": reshape,
    "rms_norm": _normalise(F.rms_norm),
    "roll": roll,
    "shift": shift,
    "squeeze": squeeze,
    "transpose": transpose,
    "unsqueeze": unsqueeze,
}
# Operations that a layer may apply only for some data types; they are not steps of a plan.
TYPE_CHANGES: dict[str, Callable[..., Tensor]] = {"clamp": torch.clamp, "to": Tensor.to}

_NAMES = ("clamp", "clone", "div", "flatten", "permute", "reshape", "roll", "squeeze", "transpose", "unsqueeze")
# PyTorch's functions for these operations, whose first argument is the hidden state.
FUNCTIONS: dict[Any, str] = {getattr(torch, name): name for name in (*_NAMES, "dropout", "mul")}
FUNCTIONS |= {getattr(F, name): name for name in ("dropout", "layer_norm", "rms_norm")}
FUNCTIONS |= {torch.multiply: "mul", torch.true_divide: "div"}
# The methods of tensors for these operations; `Streams` itself defines a few more.
METHODS = {name: name for name in _NAMES} | {"view": "reshape"}
ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__radd__}
ADDITIONS |= {torch.Tensor.__iadd__}
PRODUCTS = {torch.mul, torch.multiply, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__}

# Functions that treat the second dimension of their input as channels.
CHANNELS_FIRST = {
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.group_norm,
    F.batch_norm,
    F.instance_norm,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
}
