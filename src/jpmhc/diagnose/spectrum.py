"""A measured spectrum: singular values with weights, and its statistics with error bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.spectra.density import COLLAPSED
from jpmhc.spectra.sublayers import gauss_nodes, jacobi_matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Singular values above this count as exploded.
EXPLODED = 10.0
# Steps of a bisection for a quantile: each halves the logarithmic interval, from twenty decades to one per cent.
_BISECTIONS = 14
# The number of points of an integral over log s.
_LOG_POINTS = 100
# The number of redrawn spectra, from which a standard deviation is known to 5 %.
_REDRAWN = 200


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The measured singular values of a Jacobian, with weights.

    Lanczos quadrature from random vectors ("probes") gives only a lower and an upper bound of the distribution
    function. A share of singular values is then the mean of the two bounds, and `error` includes the distance to the
    bounds.

    Attributes:
        values: Singular values, ascending in each row. A dense measurement has one row; Lanczos quadrature has
            one row of k nodes for each of s probes. [s, k]
        weights: The share of all singular values that each of `values` represents; each row sums to one. [s, k]
        shape: Rows and columns of the Jacobian.
        method: "dense" or "lanczos".
        floor: Singular values below the floor are rounding errors.
        side: The distribution function from which shares, quantiles and the geometric mean are computed: its "lower"
            bound, its "upper" bound, or "middle" (for shares the mean of the bounds, otherwise the quadrature itself).
    """

    values: np.ndarray
    weights: np.ndarray
    shape: tuple[int, int]
    method: str
    floor: float = 0.0
    side: Literal["lower", "middle", "upper"] = "middle"

    def __repr__(self) -> str:
        ends = f"singular values from {self.smallest:.3g} to {self.largest:.3g}"
        return f"Spectrum(shape={self.shape}, {ends}, method={self.method!r})"

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a matplotlib figure of the distribution function of the singular values.

        Args:
            path: A file to write the figure to as well: PNG, SVG or PDF by its ending.
        """
        from jpmhc.report.diagnosis import plot_spectrum
        from jpmhc.report.style import save_and_return

        return save_and_return(plot_spectrum(self), path)

    @property
    def largest(self) -> float:
        """The largest singular value."""
        return float(self.values.max())

    @property
    def smallest(self) -> float:
        """The smallest singular value."""
        return float(self.values.min())

    def quantile(self, probability: float) -> float:
        """Return the singular value below which the share `probability` of all singular values lies."""
        checks.inside(probability, "[0, 1]", "a quantile's probability")
        if self.exact or self.side == "middle":
            values, weights = self._pooled()
            if not self.exact:  # below the first node, the share falls from the node's to zero at the floor
                values, weights = np.append(self.floor, values), np.append(0.0, weights)
            return _quantile(values, weights, probability)
        low, high = max(self.floor, self.largest * 1e-20), 2 * self.largest
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self.below(middle) >= probability else (middle, high)
        return (low * high) ** 0.5

    def below(self, threshold: float = COLLAPSED) -> float:
        """Return the share of singular values below a threshold."""
        if self.exact:
            return float((self.weights * (self.values < threshold)).sum() / len(self.weights))
        lower, upper = self.bound_cumulative(np.array([threshold]))
        return float({"lower": lower, "middle": (lower + upper) / 2, "upper": upper}[self.side][0])

    def above(self, threshold: float = EXPLODED) -> float:
        """Return the share of singular values above a threshold."""
        if self.exact:
            return float((self.weights * (self.values > threshold)).sum() / len(self.weights))
        return 1 - self.below(threshold)

    @property
    def exact(self) -> bool:
        """Whether the distribution function is known exactly, and not only between bounds."""
        return self.method == "dense" or self.values.shape[1] >= min(self.shape)

    def typical(self) -> float:
        """Return t, the geometric mean of the singular values that are at least t / 10."""
        values, weights = self._pooled()
        typical = _quantile(values, weights, 0.9)
        for _ in range(20):
            alive = values >= max(COLLAPSED * typical, self.floor)
            if not alive.any():
                return typical
            following = float(np.exp(np.average(np.log(values[alive]), weights=weights[alive])))
            if abs(following - typical) <= 1e-3 * typical:
                break
            typical = following
        return typical

    def mean_square(self) -> float:
        """Return the mean of the squared singular values."""
        return float((self.weights * self.values**2).sum() / len(self.weights))

    def geometric_mean(self) -> float:
        """Return the geometric mean of the singular values; values below the floor count as the floor."""
        if self.exact or self.side == "middle":
            safe = np.maximum(self.values, max(self.floor, 1e-300))
            return float(np.exp((self.weights * np.log(safe)).sum() / len(self.weights)))
        points = np.geomspace(max(self.floor, self.largest * 1e-20), self.largest, _LOG_POINTS)
        shares = self.bound_cumulative(points)[self.side == "upper"]
        return self.largest * float(np.exp(-np.trapezoid(shares, np.log(points))))

    def error(self, read: Callable[[Spectrum], float]) -> float:
        """Return a bound on a statistic's error, which holds for nine of ten seeds; 0 for a dense measurement.

        The error has two parts. The first is twice the standard deviation that random vectors cause (`_redraw`). The
        second comes from few quadrature nodes: the largest change of the statistic at the lower bound, at the upper
        bound, or with half as many steps.

        Args:
            read: The statistic, such as `Spectrum.mean_square` or `lambda s: s.quantile(0.5)`.
        """
        if self.method == "dense":
            return 0.0
        scatter = 2 * float(np.std([read(drawn) for drawn in self._redraw()]))
        if self.exact:
            return scatter
        others = replace(self, side="lower"), replace(self, side="upper"), self._halved()
        return scatter + max(abs(read(other) - read(self)) for other in others)

    def _redraw(self) -> Iterator[Spectrum]:
        """Yield the spectra that other random vectors would have shown.

        With s random vectors and N singular values, a weight w comes from s N w squared Gaussian numbers, whose sum is
        Gamma-distributed with the shape s N w / 2. The scatter between the s vectors would be less
        reliable, because it is small if no vector shows the tail.
        """
        values, weights = self._pooled()
        shape = weights / weights.sum() * (len(self.values) * min(self.shape) / 2)
        for drawn in np.random.default_rng(0).standard_gamma(shape, (_REDRAWN, len(shape))):
            yield replace(self, values=values[None], weights=drawn[None] / drawn.sum(), method="dense")

    def _halved(self) -> Spectrum:
        """Return the quadrature with half as many steps, padded with nodes at zero of weight zero."""
        values, weights = np.zeros_like(self.values), np.zeros_like(self.weights)
        for row, (own, shares) in enumerate(zip(self.values, self.weights)):
            nodes, halved = gauss_nodes(torch.from_numpy(own**2), torch.from_numpy(shares), max(len(own) // 2, 1))
            values[row, -len(nodes) :], weights[row, -len(nodes) :] = nodes.sqrt().numpy(), halved.numpy()
        return replace(self, values=values, weights=weights)

    def squares(self, count: int = 4000) -> Tensor:
        """Return squared singular values of equal weight: all values if dense, otherwise `count` quantiles."""
        if self.method == "dense":
            return torch.from_numpy(self.values[0] ** 2)
        probabilities = (np.arange(count) + 0.5) / count
        values, shares = self.cumulative()
        order = np.searchsorted(shares, probabilities)
        return torch.from_numpy(values[np.minimum(order, len(values) - 1)] ** 2)

    def cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all probes' singular values in ascending order, and the distribution function at each. [s k] each"""
        values, weights = self._pooled()
        return values, np.cumsum(weights) / weights.sum()

    def bound_cumulative(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a lower and an upper bound of the share of singular values up to each point.

        These are the bounds of Chebyshev, Markov and Stieltjes: every law with the same moments lies between them. If
        all singular values are known, the bounds differ only at a singular value, where the share jumps.
        """
        if not self.exact:
            lower, upper = np.mean([_bound_shares(jacobi, points) for jacobi in self._jacobi], 0)
            return lower, upper
        bounds = np.zeros((2, len(points)))
        for values, weights in zip(self.values, self.weights):
            total = np.concatenate([[0.0], np.cumsum(weights)]) / weights.sum()
            bounds += np.stack([total[np.searchsorted(values, points, side=side)] for side in ("left", "right")])
        return bounds[0] / len(self.values), bounds[1] / len(self.values)

    @cached_property
    def _jacobi(self) -> list[np.ndarray]:
        """The Jacobi matrix of the squared singular values of each probe. [k, k] each"""
        pairs = zip(torch.from_numpy(self.values**2), torch.from_numpy(self.weights))
        return [jacobi_matrix(squares, weights, len(squares)).numpy() for squares, weights in pairs]

    def _pooled(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all probes' singular values in ascending order, and their weights. [s k] each"""
        order = np.argsort(self.values, axis=None, kind="stable")
        return self.values.ravel()[order], self.weights.ravel()[order]


def _quantile(values: np.ndarray, weights: np.ndarray, probability: float) -> float:
    """Return a quantile of ascending values with weights, by linear interpolation.

    Each value is the quantile at the weight of all smaller values plus half its own weight.
    """
    middle = (np.cumsum(weights) - weights / 2) / weights.sum()
    return float(np.interp(probability, middle, values))


def _bound_shares(jacobi: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return bounds of the share of singular values up to each point, from a probe's Jacobi matrix. [2, points]

    The Jacobi matrix [k, k] of the squared singular values gives a Gauss quadrature with k nodes. For each point x,
    another quadrature with k nodes has one node at x²; the bounds are its total weight below x² and up to x². Its
    Jacobi matrix differs from the given one only in the last diagonal entry, which is x² + b² e. Here b is the entry
    beside the last diagonal entry, T is the matrix without the last row and column, and e is the last diagonal entry of
    (T - x²)⁻¹.
    """
    if len(jacobi) < 2:
        share = np.searchsorted(np.sqrt(jacobi.diagonal()), points, side="right")
        return np.stack([share, share]).astype(float)
    head, beside = np.linalg.eigh(jacobi[:-1, :-1]), jacobi[-1, -2]
    squares = points**2
    distances = head.eigenvalues - squares[:, None]
    smallest = np.finfo(float).eps * head.eigenvalues.max()
    distances = np.where(np.abs(distances) < smallest, smallest, distances)
    matrices = np.repeat(jacobi[None], len(points), 0)
    matrices[:, -1, -1] = squares + beside**2 * (head.eigenvectors[-1] ** 2 / distances).sum(-1)
    nodes, vectors = np.linalg.eigh(matrices)
    shares = np.concatenate([np.zeros((len(points), 1)), np.cumsum(vectors[:, 0] ** 2, -1)], -1)
    at = np.abs(nodes - squares[:, None]).argmin(-1)
    rows = np.arange(len(points))
    return np.stack([shares[rows, at], np.minimum(shares[rows, at + 1], 1.0)])
