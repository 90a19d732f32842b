"""Copy a hidden state into n streams, average streams, and check the shapes of streams and hidden states."""

import warnings

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from jpmhc import checks, modes

_ROUNDED = 1e-3  # largest relative difference that rounding may leave between equal streams


def describe(value: object) -> list[int] | str:
    """Return a tensor's shape, or the name of any other value's class, for a message."""
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def expand_streams(x: Tensor, streams: int) -> Tensor:
    """Copy a hidden state into n equal streams. [..., d] → [..., n, d]"""
    checks.whole_number(streams, "streams")
    if not isinstance(x, Tensor) or x.ndim < 1:
        raise ValueError(f"expected a hidden state of shape [..., d], got {describe(x)}")
    return x.unsqueeze(-2).repeat_interleave(streams, -2)


def reduce_streams(x: Tensor) -> Tensor:
    """Return the mean over the streams; of equal streams, it is the hidden state. [..., n, d] → [..., d]"""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-2] < 1:
        raise ValueError(f"expected streams of shape [..., n, d] with n >= 1, got {describe(x)}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point streams, got {x.dtype}")
    return x.mean(-2)


def check_streams(x: object, streams: int, dim: int) -> None:
    """Raise an error unless x is n streams [..., n, d], or one stream [..., 1, d] that stands for n equal streams."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] != dim or x.shape[-2] not in (streams, 1):
        hidden = isinstance(x, Tensor) and x.shape[-1:] == (dim,)
        advice = f"; expand_streams(x, {streams}) makes streams of a hidden state [..., {dim}]" if hidden else ""
        raise ValueError(f"expected streams of shape [..., {streams}, {dim}], got {describe(x)}{advice}")
    if not x.is_floating_point():
        raise ValueError(f"expected floating-point streams, got {x.dtype}")


def notice_tokens(x: Tensor, streams: int) -> bool:
    """Warn if streams [batch, n, d] may be the hidden states of n tokens. Return whether the check was possible.

    A model's first streams come from `expand_streams` and are equal, so different streams may be tokens. The check is
    impossible for tensors without values, in a function transform, and in the capture of a CUDA graph.
    """
    if x.is_meta or isinstance(x, FakeTensor) or modes.is_transformed():
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if x.ndim == 3 and x.shape[-2] == streams > 1:
        apart = (x[:, 1:] - x[:, :1]).detach().abs()
        if apart.numel() and bool(apart.amax() > _ROUNDED * x.detach().abs().amax()):
            warnings.warn(
                f"the first streams {list(x.shape)} differ from each other: if these are {streams} tokens of a hidden "
                "state, call expand_streams first, or make a HyperConnectionStack with expand=True (with expand=False "
                "it takes different streams without this warning)",
                stacklevel=6,  # the caller of the module
            )
    return True


def check_hidden_state(x: object, dim: int) -> None:
    """Raise an error unless x is a hidden state [..., d] of width `dim`."""
    if not isinstance(x, Tensor) or x.ndim < 1 or x.shape[-1] != dim:
        raise ValueError(f"expected a hidden state of shape [..., {dim}], got {describe(x)}")
    if not x.is_floating_point():
        raise ValueError(f"expected a floating-point hidden state, got {x.dtype}")


def flatten_streams(x: Tensor, streams: int, dim: int) -> Tensor:
    """Return the streams of all tokens as [T, n, d]. A single stream, which stands for n equal ones, is copied."""
    flat = x.reshape(-1, x.shape[-2], dim)
    return flat if flat.shape[1] == streams else expand_streams(flat.squeeze(1), streams)
