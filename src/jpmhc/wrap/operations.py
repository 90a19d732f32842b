"""Operations on a hidden state [..., d], applied to each of n streams [..., n, d].

Every operation here takes the streams x [..., n, d] and the arguments of the operation on the hidden state [..., d]. It
returns the new streams, or None if it cannot act on each stream because it changes the last dimension.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Operation = Callable[..., Tensor | None]


def _numbers(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the sizes as a tuple, from a call such as `view(2, 3)`, `view((2, 3))` or `view(torch.Size([2, 3]))`."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes


def _leading(ndim: int, *dims: int) -> bool:
    """Return whether these are dimensions of a hidden state of `ndim` dimensions, its last one not among them."""
    return len(dims) > 0 and all(-ndim <= dim < ndim - 1 and dim != -1 for dim in dims)


def _rearrange(name: str, keeps_last: Callable[..., bool]) -> Operation:
    """Return the operation on streams of a tensor's method that rearranges dimensions of a hidden state [..., d].

    The method gets the streams as one hidden state [..., n·d], whose dimensions have the same numbers.

    Args:
        keeps_last: Whether the last dimension stays, from the hidden state's number of dimensions and the arguments.
    """

    def rearrange(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if not keeps_last(x.ndim - 1, *args, **kwargs):
            return None
        rearranged: Tensor = getattr(x.flatten(-2), name)(*args, **kwargs)
        return rearranged.unflatten(-1, x.shape[-2:])

    return rearrange


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
    """Return a factor or term of the hidden state, reshaped to broadcast over the streams x; None if impossible."""
    if not isinstance(other, Tensor) or other.ndim <= 1:
        return other if not isinstance(other, Tensor) or other.ndim == 0 or other.shape[0] in (1, x.shape[-1]) else None
    shape = (*x.shape[:-2], x.shape[-1])
    fits = other.ndim <= len(shape) and all(a in (1, b) for a, b in zip(reversed(other.shape), reversed(shape)))
    return other.unsqueeze(-2) if fits else None


def _broadcast(function: Callable[[Tensor, Any], Tensor]) -> Operation:
    """Return an operation of the streams and a number, or a tensor that broadcasts to the hidden state."""

    def combine(x: Tensor, other: Any, **kwargs: Any) -> Tensor | None:
        beside = _beside(x, other)
        return None if beside is None or kwargs else function(x, beside)

    return combine


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
    "div": _broadcast(operator.truediv),
    "dropout": _dropout,
    "flatten": _rearrange("flatten", lambda ndim, start_dim=0, end_dim=-1: _leading(ndim, start_dim, end_dim)),
    "getitem": getitem,
    "layer_norm": _normalise(F.layer_norm),
    "mul": _broadcast(operator.mul),
    "permute": _rearrange("permute", lambda ndim, *dims: _numbers(dims)[-1] in (-1, ndim - 1)),
    "reshape": reshape,
    "rms_norm": _normalise(F.rms_norm),
    "roll": _rearrange(
        "roll", lambda ndim, shifts, dims=None: _leading(ndim, *_numbers((() if dims is None else dims,)))
    ),
    "shift": _broadcast(operator.add),  # a number or a bias [d], which is not a residual addition
    "squeeze": _rearrange("squeeze", lambda ndim, *dims, dim=(): _leading(ndim, *_numbers(dims or (dim,)))),
    "transpose": _rearrange("transpose", lambda ndim, dim0, dim1: _leading(ndim, dim0, dim1)),
    "unsqueeze": _rearrange("unsqueeze", lambda ndim, dim: -ndim <= dim + 1 <= ndim and dim != -1),
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
