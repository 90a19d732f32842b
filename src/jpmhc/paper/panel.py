"""The paper's Figure 1: a row per depth and a column per mixer, with sampled singular values and theories per cell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.machine import use_threads
from jpmhc.paper.methods import transform
from jpmhc.spectra.density import COLLAPSED, Density, density
from jpmhc.spectra.distances import Distances, distances
from jpmhc.spectra.network import Network
from jpmhc.spectra.simulate import simulate

# Points of the curves at a fixed eta, uniform in the singular value.
_POINTS = 500


@dataclass(frozen=True)
class PanelConfig:
    r"""The panel's networks, samples and curves, by default as in "Operator-Valued Spectral Density Panel".

    Attributes:
        mixers: The columns, as names of random skips.
        depths: The rows, as numbers of layers; all layers of a cell share one skip, as in the paper.
        samples: The number of sampled networks in each row; by default as in the paper, 300 for one layer, 200 for two
            layers and 100 for more.
        streams: The number of streams n.
        width: The number of features per stream p.
        budget: $L \sigma^2$, the noise variance of all L layers together.
        eta: The fixed smoothing of the scalar theory and of one exact curve.
        grid: The points of the curves with fixed eta. "s" gives 500 points uniform in the singular value. "x" gives the
            paper's points, uniform in the squared singular value from 0.01 (alg. ov_panel), and adds the paper's
            operator-valued curve as printed. Expanding skips make grid "x" long: ten Gaussian layers have 400,000
            points, which take minutes.
        seed: The seed of the skips and of the samples.
    """

    mixers: tuple[str, ...] = ("identity", "bistochastic", "orthogonal", "gaussian")
    depths: tuple[int, ...] = (1, 2, 10)
    samples: tuple[int, ...] = ()
    streams: int = 4
    width: int = 25
    budget: float = 0.05
    eta: float = 0.02
    grid: Literal["s", "x"] = "s"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.samples:
            object.__setattr__(self, "samples", tuple({1: 300, 2: 200}.get(depth, 100) for depth in self.depths))
        if not self.mixers or not 1 <= len(self.depths) == len(self.samples):
            raise ValueError(
                f"a panel needs at least one mixer, at least one depth and as many sample counts as depths, not "
                f"{len(self.mixers)}, {len(self.depths)} and {len(self.samples)}"
            )
        for name, values in (("mixer", self.mixers), ("depth", self.depths)):
            if len(set(values)) < len(values):
                raise ValueError(f"each {name} must be named once, and one is named twice")
        # All cells are checked now: an error in a later cell would lose the work of the earlier cells.
        for mixer in self.mixers:
            Network.from_mixer(mixer, 1, checks.non_negative_number(self.budget, "budget"), self.streams, self.seed)
        for depth, samples in zip(self.depths, self.samples):
            checks.whole_number(depth, "depth"), checks.whole_number(samples, "samples")
        checks.whole_number(self.width, "width, the features per stream,")
        checks.positive_number(self.eta, "eta")
        checks.choice(self.grid, ("s", "x"), "grid")


@dataclass(frozen=True, eq=False)
class Cell:
    """One cell of the panel: samples, theoretical curves, and the distance of each curve from the samples."""

    mixer: str  # name of the random skips
    depth: int  # number of layers
    sampled: Tensor  # squared singular values. [samples, N]
    # "scalar" (the scalar theory at the fixed eta), "fixed" (the exact theory at the fixed eta) and "exact" (the exact
    # theory with eta proportional to x); on the paper's grid also "printed" (the paper's operator-valued theory at the
    # fixed eta)
    curves: dict[str, Density]
    distances: dict[str, Distances]  # distances of each curve from the samples, in singular values

    def collapsed(self) -> dict[str, float]:
        """Return the fraction of singular values below 0.1 in the samples ("sampled") and in each curve."""
        fractions = {name: curve.collapsed() for name, curve in self.curves.items()}
        return {"sampled": float((self.sampled < COLLAPSED**2).double().mean()), **fractions}


def cell(mixer: str, depth: int, samples: int, config: PanelConfig) -> Cell:
    """Compute one cell: sample a network, compute the theoretical curves, and compare the curves with the samples."""
    network = Network.from_mixer(mixer, depth, config.budget / depth, config.streams, seed=config.seed, shared=True)
    sampled = simulate(network, config.width, samples, config.seed)
    grid = paper_grid(sampled) if config.grid == "x" else singular_value_grid(sampled)
    with warnings.catch_warnings():
        # No warning that the scalar theory is not exact: the panel is meant to show its error.
        warnings.simplefilter("ignore", UserWarning)
        methods = {"scalar": "dyson" if depth == 1 else "z1", "printed": "z1-matrix"}
        if config.grid == "s":
            del methods["printed"]
        curves = {
            name: density(network, grid, config.eta, transform=transform(method)).normalised()
            for name, method in methods.items()
        }
    curves |= {"fixed": density(network, grid, eta=config.eta).normalised(), "exact": density(network)}
    return Cell(mixer, depth, sampled, curves, {name: distances(curve, sampled) for name, curve in curves.items()})


def singular_value_grid(sampled: Tensor) -> Tensor:
    """Return the squares of 500 evenly spaced singular values.

    The last singular value is 1.25 times the largest one in `sampled`, but at least 1.5.
    """
    top = max(float(sampled.max()) ** 0.5 * 1.25, 1.5)
    return torch.linspace(0, top, _POINTS + 1, dtype=torch.float64)[1:].square()


def paper_grid(sampled: Tensor) -> Tensor:
    """Return the paper's grid of squared singular values, uniform from 0.01 (alg. ov_panel).

    The grid ends at 1.5 times the largest number in `sampled`, but at least at 10.

    Note:
        The grid begins at a singular value of 0.1: collapsed singular values are not on the grid.
    """
    top = max(1.5 * float(sampled.max()), 10.0)
    return torch.linspace(0.01, top, max(400, int(40 * top)), dtype=torch.float64)


def panel(config: PanelConfig, progress: Callable[[str], None] | None = None) -> list[Cell]:
    """Compute all cells, row by row; `progress` is called with a cell's name before the cell is computed.

    >>> cells = panel(PanelConfig(mixers=("identity",), depths=(1,), samples=(2,), streams=2, width=4))
    >>> [(cell.mixer, cell.depth) for cell in cells]
    [('identity', 1)]
    """
    cells: list[Cell] = []
    with use_threads(1):
        for depth, samples in zip(config.depths, config.samples):
            for mixer in config.mixers:
                if progress is not None:
                    progress(f"{mixer}, L = {depth}")
                cells.append(cell(mixer, depth, samples, config))
    return cells


def rows(cells: Sequence[Cell]) -> list[dict[str, str | int | float]]:
    """Return a table with one row per cell: distances, collapsed fractions, and moments of the exact curve."""
    table: list[dict[str, str | int | float]] = []
    for item in cells:
        row: dict[str, str | int | float] = {"mixer": item.mixer, "depth": item.depth}
        row |= {f"w1_{name}": distance.wasserstein for name, distance in item.distances.items()}
        row |= {f"ks_{name}": distance.kolmogorov for name, distance in item.distances.items()}
        row |= {f"collapsed_{name}": fraction for name, fraction in item.collapsed().items()}
        exact = item.curves["exact"]
        row |= {"mass": exact.mass, "below": exact.below, "first_moment": exact.first_moment}
        row |= {"exact_moment": exact.exact_moment, "residual": exact.residual, "method": exact.method}
        table.append(row)
    return table
