"""Print tables of spectra, and write the panel's numbers as CSV."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from jpmhc.files import write_csv
from jpmhc.paper.panel import Cell, rows
from jpmhc.spectra.density import COLLAPSED, Density
from jpmhc.spectra.distances import Distances
from jpmhc.spectra.network import Network


@dataclass(frozen=True, eq=False)
class Answer:
    """The predicted spectrum of one network, and sampled singular values to compare.

    Attributes:
        network: The network.
        density: The predicted density.
        edges: The lower and upper end of each band, in singular values. [k, 2]
        moments: The first four moments of squared singular values, without smoothing. [4]
        sampled: Squared singular values of sampled networks; None if no networks were sampled.
        distances: The distances between `density` and `sampled`; None without samples.
        seconds: The computation time of the theory.
    """

    network: Network
    density: Density
    edges: Tensor
    moments: Tensor
    sampled: Tensor | None
    distances: Distances | None
    seconds: float


def print_answer(answer: Answer) -> None:
    """Print a short table that describes a spectrum."""
    found = answer.density
    table = Table(show_header=False, box=None)
    exact = "exact" if found.exact else "NOT exact here"
    table.add_row("method", f"{found.method} ({exact}), residual at most {found.residual:.0e}, {answer.seconds:.2f} s")
    table.add_row("mass", f"{found.mass:.5f} captured on {len(found.x)} points, {found.below:.5f} below them")
    if int(found.interpolated.sum()):
        table.add_row("unconverged", f"{int(found.interpolated.sum())} points, interpolated from their neighbours")
    bands = ", ".join(f"{low:.4g} – {high:.4g}" for low, high in answer.edges.tolist())
    table.add_row("singular values", bands)
    table.add_row("moments of s²", "  ".join(f"{value:.6g}" for value in answer.moments.tolist()))
    table.add_row("mean of s²", f"{found.first_moment:.6g} on the grid, {found.exact_moment:.6g} exactly")
    quantiles = "  ".join(f"{found.quantile(p):.4g}" for p in (0.01, 0.1, 0.5, 0.9, 0.99))
    table.add_row("quantiles of s", f"{quantiles} (1, 10, 50, 90, 99 %); ratio of 99 % to 1 %: {found.condition():.4g}")
    table.add_row("collapsed", f"{found.collapsed():.2%} of singular values are below {COLLAPSED:g}")
    if answer.distances is not None:
        d = answer.distances
        table.add_row(
            "to samples",
            f"W1 {d.wasserstein:.3g}, KS {d.kolmogorov:.3g}, L1 {d.l1:.3g}, L2 {d.l2:.3g}, Linf {d.linf:.3g}",
        )
    Console().print(table)


def print_panel(cells: Sequence[Cell]) -> None:
    """Print W1 and the collapsed share of every cell, in lines of at most 85 characters."""
    print("W1 in singular values to the sampled networks; share of singular values below 0.1")
    print("  L mixer          W1 exact  fixed eta  scalar |  sampled   exact  fixed eta  scalar")
    for cell in cells:
        apart = {name: f"{item.wasserstein:.2g}" for name, item in cell.distances.items()}
        share = {name: f"{value:.1%}" for name, value in cell.collapsed().items()}
        print(
            f"{cell.depth:3} {cell.mixer:14} {apart['exact']:>8}  {apart['fixed']:>9}  {apart['scalar']:>6} | "
            f"{share['sampled']:>8} {share['exact']:>7}  {share['fixed']:>9} {share['scalar']:>7}"
        )


def write_panel(cells: Sequence[Cell], path: Path) -> Path:
    """Write the panel's numbers as CSV and return the file's path."""
    table = rows(cells)
    return write_csv(path, table[0], (row.values() for row in table))
