"""Measurements of single layers (gains and gradients) and of the streams between the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc.diagnose.jacobian import Jacobian, LinearisedMap
from jpmhc.diagnose.methods import measure_matrix
from jpmhc.diagnose.record import LayerCall


@dataclass(frozen=True)
class LayerMeasurement:
    """The measurements of one call of one layer.

    Attributes:
        name: The module's name, with the number of the call if the module is called more than once.
        skip: The mean of the diagonal of the layer's Jacobian (for a connection, of the sublayer's Jacobian).
        gain: The mean squared singular value, over all tokens, of this Jacobian minus `skip` times the identity.
        gradient: The mean squared singular value of the derivative of the map's output with respect to the output of
            this layer (for a connection, of the sublayer).
        similarity: The mean cosine between two streams after the layer.
        dominance: The longest stream's share of the squared length of all streams after the layer.
        predicted: The theory's prediction of `gradient`, scaled to the measured gradient of the last layer; NaN for a
            layer without a prediction.
    """

    name: str
    skip: float
    gain: float
    gradient: float
    similarity: float = 1.0
    dominance: float = 1.0
    predicted: float = float("nan")


class Gain(NamedTuple):
    """Statistics of a layer's Jacobian, estimated from a few random vectors.

    Attributes:
        skip: The mean of the Jacobian's diagonal.
        gain: The mean squared singular value of the rest R, the Jacobian minus `skip` times the identity.
        sketch: The products of Rᵀ with the random vectors. The inner product of two layers' sketches with the same
            vectors estimates the inner product of their rests. [k, size]
    """

    skip: float
    gain: float
    sketch: Tensor


def measure_gain(call: LayerCall, vectors: Tensor, position: int | None = None) -> Gain:
    """Estimate a layer's skip and gain from a few random vectors, over all tokens or at one token.

    Args:
        call: The layer's call, whose tensors are in the model's autograd graph.
        vectors: Standard normal vectors; `size` is the size of the output, or with `position` of one token's output.
            [k, size]
        position: The token's number; None for all tokens.
    """
    jacobian = Jacobian(LinearisedMap(call.inside, call.output, _no_run, call.positions, batched=False), position)
    size = jacobian.shape[1]
    vectors = vectors[:, : jacobian.shape[0]]
    back = jacobian.multiply_transposed(vectors)
    square = float(back.double().square().sum(-1).mean() / size)
    skip = float((back * vectors).double().sum(-1).mean() / size)
    sketch = (back - skip * vectors if back.shape == vectors.shape else back).cpu()
    return Gain(skip, max(square - skip**2, 0.0), sketch)


def measure_sublayer(call: LayerCall, position: int, chunk: int, batched: bool) -> tuple[float, Tensor]:
    """Split the sublayer's Jacobian at one token into a · 1 + R; return the number a and the rest R [d, d].

    The number a is the median eigenvalue of the Jacobian's symmetric part. For fresh sublayers the mean of the diagonal
    would be as good, but in trained sublayers a few directions can dominate that mean.

    Args:
        chunk: The number of rows of the Jacobian per backward pass.
        batched: Whether one backward pass can compute several rows.
    """
    at = LinearisedMap(call.inside, call.output, _no_run, call.positions, batched=batched)
    matrix = measure_matrix(Jacobian(at, position), chunk).double()
    skip = float(torch.linalg.eigvalsh((matrix + matrix.mT) / 2).quantile(0.5))
    return skip, matrix - skip * torch.eye(len(matrix), dtype=matrix.dtype)


def measure_gradients(calls: Sequence[LayerCall], y: Tensor, vectors: Tensor) -> list[float]:
    """Estimate the mean squared singular value of the derivative of y with respect to each layer's output.

    Args:
        calls: The layers' calls; for a connection, the output is the output of its sublayer.
        y: The output of the measured map.
        vectors: Standard normal vectors of y's size. [k, size of y]
    """
    totals = [0.0] * len(calls)
    for vector in vectors:
        outputs = [call.output for call in calls]
        gradients = torch.autograd.grad(y, outputs, vector.reshape(y.shape), retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                totals[number] += float(gradient.double().square().mean()) / len(vectors)
    return totals


def _no_run(x: Tensor) -> Tensor:
    raise AssertionError("a sublayer is measured in the model's own graph")


@dataclass(frozen=True, eq=False)
class StreamStatistics:
    """Statistics of n streams and of the coefficients of L connections, averaged over tokens.

    Attributes:
        similarity: Mean cosine between two streams after each layer: 1 means that the streams are copies. [L]
        dominance: The longest stream's share of the squared length of all streams after each layer. [L]
        rank: The effective number of different streams after each layer, from 1 to n (see `stream_rank`). [L]
        read: Mean read weights, with which a connection mixes the streams into the sublayer's input. [L, n]
        write: Mean write weights, with which a connection adds the sublayer's output to the streams. [L, n]
        product: Singular values of the product of all skips H [n, n], the matrices that mix the streams; descending.
            [n]
        geometric_mean: The geometric mean of the singular values in `product`.
        direct: 1ᵀ H_L … H_1 1 / n, where 1 is the vector of ones: the factor by which skips alone multiply the mean
            stream.
    """

    similarity: Tensor
    dominance: Tensor
    rank: Tensor
    read: Tensor
    write: Tensor
    product: Tensor
    geometric_mean: float
    direct: float


def measure_streams(calls: Sequence[LayerCall]) -> StreamStatistics:
    """Compute the statistics of a chain of connections.

    The write weights and skips are the connections' own: a norm after the write is not multiplied into them.
    """
    n = calls[0].streams
    reads, writes, skips = zip(*(_read_coefficients(call) for call in calls))
    total = skips[0].reshape(-1, n, n)
    for skip in skips[1:]:
        total = skip.reshape(-1, n, n) @ total
    values = torch.linalg.svdvals(total)
    logs = values.clamp_min(torch.finfo(values.dtype).tiny).log().mean()
    return StreamStatistics(
        similarity=torch.stack([stream_similarity(call.after) for call in calls]),
        dominance=torch.stack([stream_dominance(call.after) for call in calls]),
        rank=torch.stack([stream_rank(call.after) for call in calls]),
        read=torch.stack([read.reshape(-1, n).mean(0) for read in reads]),
        write=torch.stack([write.reshape(-1, n).mean(0) for write in writes]),
        product=values.mean(0),
        geometric_mean=float(logs.exp()),
        direct=float(total.sum((-1, -2)).mean() / n),
    )


def _read_coefficients(call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return read, write and skip of a connection for every token, in float64 on the CPU."""
    assert call.coefficients is not None
    read, write, skip = (part.double().cpu() for part in call.coefficients)
    return read, write, skip


def effective_coefficients(call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return read, write and skip of a connection for every token, with the norm after the write multiplied in.

    The norm divides each stream by its root mean square. With the diagonal matrix R of these n numbers, the skip H
    becomes R⁻¹H and the write w becomes R⁻¹w. For a layer norm, R is from the streams minus their means. The projection
    that subtracts the means and the norm's own weights are neglected. All three tensors are in float64 on the CPU.
    """
    read, write, skip = _read_coefficients(call)
    if call.post_norm:
        x, y = call.before.detach().double().cpu(), call.output.detach().double().cpu()
        raw = skip @ x + write.unsqueeze(-1) * y.unsqueeze(-2)
        if call.post_norm == "layer":
            raw = raw - raw.mean(-1, keepdim=True)
        length = raw.square().mean(-1).sqrt().clamp_min(1e-12)  # [..., n]
        write, skip = write / length, skip / length.unsqueeze(-1)
    return read, write, skip


def stream_similarity(x: Tensor) -> Tensor:
    """Return the cosine between two different streams of x [..., n, d], averaged over pairs and tokens."""
    n = x.shape[-2]
    if n == 1:
        return torch.ones((), dtype=torch.float64)
    unit = torch.nn.functional.normalize(x.detach().double(), dim=-1)
    cosines = (unit @ unit.mT).reshape(-1, n, n).mean(0)
    return ((cosines.sum() - cosines.trace()) / (n * (n - 1))).cpu()


def stream_dominance(x: Tensor) -> Tensor:
    """Return the longest stream's share of the squared length of x [..., n, d], averaged over tokens: 1 / n to 1."""
    squares = x.detach().double().square().sum(-1)
    return (squares.max(-1).values / squares.sum(-1).clamp_min(1e-300)).mean().cpu()


def stream_rank(x: Tensor) -> Tensor:
    """Return the effective number of different streams in x [..., n, d], averaged over tokens: 1 to n.

    It is (Σ λ)² / Σ λ² with the eigenvalues λ of x xᵀ [n, n]: n for orthogonal streams of equal length, 1 for copies.
    """
    gram = x.detach().double() @ x.detach().double().mT
    total = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square()
    return (total / gram.square().sum((-2, -1)).clamp_min(1e-300)).mean().cpu()
