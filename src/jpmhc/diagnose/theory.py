"""The theory's spectrum for one token's coefficients and gains, and the spectrum of layers with rotated sublayers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from jpmhc import spectra
from jpmhc.diagnose.layers import effective_coefficients
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.record import LayerCall
from jpmhc.diagnose.shared_modes import SharedModes, split_shared
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.manifolds import orthogonal
from jpmhc.spectra import sublayers

Layer = tuple[Tensor, Tensor, Tensor]  # read, write and skip of a layer at one token
# KS ignores relative shifts of singular values up to this size.
_LEEWAY = 0.01
# The number of draws of rotated sublayers is chosen for about this many singular values, up to the second number.
_DRAWN_VALUES, _MOST_DRAWS = 512, 16


def token_coefficients(calls: Sequence[LayerCall], skips: Sequence[float], position: int) -> list[Layer]:
    """Return read [n], write [n] and skip [n, n] of every layer for one token.

    The theory assumes sublayers without preferred directions, whose Jacobian has trace zero. The Jacobian of a trained
    sublayer is a multiple a of the identity plus a rest R. With read weights r, write weights w and skip H, the
    multiple becomes part of the skip, exactly: H ⊗ 1 + w rᵀ ⊗ (a 1 + R) = (H + a w rᵀ) ⊗ 1 + w rᵀ ⊗ R.

    Args:
        skips: The number a for each call. [L]
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


def make_network(layers: Sequence[Layer], gains: Tensor, matrices: Sequence[Tensor] = ()) -> spectra.Network:
    """Return the theory's network for these layers.

    Args:
        layers: Read [n], write [n] and skip [n, n] of each layer.
        gains: The sublayers' mean squared singular values. [L]
        matrices: The sublayers' Jacobians, whose singular values the network takes; without matrices, sublayers are
            Gaussian. [d, d] each
    """
    network = spectra.Network.from_coefficients(layers, gains.tolist())
    if not matrices:
        return network
    values = [torch.linalg.svdvals(matrix.double()) for matrix in matrices]
    laws = [sublayers.measured(each) if float(each.max()) > 0 else sublayers.gaussian() for each in values]
    return replace(network, sublayers=tuple(laws))


def predict_spectrum(network: spectra.Network) -> tuple[spectra.Density | None, str]:
    """Return the predicted density and the theory's warnings; without a prediction, None and the reason."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            density = spectra.density(network)
        except ValueError as refusal:
            return None, f"the theory has no curve here: {refusal}"
    return density, "; ".join(str(warning.message) for warning in messages)


def kolmogorov_distance(measured: Spectrum, predicted: spectra.Density | Spectrum | None) -> float:
    """Return the Kolmogorov–Smirnov distance KS of two spectra; NaN without prediction.

    KS tolerates a shift of each singular value by 1 %: skips alone give many equal singular values, which the theory
    smooths, and without the tolerance KS would be large at each such value. KS ignores singular values below
    `measured.floor`, and differences within a quadrature's bounds.
    """
    if predicted is None:
        return math.nan
    if isinstance(predicted, Spectrum):
        grid, cumulative = predicted.cumulative()
    else:
        grid, cumulative = predicted.x.sqrt().numpy(), predicted.cumulative().numpy()

    def theory(at: np.ndarray) -> np.ndarray:
        return np.interp(at, grid, cumulative, left=cumulative[0], right=1.0)

    points = np.unique(measured.values)
    points = points[points >= max(grid[0], measured.floor)]
    lower, upper = measured.bound_cumulative(points)
    over, under = theory(points * (1 - _LEEWAY)) - upper, lower - theory(points * (1 + _LEEWAY))
    return float(max(over.max(initial=0.0), under.max(initial=0.0)))


def compose_layers(layers: Sequence[Layer], matrices: Sequence[Tensor]) -> Tensor:
    """Compute the Jacobian of a chain of layers with constant coefficients, ∏ (H ⊗ 1 + w rᵀ ⊗ F′). [n d, n d]

    A layer has read weights r, write weights w and skip H.

    Args:
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
    layers: Sequence[Layer],
    matrices: Sequence[Tensor],
    seed: int,
    modes: SharedModes | None = None,
) -> tuple[Spectrum, Spectrum]:
    """Compute the spectra of J (all streams) and T (the mean stream) with random singular vectors in every sublayer.

    Random rotations replace the singular vectors of the sublayers' own parts; the shared parts stay (see
    shared_modes.py). For small matrices, each spectrum contains the singular values of several random draws.

    Args:
        layers: Read [n], write [n] and skip [n, n] of each layer.
        matrices: The sublayers' Jacobians. [d, d] each
        modes: The shared modes of the layers; None for sublayers without shared parts.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [(0.0, m) for m in matrices] if modes is None else split_shared(matrices, modes)
    n, width = len(layers[0][0]), len(matrices[0])
    streams, means = [], []
    for _ in range(max(1, min(_MOST_DRAWS, _DRAWN_VALUES // (n * width)))):
        turned = []
        for shared, own in parts:
            left, right = (orthogonal.sample(width, generator=generator) for _ in range(2))
            turned.append(shared + left @ own @ right)
        streams.append(compose_layers(layers, turned))
        means.append(mean_stream_of(streams[-1], n))
    return spectrum_of(torch.stack(streams)), spectrum_of(torch.stack(means))


def mean_stream_of(matrix: Tensor, streams: int) -> Tensor:
    """Turn a map of all streams into the map from n copies of one stream to the mean stream. [n d, n d] → [d, d]"""
    width = len(matrix) // streams
    return matrix.double().reshape(streams, width, streams, width).sum((0, 2)) / streams
