"""The theory's spectrum for a token's coefficients and gains, beside the measured spectrum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from jpmhc import spectra
from jpmhc.diagnose.layers import effective_coefficients
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.record import LayerCall
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.manifolds import orthogonal
from jpmhc.spectra import sublayers

# KS ignores relative shifts of singular values up to this size.
_LEEWAY = 0.01


@dataclass(frozen=True, eq=False)
class TheoryComparison:
    """One token's Jacobian through all layers, measured and predicted.

    Attributes:
        position: The token's number.
        measured: The spectrum of the streams after the last layer by those before the first.
        blocks: Mean squared singular value from stream j to stream i. [n, n]
        gains: Mean squared singular value of each sublayer at this token, without its multiple of the identity. [L]
        gradients: The theory's mean squared singular value of the derivative of the mean stream (or of all streams, if
            the map ends with them) by each sublayer's output. [L]
        predicted: The theory's density; None if it has none.
        wasserstein: W1 between prediction and measurement, in singular values.
        kolmogorov: KS between prediction and measurement, see `find_distances`.
        rotated: The spectrum with random singular vectors in every sublayer; None if it was too costly.
        mean_stream: The spectrum of the same map from n copies of a stream to their mean, which is the model's own map;
            None for one stream, or if the map was not measured densely.
        mean_predicted: The theory's density for `mean_stream`.
        mean_kolmogorov: KS between the two.
        note: The reason for a missing prediction, or the theory's warnings.
    """

    position: int
    measured: Spectrum
    blocks: Tensor
    gains: Tensor
    gradients: Tensor
    predicted: spectra.Density | None = None
    wasserstein: float = float("nan")
    kolmogorov: float = float("nan")
    rotated: Spectrum | None = None
    mean_stream: Spectrum | None = None
    mean_predicted: spectra.Density | None = None
    mean_kolmogorov: float = float("nan")
    note: str = ""

    def __repr__(self) -> str:
        return (
            f"TheoryComparison(position={self.position}, wasserstein={self.wasserstein:.3g}, "
            f"kolmogorov={self.kolmogorov:.3g}, measured={self.measured!r}, predicted={self.predicted!r})"
        )

    @property
    def aligned(self) -> float:
        """The measured 99 % quantile over the rotated one: above 1, layers amplify each other's directions."""
        return float("nan") if self.rotated is None else self.measured.quantile(0.99) / self.rotated.quantile(0.99)


def token_coefficients(
    calls: Sequence[LayerCall], skips: Sequence[float], position: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return read [n], write [n] and skip [n, n] of every layer for one token.

    The theory assumes sublayers without preferred directions, whose Jacobian has trace zero. The Jacobian of a trained
    sublayer is a multiple a of the identity plus a rest R. The multiple becomes part of the connection's skip, exactly:
    H ⊗ 1 + w rᵀ ⊗ (a 1 + R) = (H + a w rᵀ) ⊗ 1 + w rᵀ ⊗ R.

    Args:
        calls: A chain of layers.
        skips: The multiple of the identity in each plain layer or connection's sublayer.
        position: The token's number.
    """
    one = torch.ones(1, dtype=torch.float64)
    layers = []
    for call, skip in zip(calls, skips):
        if call.coefficients is None:
            layers.append((one, one, torch.full((1, 1), skip, dtype=torch.float64)))
        else:
            read, write, matrix = effective_coefficients(call)
            n = call.streams
            read, write = read.reshape(-1, n)[position], write.reshape(-1, n)[position]
            layers.append((read, write, matrix.reshape(-1, n, n)[position] + skip * torch.outer(write, read)))
    return layers


def make_network(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]], gains: Tensor, matrices: Sequence[Tensor] = ()
) -> spectra.Network:
    """Return the theory's network for these layers.

    Args:
        layers: Read, write and skip of each layer.
        gains: The sublayers' mean squared singular values. [L]
        matrices: The sublayers' Jacobians, whose singular values set their laws; without them, sublayers are
            Gaussian. [d, d] each
    """
    network = spectra.Network.from_coefficients(layers, gains.tolist())
    if not matrices:
        return network
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    laws = [sublayers.measured(each) if float(each.max()) > 0 else sublayers.gaussian() for each in values]
    return replace(network, sublayers=tuple(laws))


def predict_spectrum(network: spectra.Network) -> tuple[spectra.Density | None, str]:
    """Return the theory's density for a network and its warnings, or None and the reason."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            density = spectra.density(network)
        except ValueError as refusal:
            return None, f"the theory has no curve here: {refusal}"
    return density, "; ".join(str(warning.message) for warning in messages)


def find_distances(measured: Spectrum, predicted: spectra.Density) -> tuple[float, float]:
    """Return W1 in singular values, and KS with a tolerance of 1 % in each singular value.

    Skips alone give many equal singular values, which the theory smooths: without the tolerance KS would find half of
    them on the wrong side. KS leaves out singular values below the floor, and the uncertainty of a quadrature with few
    nodes.
    """
    grid, cumulative = predicted.x.sqrt().numpy(), predicted.cumulative().numpy()

    def theory(at: np.ndarray) -> np.ndarray:
        return np.interp(at, grid, cumulative, left=cumulative[0], right=1.0)

    points = np.unique(measured.values)
    points = points[points >= max(grid[0], measured.floor)]
    lower, upper = measured.bound_cumulative(points)
    over, under = theory(points * (1 - _LEEWAY)) - upper, lower - theory(points * (1 + _LEEWAY))
    return predicted.wasserstein(measured.squares()), float(max(over.max(initial=0.0), under.max(initial=0.0)))


def compose_layers(layers: Sequence[tuple[Tensor, Tensor, Tensor]], matrices: Sequence[Tensor]) -> Tensor:
    """Multiply out the Jacobian of a chain of layers with constant coefficients, ∏ (H ⊗ 1 + w rᵀ ⊗ F′). [n d, n d]

    Args:
        layers: Read, write and skip of each layer.
        matrices: The sublayers' Jacobians F′. [d, d] each
    """
    n, width = len(layers[0][0]), len(matrices[0])
    total = torch.eye(n * width, dtype=torch.float64)
    for (read, write, skip), matrix in zip(layers, matrices):
        streams = total.reshape(n, width, n * width)
        output = matrix @ torch.einsum("j,jpc->pc", read, streams)
        mixed = torch.einsum("ij,jpc->ipc", skip, streams)
        total = (mixed + write.view(n, 1, 1) * output).reshape(n * width, n * width)
    return total


def rotate_sublayers(
    layers: Sequence[tuple[Tensor, Tensor, Tensor]], matrices: Sequence[Tensor], seed: int
) -> Spectrum:
    """Compute the spectrum of the same layers with random singular vectors in every sublayer.

    Args:
        layers: Read, write and skip of each layer.
        matrices: The sublayers' Jacobians. [d, d] each
        seed: Of the random orthogonal matrices.
    """
    generator = torch.Generator().manual_seed(seed)

    def rotate(matrix: Tensor) -> Tensor:
        left, right = (orthogonal.sample(len(matrix), generator=generator) for _ in range(2))
        return left @ (torch.linalg.svdvals(matrix.double()).unsqueeze(-1) * right)

    return spectrum_of(compose_layers(layers, [rotate(matrix) for matrix in matrices]))
