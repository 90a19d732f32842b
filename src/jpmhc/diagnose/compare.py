"""Measure one token's Jacobian through all layers, and compare it with the theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jpmhc import spectra
from jpmhc.diagnose.jacobian import Jacobian
from jpmhc.diagnose.layers import measure_gain, measure_sublayer
from jpmhc.diagnose.methods import Part, measure_matrix, measure_quadrature, spectrum_of
from jpmhc.diagnose.record import LayerCall
from jpmhc.diagnose.shared_modes import SharedModes, find_modes, multiply_all
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.theory import (
    kolmogorov_distance,
    make_network,
    mean_stream_of,
    predict_spectrum,
    rotate_sublayers,
    token_coefficients,
)

# The numbers of random vectors for the blocks from stream to stream, and for the sublayers' gains and shared modes.
_VECTORS, PROBES = 4, 16


@dataclass(frozen=True, eq=False, kw_only=True)
class MapComparison:
    """The measured and the predicted spectrum of a map.

    Attributes:
        measured: The measured spectrum.
        predicted: The theory's density for layers with random singular vectors; None if the theory gives none.
        rotated: The theory's prediction with shared modes: the spectrum of the same layers, with random singular
            vectors in each sublayer's Jacobian except for its shared modes. None if it was too costly.
    """

    measured: Spectrum
    predicted: spectra.Density | None = None
    rotated: Spectrum | None = None

    @cached_property
    def wasserstein(self) -> float:
        """The Wasserstein distance of `measured` from `predicted`, in singular values; NaN without a prediction."""
        return math.nan if self.predicted is None else self.predicted.wasserstein(self.measured.squares())

    @cached_property
    def kolmogorov(self) -> float:
        """The `kolmogorov_distance` of `measured` from `predicted`; NaN without it."""
        return kolmogorov_distance(self.measured, self.predicted)

    @cached_property
    def rotated_kolmogorov(self) -> float:
        """The `kolmogorov_distance` of `measured` from `rotated`; NaN without `rotated`."""
        return kolmogorov_distance(self.measured, self.rotated)


@dataclass(frozen=True, eq=False, kw_only=True)
class TheoryComparison(MapComparison):
    """The spectra of one token's Jacobian through all L layers, from all n streams to all streams.

    Attributes:
        position: The token's number.
        own: The spectra of the model's own map, from n copies of a stream to the mean of the final streams; None for
            one stream, or if the map was not measured densely.
        blocks: Mean squared singular value of the Jacobian's block from stream j to stream i. [n, n]
        gains: Mean squared singular value of each sublayer's Jacobian at this token, after a multiple of the identity
            was subtracted from the Jacobian. [L]
        gradients: The theory's prediction for each sublayer: the mean squared singular value of the derivative of the
            mean final stream (or of all final streams, if the model's own map ends with them) with respect to the
            sublayer's output. [L]
        modes: The shared modes of the sublayers at this token (see shared_modes.py); None for a single layer.
        note: The reason for a missing prediction, or the theory's warnings.
    """

    position: int
    own: MapComparison | None = None
    blocks: Tensor
    gains: Tensor
    gradients: Tensor
    modes: SharedModes | None = None
    note: str = ""

    def __repr__(self) -> str:
        return (
            f"TheoryComparison(position={self.position}, wasserstein={self.wasserstein:.3g}, "
            f"kolmogorov={self.kolmogorov:.3g}, measured={self.measured!r}, predicted={self.predicted!r})"
        )

    @property
    def model_map(self) -> MapComparison | None:
        """The model's own map: with one stream the map of all streams, otherwise `own`."""
        return self if len(self.blocks) == 1 else self.own

    @property
    def rotation(self) -> str:
        """The name of `rotated` in tables and charts, with the number of shared modes."""
        count = 0 if self.modes is None else self.modes.count
        return f"with {count} shared mode{'s' * (count > 1)}" if count else "sampled, no shared modes"

    @property
    def aligned(self) -> float:
        """`measured`'s 99 % quantile divided by `rotated`'s; above 1, layers amplify each other's directions."""
        return math.nan if self.rotated is None else self.measured.quantile(0.99) / self.rotated.quantile(0.99)


def compare_token(
    chain: Sequence[LayerCall],
    jacobian: Jacobian,
    part: Part,
    *,
    all_streams: bool,
    by_matrices: bool,
    seed: int,
    progress: Callable[[int], None],
) -> TheoryComparison:
    """Measure the map through all layers at one token, and compare it with the theory.

    Args:
        chain: The layers' calls, in order.
        jacobian: The Jacobian of the map through the layers at the token.
        part: The planned measurement of this Jacobian.
        all_streams: Whether the model's own map ends with all streams, and not with their mean.
        by_matrices: Whether to compute every sublayer's Jacobian as a matrix, for the theory and for `rotated`.
        seed: The seed of the random vectors and rotations.
        progress: Called with the number of rows, or of products with the Jacobian, computed since the last call.
    """
    position, n = jacobian.position, chain[0].streams
    assert position is not None
    own_measured, own = None, None
    if part.method == "dense":
        matrix = measure_matrix(jacobian, part.chunk, progress)
        measured = spectrum_of(matrix)
        blocks = matrix.double().reshape(n, len(matrix) // n, n, -1).square().sum((1, 3)) / (len(matrix) // n)
        own_measured = spectrum_of(mean_stream_of(matrix, n), matrix.dtype) if n > 1 else None
    else:
        measured = measure_quadrature(jacobian, part.probes, part.steps, seed, progress)
        blocks = _estimate_blocks(jacobian, n, seed + 4)
    skips, variance, matrices, modes = _measure_sublayers(chain, jacobian, part.chunk, by_matrices, seed + 3)
    layers = token_coefficients(chain, skips, position)
    network = make_network(layers, variance, matrices)
    predicted, note = predict_spectrum(network)
    rotated, own_rotated = rotate_sublayers(layers, matrices, seed, modes) if matrices else (None, None)
    if own_measured is not None:
        own_predicted, _ = predict_spectrum(network.end_to_end())
        own = MapComparison(measured=own_measured, predicted=own_predicted, rotated=own_rotated)
    end = torch.eye(n, dtype=torch.float64) if all_streams else None
    return TheoryComparison(
        position=position,
        measured=measured,
        predicted=predicted,
        rotated=rotated,
        own=own,
        blocks=blocks,
        gains=variance,
        gradients=spectra.gradient_gains(network, end),
        modes=modes,
        note=note,
    )


def _measure_sublayers(
    chain: Sequence[LayerCall], jacobian: Jacobian, chunk: int, by_matrices: bool, seed: int
) -> tuple[list[float], Tensor, list[Tensor], SharedModes | None]:
    """Split each of the L sublayers' Jacobians at the token into a multiple of the identity and a rest.

    Args:
        chunk: The number of rows per backward pass.
        by_matrices: Whether to compute the Jacobians as matrices; otherwise random vectors give estimates.

    Returns:
        The multiples [L]; the rests' mean squared singular values [L]; the rests as matrices [d, d] (an empty list
        without `by_matrices`); and the layers' shared modes, None for a single layer.
    """
    position = jacobian.position
    assert position is not None
    if by_matrices:
        pairs = [measure_sublayer(call, position, chunk or 1, jacobian.at.batched) for call in chain]
        skips, matrices = [skip for skip, _ in pairs], [matrix for _, matrix in pairs]
        gains = [float(matrix.square().sum() / len(matrix)) for matrix in matrices]
        parts, samples = torch.stack(matrices), matrices[0].numel()
    else:
        size = chain[0].output.numel() // math.prod(chain[0].positions)
        vectors = draw_vectors(PROBES, size, jacobian.at.y, seed)
        estimates = [measure_gain(call, vectors, position) for call in chain]
        skips, gains, matrices = [one.skip for one in estimates], [one.gain for one in estimates], []
        parts, samples = torch.stack([one.sketch for one in estimates]).double(), min(PROBES, size) * size
    modes = find_modes(multiply_all(parts), samples) if len(chain) > 1 else None
    return skips, torch.tensor(gains, dtype=torch.float64), matrices, modes


def draw_vectors(count: int, size: int, like: Tensor, seed: int) -> Tensor:
    """Draw standard normal vectors with the type and device of the tensor `like`. [count, size]"""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def _estimate_blocks(jacobian: Jacobian, n: int, seed: int) -> Tensor:
    """Estimate, from random vectors, the mean squared singular value of the Jacobian's blocks. [n, n]

    The entry [i, j] is for the block from stream j to stream i, of n streams.
    """
    vectors = draw_vectors(_VECTORS, jacobian.shape[0], jacobian.at.y, seed).reshape(_VECTORS, n, -1)
    rows = []
    for stream in range(n):
        only = torch.zeros_like(vectors)
        only[:, stream] = vectors[:, stream]
        back = jacobian.multiply_transposed(only.flatten(1)).reshape(_VECTORS, n, -1)
        rows.append(back.double().square().mean(0).mean(-1).cpu())
    return torch.stack(rows)
