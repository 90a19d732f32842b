"""Pictures of spectra: one spectrum, and the panel of depths by mixers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from jpmhc.spectra.density import COLLAPSED, Density
from jpmhc.spectra.distances import singular_values
from jpmhc.spectra.panel import Cell
from jpmhc.spectra.query import Answer

INK = "#1d1d1f"
SAMPLED = "#c9ced6"
EXACT = "#0b4f9c"
FIXED = "#57a5e0"
SCALAR = "#e2711d"
PRINTED = "#b0349a"
_BINS = 50
_LABELS = {
    "exact": "exact, η ∝ x",
    "fixed": "exact, η = {eta:g}",
    "scalar": "scalar theory, η = {eta:g}",
    "printed": "printed operator-valued theory, η = {eta:g}",
}
_NUMBERS = {"sampled": "#7d8590", "exact": EXACT, "fixed": FIXED, "scalar": SCALAR, "printed": PRINTED}
# Neighbouring grid points further apart than this factor, with less than this density of log s on both, have a gap
# between bands between them.
_GAP = 1.5
_DARK = 0.01
_KERNEL: dict[str, Any] = {"color": "#7d8590", "linewidth": 1.0}
_PLACES = 300
# A collapsed fraction below this is not worth a line.
_WORTH_SAYING = 0.005
_STYLES: dict[str, dict[str, Any]] = {
    "printed": {"color": PRINTED, "linestyle": "-.", "linewidth": 1.1},
    "scalar": {"color": SCALAR, "linestyle": (0, (1, 1)), "linewidth": 1.6},
    "fixed": {"color": FIXED, "linestyle": "--", "linewidth": 1.1},
    "exact": {"color": EXACT, "linewidth": 1.5},
}


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file whose folder is made if need be, and return the file's path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=170)
    return path


def draw_panel(
    cells: Sequence[Cell], eta: float, path: Path, *, logarithmic: bool = False, kernel: bool = False
) -> Path:
    """Draw all cells of a panel, depths downwards and mixers to the right, and return the file's path.

    Args:
        cells: What `spectra.panel` computed.
        eta: The fixed smoothing that the legend names.
        path: The file to write.
        logarithmic: Singular values on a logarithmic axis, and densities per decade: everything that has collapsed
            becomes visible.
        kernel: Draw a Gaussian kernel estimate of the samples' density beside their histogram.
    """
    mixers = list(dict.fromkeys(cell.mixer for cell in cells))
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    figure = Figure(figsize=(3.4 * len(mixers), 2.9 * len(depths) + 0.6), layout="constrained")
    axes = figure.subplots(len(depths), len(mixers), squeeze=False)
    for cell in cells:
        ax = axes[depths.index(cell.depth)][mixers.index(cell.mixer)]
        (_logarithmic_cell if logarithmic else _linear_cell)(ax, cell)
        if kernel:
            _draw_kernel_estimate(ax, cell, logarithmic)
        _annotate(ax, cell)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    for ax, mixer in zip(axes[0], mixers):
        ax.set_title(mixer, fontsize=12, color=INK, pad=36)
    for row, depth in zip(axes, depths):
        row[0].set_ylabel(f"L = {depth}\ndensity" + (" per decade" if logarithmic else ""), fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("singular value", fontsize=10)
    handles: list[Any] = [Rectangle((0, 0), 1, 1, color=SAMPLED)]
    names = [name for name in _LABELS if name in cells[0].curves]
    handles += [Line2D([], [], **_STYLES[name]) for name in names]
    labels = ["sampled networks", *(_LABELS[name].format(eta=eta) for name in names)]
    if kernel:
        handles.append(Line2D([], [], **_KERNEL))
        labels.append("kernel estimate of the samples")
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(mixers)), frameon=False, fontsize=10)
    return save_figure(figure, path)


def _linear_cell(ax: Any, cell: Cell) -> None:
    s = singular_values(cell.sampled)
    top = s[-1] * 1.12
    heights, _, _ = ax.hist(s, bins=_BINS, range=(0, top), density=True, color=SAMPLED)
    for name in _drawn(cell):
        grid, values = _full_curve(cell.curves[name], top)
        ax.plot(grid, values, **_STYLES[name])
    ax.set(xlim=(-0.01 * top, top), ylim=(0, _ceiling(heights, values)))


def _drawn(cell: Cell) -> list[str]:
    """Return the names of a cell's curves in the order in which they are drawn, the exact one last."""
    return [name for name in _STYLES if name in cell.curves]


def _draw_kernel_estimate(ax: Any, cell: Cell, logarithmic: bool) -> None:
    """Draw the samples' density, of singular values or of their logarithms, as a sum of Gaussians."""
    from scipy.stats import gaussian_kde

    s = singular_values(cell.sampled)
    low, high = ax.get_xlim()
    if logarithmic:
        place = np.linspace(np.log10(low), np.log10(high), _PLACES)
        ax.plot(10**place, gaussian_kde(np.log10(s[s > low]))(place) * np.mean(s > low), **_KERNEL)
    else:
        place = np.linspace(max(low, 0.0), high, _PLACES)
        ax.plot(place, gaussian_kde(s)(place), **_KERNEL)


def _full_curve(curve: Density, top: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the curve from its first point to the axis' end, zero outside its grid and across gaps between bands."""
    s, values = (part.numpy() for part in curve.singular_values())
    dark = s * values < _DARK
    gap = np.flatnonzero((s[1:] > _GAP * s[:-1]) & dark[1:] & dark[:-1])
    s = np.insert(s, np.repeat(gap + 1, 2), np.stack([s[gap], s[gap + 1]], -1).ravel())
    values = np.insert(values, np.repeat(gap + 1, 2), 0.0)
    return np.concatenate([[s[0]], s, [s[-1], max(top, s[-1])]]), np.concatenate([[0.0], values, [0.0, 0.0]])


def _logarithmic_cell(ax: Any, cell: Cell) -> None:
    s = singular_values(cell.sampled)
    bottom = max(s[0] * 0.7, s[-1] * 1e-13)
    edges = np.logspace(np.log10(bottom), np.log10(s[-1] * 1.4), 90)
    decades = np.diff(np.log10(edges))
    share = np.histogram(s, edges)[0] / len(s)
    ax.stairs(share / decades, edges, fill=True, color=SAMPLED)
    peak = (share / decades).max()
    for name in _drawn(cell):
        grid, values = _full_curve(cell.curves[name], 0.0)
        ax.plot(grid, values * grid * np.log(10), **_STYLES[name])
    ax.set(xscale="log", xlim=(edges[0], edges[-1]), ylim=(0, 1.25 * peak))
    if edges[-1] < 10 * edges[0]:
        ticks = [tick for tick in (0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5) if edges[0] < tick < edges[-1]]
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()


def _annotate(ax: Any, cell: Cell) -> None:
    """Write above a cell, each theory in its colour, W1 and the collapsed mass where there is any."""
    collapsed = cell.collapsed()
    found = {name: f"{item.wasserstein:.2g}" for name, item in cell.distances.items()}
    lines = [("W₁", found)]
    if max(collapsed["sampled"], collapsed["exact"]) > _WORTH_SAYING:
        lines.append((f"s < {COLLAPSED:g}", {name: f"{share:.1%}" for name, share in collapsed.items()}))
    for line, (label, numbers) in enumerate(lines):
        place = {"transform": ax.transAxes, "va": "bottom", "fontsize": 8.5}
        height = 1.02 + 0.085 * (len(lines) - 1 - line)
        ax.text(0.0, height, label, ha="left", color=INK, **place)
        for name, left in (("sampled", 0.38), ("exact", 0.6), ("fixed", 0.8), ("scalar", 1.0)):
            if name in numbers:
                ax.text(left, height, numbers[name], ha="right", color=_NUMBERS[name], **place)


def draw_spectrum(answer: Answer, title: str, path: Path) -> Path:
    """Draw one spectrum on a plain and on a logarithmic axis, over the sampled singular values if there are any."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    plain, logarithmic = figure.subplots(1, 2)
    curve = answer.density
    s = singular_values(answer.sampled) if answer.sampled is not None else None
    grid, values = _full_curve(curve, float(curve.x[-1]) ** 0.5)
    if s is not None:
        heights, _, _ = plain.hist(s, bins=_BINS, range=(0, s[-1] * 1.05), density=True, color=SAMPLED, label="sampled")
        edges = np.logspace(np.log10(max(s[0], s[-1] * 1e-13)), np.log10(s[-1] * 1.1), 90)
        share = np.histogram(s, edges)[0] / len(s) / np.diff(np.log10(edges))
        logarithmic.stairs(share, edges, fill=True, color=SAMPLED)
        plain.set_ylim(0, _ceiling(heights, values))
    elif curve.below > _WORTH_SAYING or curve.collapsed() > _WORTH_SAYING:
        plain.set_ylim(0, 1.3 * max(values[grid > COLLAPSED].max(initial=0.0), 1e-12))
    label = "exact theory" if curve.exact else f"{curve.method}: not exact here"
    plain.plot(grid, values, color=EXACT if curve.exact else SCALAR, label=label)
    logarithmic.plot(grid, values * grid * np.log(10), color=EXACT if curve.exact else SCALAR)
    plain.set(xlabel="singular value", ylabel="density", xlim=(0, None))
    logarithmic.set(xlabel="singular value", ylabel="density per decade", xscale="log", ylim=(0, None))
    words = [f"captured mass {curve.mass:.4f}"]
    if curve.below > _WORTH_SAYING:
        words.append(f"{curve.below:.1%} below {float(curve.x[0]) ** 0.5:.1g}")
    if curve.collapsed() > _WORTH_SAYING:
        words.append(f"{curve.collapsed():.1%} below {COLLAPSED:g}")
    if answer.distances is not None:
        words.append(f"W₁ to samples {answer.distances.wasserstein:.2g}")
    figure.suptitle(f"{title}\n{' · '.join(words)}", fontsize=11, color=INK)
    for ax in (plain, logarithmic):
        ax.spines[["top", "right"]].set_visible(False)
    plain.legend(frameon=False)
    return save_figure(figure, path)


def _ceiling(heights: np.ndarray, curve: np.ndarray) -> float:
    """Return the axis' upper end: collapsed mass would make the first bars, or a spike, tower over all others."""
    rest = max(heights[2:].max(), 1e-12)
    top = rest if heights[:2].max() > 6 * rest else heights.max()
    return max(1.2 * top, 1.05 * min(curve.max(), 1.6 * top))
