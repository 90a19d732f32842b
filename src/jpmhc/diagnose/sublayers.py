"""What each sublayer does to small changes: its gain, its Jacobian at a token, and the gradient that reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.diagnose.dense import measure_matrix
from jpmhc.diagnose.jacobian import Jacobian, Linearised
from jpmhc.diagnose.record import LayerCall


@dataclass(frozen=True)
class LayerMeasurement:
    """What was measured of one call of one layer.

    Attributes:
        name: The module's name, with the number of the call where it is called more than once.
        skip: The multiple of the identity in the Jacobian of a plain layer, or of a connection's sublayer: its mean
            diagonal.
        gain: Mean squared singular value of what this Jacobian has beside it, over all tokens.
        gradient: Mean squared singular value of the derivative of the map's output by this layer's output.
        similarity: Mean cosine between two streams after the layer.
        dominance: Largest share of the squared length that one stream holds.
        predicted: What the theory says of the gradient from coefficients and gains at the compared tokens, scaled so
            that the last layer's is the measured one; NaN for a layer that is not compared with it.
    """

    name: str
    skip: float
    gain: float
    gradient: float
    similarity: float = 1.0
    dominance: float = 1.0
    predicted: float = float("nan")


def measure_gain(call: LayerCall, vectors: Tensor, position: int | None = None) -> tuple[float, float]:
    """Estimate a layer's skip and gain from a few random vectors, over all tokens or at one of them.

    Args:
        call: The layer's call, in its graph.
        vectors: Standard normal numbers; a row for each probe. [k, size of the output, of one token with a position]
        position: The number of the token.
    """
    jacobian = Jacobian(Linearised(call.inside, call.output, _no_run, call.positions, batched=False), position)
    size = jacobian.shape[1]
    vectors = vectors[:, : jacobian.shape[0]]
    back = jacobian.multiply_transposed(vectors)
    square = float(back.double().square().sum(-1).mean() / size)
    skip = float((back * vectors).double().sum(-1).mean() / size)
    return skip, max(square - skip**2, 0.0)


def measure_sublayer(call: LayerCall, position: int, chunk: int, batched: bool) -> tuple[float, Tensor]:
    """Return the multiple of the identity in a sublayer's Jacobian at one token, and the rest as a matrix. [d, d]"""
    at = Linearised(call.inside, call.output, _no_run, call.positions, batched=batched)
    matrix = measure_matrix(Jacobian(at, position), chunk).double()
    skip = float(matrix.diagonal().mean())
    return skip, matrix - skip * torch.eye(len(matrix), dtype=matrix.dtype)


def measure_gradients(calls: Sequence[LayerCall], y: Tensor, vectors: Tensor) -> list[float]:
    """Estimate the mean squared singular value of d y / d (layer's output), for all layers at once."""
    totals = [0.0] * len(calls)
    for vector in vectors:
        outputs = [call.output for call in calls]
        found = torch.autograd.grad(y, outputs, vector.reshape(y.shape), retain_graph=True, allow_unused=True)
        for number, gradient in enumerate(found):
            if gradient is not None:
                totals[number] += float(gradient.double().square().mean()) / len(vectors)
    return totals


def _no_run(x: Tensor) -> Tensor:
    raise AssertionError("a sublayer is measured in the model's own graph")
