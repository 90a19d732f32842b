"""Between one stream and n: copy on the way in, mean on the way out."""

from torch import Tensor

from jpmhc.manifolds import validate


def expand_streams(x: Tensor, streams: int) -> Tensor:
    """Copy a hidden state into n equal streams. [..., d] → [..., n, d]"""
    validate.at_least_one(streams, "streams")
    if x.ndim < 1:
        raise ValueError("expected a hidden state of shape [..., d], got a single number")
    return x.unsqueeze(-2).repeat_interleave(streams, -2)


def reduce_streams(x: Tensor) -> Tensor:
    """The mean over the streams, which undoes `expand_streams`. [..., n, d] → [..., d]"""
    if x.ndim < 2 or x.shape[-2] < 1:
        raise ValueError(f"expected streams of shape [..., n, d] with n >= 1, got {list(x.shape)}")
    return x.mean(-2)
