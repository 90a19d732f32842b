"""What the tokens' reads, writes and skips do to the streams: their product, and how alike the streams are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.diagnose.record import LayerCall


@dataclass(frozen=True, eq=False)
class StreamStatistics:
    """How the streams fare along the layers, averaged over tokens.

    Attributes:
        similarity: Mean cosine between two streams after each layer: 1 means that they are copies. [L]
        dominance: The largest share of the streams' squared length that one stream holds after each layer. [L]
        read: Mean read weights. [L, n]
        write: Mean write weights. [L, n]
        product: Singular values of the product of all skips, descending. [n]
        geometric_mean: The n-th root of its determinant, which is the geometric mean of its singular values.
        direct: 1ᵀ H_L … H_1 1 / n: how much of the mean stream passes the skips.
    """

    similarity: Tensor
    dominance: Tensor
    read: Tensor
    write: Tensor
    product: Tensor
    geometric_mean: float
    direct: float


def measure_streams(calls: Sequence[LayerCall]) -> StreamStatistics:
    """Summarise the coefficients and streams of a chain of connections."""
    n = calls[0].streams
    skips = [effective_coefficients(call)[2].reshape(-1, n, n) for call in calls]
    total = skips[0]
    for skip in skips[1:]:
        total = skip @ total
    values = torch.linalg.svdvals(total)
    logs = values.clamp_min(torch.finfo(values.dtype).tiny).log().mean()
    return StreamStatistics(
        similarity=torch.stack([stream_similarity(call.after) for call in calls]),
        dominance=torch.stack([stream_dominance(call.after) for call in calls]),
        read=torch.stack([effective_coefficients(call)[0].reshape(-1, n).mean(0) for call in calls]),
        write=torch.stack([effective_coefficients(call)[1].reshape(-1, n).mean(0) for call in calls]),
        product=values.mean(0),
        geometric_mean=float(logs.exp()),
        direct=float(total.sum((-1, -2)).mean() / n),
    )


def effective_coefficients(call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reads, writes and skips that the tokens really have, in float64 on the CPU.

    A norm after the write divides each stream by its length R: the map is then R⁻¹H, with writes R⁻¹w. A layer norm's
    length is that of the centred stream; what centring takes away is one direction of a stream, and its weights count
    as one.
    """
    assert call.coefficients is not None
    read, write, skip = (part.double().cpu() for part in call.coefficients)
    if call.post_norm:
        x, y = call.before.detach().double().cpu(), call.output.detach().double().cpu()
        raw = skip @ x + write.unsqueeze(-1) * y.unsqueeze(-2)
        if call.post_norm == "layer":
            raw = raw - raw.mean(-1, keepdim=True)
        length = raw.square().mean(-1).sqrt().clamp_min(1e-12)  # [..., n]
        write, skip = write / length, skip / length.unsqueeze(-1)
    return read, write, skip


def stream_similarity(x: Tensor) -> Tensor:
    """Return the mean cosine between two different streams. [..., n, d]"""
    n = x.shape[-2]
    if n == 1:
        return torch.ones((), dtype=torch.float64)
    unit = torch.nn.functional.normalize(x.detach().double(), dim=-1)
    cosines = (unit @ unit.mT).reshape(-1, n, n).mean(0)
    return ((cosines.sum() - cosines.trace()) / (n * (n - 1))).cpu()


def stream_dominance(x: Tensor) -> Tensor:
    """Return the mean share of a token's squared length that its longest stream holds: 1 / n to 1. [..., n, d]"""
    squares = x.detach().double().square().sum(-1)
    return (squares.max(-1).values / squares.sum(-1).clamp_min(1e-300)).mean().cpu()
