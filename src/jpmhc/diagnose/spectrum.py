"""A measured spectrum: singular values with weights, and its statistics with error bars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra.density import COLLAPSED

# Singular values above this count as exploded.
EXPLODED = 10.0


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The singular values of a measured Jacobian.

    Attributes:
        values: Singular values, ascending in each row. One row for a dense measurement, one for each probe of Lanczos
            quadrature. [s, k]
        weights: The share of all singular values that each one represents; rows sum to one. [s, k]
        shape: Rows and columns of the Jacobian.
        method: "dense" or "lanczos".
        floor: Singular values below this are rounding errors.
    """

    values: np.ndarray
    weights: np.ndarray
    shape: tuple[int, int]
    method: str
    floor: float = 0.0

    def __repr__(self) -> str:
        ends = f"singular values from {self.smallest:.3g} to {self.largest:.3g}"
        return f"Spectrum(shape={self.shape}, {ends}, method={self.method!r})"

    @property
    def largest(self) -> float:
        """The largest singular value."""
        return float(self.values.max())

    @property
    def smallest(self) -> float:
        """The smallest singular value."""
        return float(self.values.min())

    def quantile(self, probability: float) -> float:
        """Return the singular value below which this share of all singular values lies."""
        return _quantile(*self._pooled(), probability)

    def below(self, threshold: float = COLLAPSED) -> float:
        """Return the share of singular values below a threshold."""
        return float((self.weights * (self.values < threshold)).sum() / len(self.weights))

    def above(self, threshold: float = EXPLODED) -> float:
        """Return the share of singular values above a threshold."""
        return float((self.weights * (self.values > threshold)).sum() / len(self.weights))

    def mean_square(self) -> float:
        """Return the mean of the squared singular values."""
        return float((self.weights * self.values**2).sum() / len(self.weights))

    def geometric_mean(self) -> float:
        """Return the geometric mean of the singular values; smaller ones than the floor count as the floor."""
        safe = np.maximum(self.values, max(self.floor, 1e-300))
        return float(np.exp((self.weights * np.log(safe)).sum() / len(self.weights)))

    def error(self, read: Callable[[Spectrum], float]) -> float:
        """Return the standard error of a statistic of the spectrum; 0 for a dense one.

        Args:
            read: The statistic, such as `Spectrum.mean_square` or `lambda s: s.quantile(0.5)`.
        """
        if self.method == "dense":
            return 0.0
        if len(self.values) < 2:
            return float("nan")
        each = [read(self.probe(number)) for number in range(len(self.values))]
        return float(np.std(each, ddof=1) / len(each) ** 0.5)

    def probe(self, number: int) -> Spectrum:
        """Return the spectrum of one probe alone."""
        rows = slice(number, number + 1)
        return Spectrum(self.values[rows], self.weights[rows], self.shape, self.method, self.floor)

    def squares(self, count: int = 4000) -> Tensor:
        """Return squared singular values of equal weight, as `spectra.distances` takes them; all where it is dense."""
        if self.method == "dense":
            return torch.from_numpy(self.values[0] ** 2)
        probabilities = (np.arange(count) + 0.5) / count
        values, shares = self.cumulative()
        order = np.searchsorted(shares, probabilities)
        return torch.from_numpy(values[np.minimum(order, len(values) - 1)] ** 2)

    def wasserstein(self, other: Spectrum) -> float:
        """Return W1, the mean distance between the singular values of the two spectra in their order."""
        points, mine, theirs = self._compared(other)
        return float((np.abs(mine - theirs)[:-1] * np.diff(points)).sum())

    def kolmogorov(self, other: Spectrum) -> float:
        """Return KS, the largest difference of the two distribution functions."""
        _, mine, theirs = self._compared(other)
        return float(np.abs(mine - theirs).max())

    def cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the singular values of all probes in one ascending row, and the share of all up to each. [s k] each"""
        values, weights = self._pooled()
        return values, np.cumsum(weights) / weights.sum()

    def bound_cumulative(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a lower and an upper bound of the share of singular values up to each point.

        Quadrature with few nodes gives bounds only (Chebyshev, Markov and Stieltjes). At a node the share lies between
        the weight below the node and the weight up to the node. Between two nodes the lower bound leaves out the node
        below, and the upper bound includes the node above. A dense measurement has a gap between the bounds only at its
        singular values, where the share jumps.
        """
        lower, upper = np.zeros(len(points)), np.zeros(len(points))
        for values, weights in zip(self.values, self.weights):
            total = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
            below = np.searchsorted(values, points, side="left")
            upto = np.searchsorted(values, points, side="right")
            between = (below == upto) & (self.method != "dense")
            lower += total[np.maximum(below - between, 0)]
            upper += total[np.minimum(upto + between, len(values))]
        return lower / len(self.values), upper / len(self.values)

    def _compared(self, other: Spectrum) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        points = np.unique(np.concatenate([self.values.ravel(), other.values.ravel()]))
        return points, self._share_up_to(points), other._share_up_to(points)

    def _share_up_to(self, points: np.ndarray) -> np.ndarray:
        values, shares = self.cumulative()
        return np.concatenate([[0.0], shares])[np.searchsorted(values, points, side="right")]

    def _pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of all probes in one ascending row, and their weights."""
        order = np.argsort(self.values, axis=None, kind="stable")
        return self.values.ravel()[order], self.weights.ravel()[order]


def _quantile(values: np.ndarray, weights: np.ndarray, probability: float) -> float:
    """Interpolate between values, each in the middle of its weight."""
    middle = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.interp(probability, middle, values))
