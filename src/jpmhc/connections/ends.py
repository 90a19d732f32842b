"""Modules at a model's ends: StreamExpansion, from a hidden state to n streams, and StreamHead, back."""

import math

import torch
from torch import Tensor, nn

from jpmhc import checks, dtensors
from jpmhc.connections import dtensor, reference
from jpmhc.connections.streams import check_streams

KINDS = ("learned", "mean", "sum")


class StreamExpansion(nn.Module):
    """A module that copies a hidden state into n streams and multiplies each by a learned factor, initially 1.

    Args:
        streams: The number n of streams.
        device: The device of the factors.
        dtype: The type of the factors; float16 and bfloat16 become float32.

    Shapes:
        x: [..., d] → [..., n, d]
    """

    tokens_apart = False  # as in `CoefficientMap`

    def __init__(
        self, streams: int = 4, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        checks.whole_number(streams, "streams")
        dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        self.scale = nn.Parameter(torch.ones(streams, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        scale = dtensors.leave(self.scale, self.tokens_apart).unsqueeze(-1)
        own = dtensor.find_own(x, 1, self.tokens_apart) if dtensors.is_dtensor(x) else x
        streams = (own.unsqueeze(-2) * scale).to(x.dtype)
        return dtensor.spread(streams, x, 1) if dtensors.is_dtensor(x) else streams

    def extra_repr(self) -> str:
        return f"streams={len(self.scale)}"


class StreamHead(nn.Module):
    r"""A module that combines the streams of each token: a learned weighted sum, the mean or the sum.

    The learned head computes $\sum_i (\sigma(s\,(W\,\mathrm{rms}(x))_i + b_i) + \epsilon)\, x_i$, which DeepSeek-V4
    puts before its last norm. W, b and s are learned; rms divides the n · dim numbers of a token by their root mean
    square. At the start the head computes the mean.

    Args:
        dim: Width of one stream.
        streams: The number n of streams.
        kind: `"learned"`, `"mean"` or `"sum"`.
        eps: Added to the mean square under the norm's root.
        read_eps: ε, added to the learned weights.
        device: The device of the parameters.

    Shapes:
        x: [..., n, d], or [..., 1, d] for equal streams → [..., d]
    """

    tokens_apart = False  # as in `CoefficientMap`

    def __init__(
        self,
        dim: int,
        streams: int = 4,
        kind: str = "learned",
        *,
        eps: float = reference.EPS,
        read_eps: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        checks.whole_number(dim, "dim")
        checks.whole_number(streams, "streams")
        checks.choice(kind, KINDS, "kind of head")
        eps = checks.positive_number(eps, "eps")
        checks.inside(read_eps, "[0, 0.1]", "read_eps")
        self.dim, self.streams, self.kind, self.eps, self.read_eps = dim, streams, kind, eps, read_eps
        if kind == "learned":
            self.weight = nn.Parameter(torch.zeros(streams, streams * dim, device=device))
            self.bias = nn.Parameter(torch.full((streams,), -math.log(max(streams - 1, 1e-6)), device=device))
            self.scale = nn.Parameter(torch.ones(1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        check_streams(x, self.streams, self.dim)
        if x.shape[-2] != self.streams:  # one stream that stands for n equal streams
            x = x.expand(*x.shape[:-2], self.streams, self.dim)
        if self.kind == "learned":
            own = dtensor.find_own(x, 2, self.tokens_apart) if dtensors.is_dtensor(x) else x
            weight, bias, scale = (dtensors.leave(p, self.tokens_apart) for p in (self.weight, self.bias, self.scale))
            h = read_streams(own, weight * scale, bias, self.eps, self.read_eps)
            return dtensor.spread(h, x) if dtensors.is_dtensor(x) else h
        return x.mean(-2) if self.kind == "mean" else x.sum(-2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, streams={self.streams}, kind={self.kind}"


def read_streams(x: Tensor, weight: Tensor, bias: Tensor, eps: float, read_eps: float) -> Tensor:
    """Return Σ_j r_j x_j for each token, with r = sigmoid(weight · rms(x) + bias) + read_eps.

    rms divides the n · d numbers of a token by their root mean square.

    x: [..., n, d], weight: [n, n * d], bias: [n] → [..., d]
    """
    flat = x.reshape(-1, *x.shape[-2:])
    weights = (reference.compute_logits(flat, weight, "rms", eps) + bias).sigmoid() + read_eps
    return reference.gather(flat, weights).reshape(*x.shape[:-2], x.shape[-1])
