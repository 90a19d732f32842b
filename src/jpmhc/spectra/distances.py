"""Distances between a predicted spectrum and sampled singular values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from jpmhc import checks

if TYPE_CHECKING:
    from jpmhc.spectra.density import Density


@dataclass(frozen=True)
class Distances:
    """Distances between a density and samples, all computed in singular values.

    Attributes:
        wasserstein: W1, the mean distance by which mass must move to turn the density into the samples.
        kolmogorov: The largest absolute difference between the distribution functions of the density and of the
            samples.
        l1: The integral of the absolute difference between the density and the samples' histogram.
        l2: The root of the integral of the squared difference between density and histogram.
        linf: The largest absolute difference between density and histogram.

    >>> Distances(0.01, 0.02, 0.1, 0.1, 0.3).wasserstein
    0.01
    """

    wasserstein: float
    kolmogorov: float
    l1: float
    l2: float
    linf: float


def distances(density: Density, samples: Tensor | np.ndarray, bins: int = 60) -> Distances:
    """Compute all distances between a density and samples of squared singular values.

    Args:
        samples: Squared singular values of any shape, as `simulate` returns them.
        bins: The number of bins of the samples' histogram for l1, l2 and linf. The density is averaged over the same
            bins, so that its fine structure does not count as a difference.

    >>> from jpmhc.spectra import Network
    >>> import torch
    >>> from jpmhc import spectra
    >>> network = spectra.Network.repeated(torch.eye(2), 0.1, 3)
    >>> samples = spectra.simulate(network, width=20, samples=10, seed=0)
    >>> distances(spectra.density(network), samples).wasserstein < 0.05
    True
    """
    bins = checks.whole_number(bins, "the number of bins")
    if not hasattr(density, "cumulative"):
        raise ValueError(
            f"the first argument must be a Density, not a {type(density).__name__}: distances(density, samples)"
        )
    s = singular_values(samples)
    grid, cumulative = density.x.sqrt().numpy(), density.cumulative().numpy()
    edges = np.linspace(0, max(s[-1], grid[-1]), bins + 1)
    width = edges[1]
    theory = np.diff(_cumulative_at(edges, grid, cumulative))
    theory[0] += cumulative[0]  # the mass below the grid
    empirical = np.histogram(s, edges)[0] / len(s)
    difference = np.abs(theory - empirical) / width
    return Distances(
        wasserstein=wasserstein(density, samples),
        kolmogorov=kolmogorov(density, samples),
        l1=float(difference.sum() * width),
        l2=float(np.sqrt((difference**2).sum() * width)),
        linf=float(difference.max()),
    )


def wasserstein(density: Density, samples: Tensor | np.ndarray) -> float:
    r"""Compute $W_1 = \int |F - F_n|\,ds$ for the distribution functions F of the density and $F_n$ of the samples.

    The integral is over singular values s. Mass below the density's grid is taken to lie at zero.
    """
    s = singular_values(samples)
    grid, cumulative = density.x.sqrt().numpy(), density.cumulative().numpy()
    points = np.unique(np.concatenate([[0.0], s, grid]))
    middle = (points[1:] + points[:-1]) / 2
    theory = _cumulative_at(middle, grid, cumulative)
    empirical = np.searchsorted(s, middle, side="right") / len(s)
    return float(np.sum(np.abs(theory - empirical) * np.diff(points)))


def kolmogorov(density: Density, samples: Tensor | np.ndarray) -> float:
    """Compute the largest difference between the distribution functions of a density and of samples.

    Samples below the density's grid are left out.
    """
    s = singular_values(samples)
    grid, cumulative = density.x.sqrt().numpy(), density.cumulative().numpy()
    resolved = s >= grid[0]
    theory = _cumulative_at(s[resolved], grid, cumulative)
    rank = np.arange(len(s))[resolved]
    if not len(rank):
        return float(1 - cumulative[0])
    return float(np.maximum(np.abs(theory - rank / len(s)), np.abs(theory - (rank + 1) / len(s))).max())


def singular_values(samples: Tensor | np.ndarray) -> np.ndarray:
    """Return the square roots of samples of squared singular values, sorted, in one row."""
    squares = checks.real_tensor(samples, "samples of squared singular values").cpu().numpy().ravel()
    if not len(squares) or squares.min() < 0:
        raise ValueError("samples must be squared singular values, at least one and none of them negative")
    return np.sort(np.sqrt(squares))


def _cumulative_at(s: np.ndarray, grid: np.ndarray, cumulative: np.ndarray) -> np.ndarray:
    """Interpolate a distribution function, known on a grid of singular values, at singular values s.

    Mass below the grid is taken to lie at zero.
    """
    return np.interp(s, grid, cumulative, left=cumulative[0], right=1.0)
