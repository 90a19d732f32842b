"""Show a panel of spectra for several depths and mixers: a table for a terminal, a figure, and the numbers as CSV.

A cell of the panel has one depth and one mixer. W1 is the Wasserstein distance between the singular values of a theory
and of the sampled networks. A singular value below 0.1 has collapsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from jpmhc.files import write_csv
from jpmhc.paper.panel import Cell, rows
from jpmhc.report.spectrum import BINS, SCALAR, WORTH_SAYING, draw_samples, full_curve
from jpmhc.report.style import EXACT, INK, SAMPLED, Look, colour_of, finish_axes, save_figure
from jpmhc.spectra.density import COLLAPSED
from jpmhc.spectra.distances import singular_values

FIXED = "#6b7280"
PRINTED = "#b0349a"
_LABELS = {
    "exact": "exact, η ∝ x",
    "fixed": "exact, η = {eta:g}",
    "scalar": "scalar theory, η = {eta:g}",
    "printed": "printed operator-valued theory, η = {eta:g}",
}
_SAMPLES = "#7d8590"  # the colour of text and curves about the samples, darker than the histogram
_KERNEL: Look = {"color": _SAMPLES, "linewidth": 1.0}
_POINTS = 300  # of the kernel estimate
_STYLES: dict[str, Look] = {  # in drawing order
    "printed": {"color": PRINTED, "linestyle": "-.", "linewidth": 1.1},
    "scalar": {"color": SCALAR, "linestyle": (0, (1, 1)), "linewidth": 1.6},
    "fixed": {"color": FIXED, "linestyle": "--", "linewidth": 1.1},
    "exact": {"color": EXACT, "linewidth": 1.5},
}


def print_panel(cells: Sequence[Cell]) -> None:
    """Print W1 and the collapsed share of every cell, in lines of at most 85 characters."""
    theories = ["exact", "fixed", "scalar"]
    curves = [*theories, *(name for name in cells[0].distances if name not in theories)]
    print("W1 in singular values to the sampled networks; share of singular values below 0.1")
    print(f"  L mixer         {_row(curves)} |{_row(['sampled', *theories])}")
    for cell in cells:
        apart = [f"{cell.distances[name].wasserstein:.2g}" for name in curves]
        share = [f"{cell.collapsed()[name]:.1%}" for name in ("sampled", *theories)]
        print(f"{cell.depth:3} {cell.mixer:14}{_row(apart)} |{_row(share)}")


def _row(words: Sequence[str]) -> str:
    return "".join(f"{word:>8}" for word in words)


def write_panel(cells: Sequence[Cell], path: Path) -> Path:
    """Write the panel's numbers as CSV and return the file's path."""
    table = rows(cells)
    return write_csv(path, table[0], (row.values() for row in table))


def draw_panel(
    cells: Sequence[Cell], eta: float, path: Path, *, logarithmic: bool = False, kernel: bool = False
) -> Path:
    """Draw all cells of a panel, with one row per depth and one column per mixer, and return the file's path.

    The exact theory has the mixer's colour, and the legend names the fixed smoothing `eta`. Logarithmic axes have
    densities per decade, which show all collapsed singular values. `kernel` adds a Gaussian kernel estimate of the
    samples' density.
    """
    mixers = list(dict.fromkeys(cell.mixer for cell in cells))
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    figure = Figure(figsize=(3.4 * len(mixers), 2.9 * len(depths) + 0.6), layout="constrained")
    axes = figure.subplots(len(depths), len(mixers), squeeze=False)
    for cell in cells:
        ax = axes[depths.index(cell.depth)][mixers.index(cell.mixer)]
        _draw_cell(ax, cell, logarithmic)
        if kernel:
            _draw_kernel_estimate(ax, cell, logarithmic)
        _annotate(ax, cell)
        ax.tick_params(labelsize=8)
    for ax, mixer in zip(axes[0], mixers):
        ax.set_title(mixer, fontsize=12, color=INK, pad=36)
    for row, depth in zip(axes, depths):
        row[0].set_ylabel(f"L = {depth}\ndensity" + (" per decade" if logarithmic else ""), fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("singular value", fontsize=10)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=SAMPLED)]
    names = [name for name in _LABELS if name in cells[0].curves]
    for name in names:
        lines = tuple(Line2D([], [], **_style(name, mixer)) for mixer in mixers)
        handles.append(lines if name == "exact" else lines[0])
    labels = ["sampled networks", *(_LABELS[name].format(eta=eta) for name in names)]
    if kernel:
        handles.append(Line2D([], [], **_KERNEL))
        labels.append("kernel estimate of the samples")
    look: Look = {"frameon": False, "fontsize": 10, "handlelength": 2.6}
    look |= {"ncols": min(4, len(mixers)), "handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.0)}}
    figure.legend(handles, labels, loc="outside upper center", **look)
    return save_figure(figure, path)


def _style(name: str, mixer: str) -> Look:
    """Return matplotlib's options for the curve of a theory; the exact theory has the mixer's colour."""
    return _STYLES[name] | {"color": colour_of(mixer)} if name == "exact" else _STYLES[name]


def _draw_cell(ax: Axes, cell: Cell, logarithmic: bool) -> None:
    s = singular_values(cell.sampled)
    limits = (max(s[0] * 0.7, s[-1] * 1e-13), s[-1] * 1.4) if logarithmic else (0.0, s[-1] * 1.12)
    heights = draw_samples(ax, np.maximum(s, limits[0]), limits, logarithmic)
    curves = {name: full_curve(cell.curves[name], limits[1], logarithmic) for name in _STYLES if name in cell.curves}
    grid, values = curves["exact"]
    if logarithmic:
        peak = float(values[(grid > limits[0]) & (grid < limits[1])].max())
        ceiling = 1.08 * max(peak, min(float(heights.max()), 1.3 * peak))
    else:
        ceiling = _ceiling(heights, values)
    ax.set(xscale="log" if logarithmic else "linear", xlim=limits, ylim=(0, ceiling))
    _draw_curves(ax, curves, cell.mixer)
    finish_axes(ax)
    if not logarithmic and heights.max() > ceiling:
        share = float(heights[:2].sum() * limits[1] / BINS)
        look: Look = {"va": "top", "fontsize": 8, "color": INK, "bbox": {"color": "white", "pad": 1}}
        ax.text(0.05, 0.94, f"▴ {share:.0%} in the first bars", transform=ax.transAxes, **look)


def _draw_kernel_estimate(ax: Axes, cell: Cell, logarithmic: bool) -> None:
    """Draw a Gaussian kernel estimate of the samples' density, in singular values or in their logarithms."""
    from scipy.stats import gaussian_kde

    s = singular_values(cell.sampled)
    low, high = ax.get_xlim()
    if logarithmic:
        points = np.linspace(np.log10(low), np.log10(high), _POINTS)
        ax.plot(10**points, gaussian_kde(np.log10(s[s > low]))(points) * np.mean(s > low), **_KERNEL)
    else:
        points = np.linspace(max(low, 0.0), high, _POINTS)
        ax.plot(points, gaussian_kde(s)(points), **_KERNEL)


def _draw_curves(ax: Axes, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], mixer: str) -> None:
    """Draw the theories' curves in a cell with set limits; a triangle marks a peak above the cell."""
    (low, high), ceiling = ax.get_xlim(), ax.get_ylim()[1]
    for name, (grid, values) in curves.items():
        style = _style(name, mixer)
        ax.plot(grid, values, **style)
        above = np.flatnonzero((values > ceiling) & (grid >= low) & (grid <= high))
        for peak in np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else ():
            position = [grid[peak[values[peak].argmax()]]], [0.975 * ceiling]
            ax.plot(*position, marker="^", color=style["color"], markersize=4, linestyle="none")


def _annotate(ax: Axes, cell: Cell) -> None:
    """Write W1 and, if any value has collapsed, the collapsed share above a cell: one number per theory."""
    collapsed = cell.collapsed()
    distances = {name: f"{item.wasserstein:.2g}" for name, item in cell.distances.items()}
    lines = [("W₁", distances)]
    if max(collapsed["sampled"], collapsed["exact"]) > WORTH_SAYING:
        lines.append((f"s < {COLLAPSED:g}", {name: f"{share:.1%}" for name, share in collapsed.items()}))
    for line, (label, numbers) in enumerate(lines):
        look: Look = {"transform": ax.transAxes, "va": "bottom", "fontsize": 8.5}
        height = 1.02 + 0.085 * (len(lines) - 1 - line)
        ax.text(0.0, height, label, ha="left", color=INK, **look)
        for name, left in (("sampled", 0.38), ("exact", 0.6), ("fixed", 0.8), ("scalar", 1.0)):
            if name in numbers:
                colour = _SAMPLES if name == "sampled" else _style(name, cell.mixer)["color"]
                ax.text(left, height, numbers[name], ha="right", color=colour, **look)


def _ceiling(heights: np.ndarray, curve: np.ndarray) -> float:
    """Return the upper end of the density axis, above which very high first bars or spikes of the curve are cut."""
    rest = max(heights[2:].max(), 1e-12)
    top = rest if heights[:2].max() > 6 * rest else heights.max()
    return max(1.2 * top, 1.05 * min(curve.max(), 1.6 * top))
