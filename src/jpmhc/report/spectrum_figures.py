"""Draw figures of spectra: one spectrum, or a panel of spectra for several depths and mixers."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from jpmhc.paper.panel import Cell
from jpmhc.report.spectrum_tables import Answer
from jpmhc.report.style import EXACT, INK, SAMPLED, Look, colour_of, name_ticks, save_figure
from jpmhc.spectra.density import COLLAPSED, Density
from jpmhc.spectra.distances import singular_values

FIXED = "#6b7280"
SCALAR = "#1d1d1f"
PRINTED = "#b0349a"
_BINS = 50
_LABELS = {
    "exact": "exact, η ∝ x",
    "fixed": "exact, η = {eta:g}",
    "scalar": "scalar theory, η = {eta:g}",
    "printed": "printed operator-valued theory, η = {eta:g}",
}
# Two neighbouring grid points enclose a gap between bands if their ratio is above _GAP and the density of log s at both
# is below _DARK.
_GAP = 1.5
_DARK = 0.01
_SAMPLES = "#7d8590"  # the colour of text and curves about the samples, darker than the histogram
_KERNEL: Look = {"color": _SAMPLES, "linewidth": 1.0}
_PLACES = 300
# Shares of singular values below this are not mentioned.
_WORTH_SAYING = 0.005
_STYLES: dict[str, Look] = {
    "printed": {"color": PRINTED, "linestyle": "-.", "linewidth": 1.1},
    "scalar": {"color": SCALAR, "linestyle": (0, (1, 1)), "linewidth": 1.6},
    "fixed": {"color": FIXED, "linestyle": "--", "linewidth": 1.1},
    "exact": {"color": EXACT, "linewidth": 1.5},
}


def draw_panel(
    cells: Sequence[Cell], eta: float, path: Path, *, logarithmic: bool = False, kernel: bool = False
) -> Path:
    """Draw all cells of a panel, with a row per depth and a column per mixer, and return the file's path.

    The exact theory has the mixer's colour.

    Args:
        cells: The panel's cells.
        eta: The fixed smoothing that the legend names.
        path: The file to write.
        logarithmic: Draw singular values on a logarithmic axis and densities per decade, which shows all collapsed
            singular values.
        kernel: Also draw a Gaussian kernel estimate of the samples' density.
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


def _linear_cell(ax: Axes, cell: Cell) -> None:
    s = singular_values(cell.sampled)
    top = s[-1] * 1.12
    heights = np.asarray(ax.hist(s, bins=_BINS, range=(0, top), density=True, color=SAMPLED)[0])
    curves = {name: _full_curve(cell.curves[name], top) for name in _drawn(cell)}
    ceiling = _ceiling(heights, curves["exact"][1])
    ax.set(xlim=(0, top), ylim=(0, ceiling))
    _draw_curves(ax, curves, cell.mixer)
    name_ticks(ax.xaxis, (0, top), False)
    name_ticks(ax.yaxis, (0, ceiling), False)
    if heights.max() > ceiling:
        share = float(heights[:2].sum() * top / _BINS)
        look: Look = {"va": "top", "fontsize": 8, "color": INK, "bbox": {"color": "white", "pad": 1}}
        ax.text(0.05, 0.94, f"▴ {share:.0%} in the first bars", transform=ax.transAxes, **look)


def _drawn(cell: Cell) -> list[str]:
    """Return the names of a cell's curves in drawing order, with the exact theory last."""
    return [name for name in _STYLES if name in cell.curves]


def _draw_kernel_estimate(ax: Axes, cell: Cell, logarithmic: bool) -> None:
    """Draw a Gaussian kernel estimate of the samples' density, in singular values or in their logarithms."""
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
    """Return a density's curve up to the end of the axis, with zeros outside its grid and in gaps between bands."""
    s, values = (part.numpy() for part in curve.singular_values())
    dark = s * values < _DARK
    gap = np.flatnonzero((s[1:] > _GAP * s[:-1]) & dark[1:] & dark[:-1])
    s = np.insert(s, np.repeat(gap + 1, 2), np.stack([s[gap], s[gap + 1]], -1).ravel())
    values = np.insert(values, np.repeat(gap + 1, 2), 0.0)
    return np.concatenate([[s[0]], s, [s[-1], max(top, s[-1])]]), np.concatenate([[0.0], values, [0.0, 0.0]])


def _logarithmic_cell(ax: Axes, cell: Cell) -> None:
    s = singular_values(cell.sampled)
    bottom = max(s[0] * 0.7, s[-1] * 1e-13)
    limits = (bottom, s[-1] * 1.4)
    edges = fitting_edges(np.maximum(s, bottom))
    heights = np.histogram(np.maximum(s, bottom), edges)[0] / len(s) / np.diff(np.log10(edges))
    ax.stairs(heights, edges, fill=True, color=SAMPLED)
    curves = {}
    for name in _drawn(cell):
        grid, values = _full_curve(cell.curves[name], 0.0)
        curves[name] = (grid, values * grid * np.log(10))
    grid, values = curves["exact"]
    peak = float(values[(grid > limits[0]) & (grid < limits[1])].max())
    ceiling = 1.08 * max(peak, min(float(heights.max()), 1.3 * peak))
    ax.set(xscale="log", xlim=limits, ylim=(0, ceiling))
    _draw_curves(ax, curves, cell.mixer)
    name_ticks(ax.xaxis, limits, True)
    name_ticks(ax.yaxis, (0, ceiling), False)


def _draw_curves(ax: Axes, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], mixer: str) -> None:
    """Draw the theories' curves in a cell with set limits; a triangle marks a peak above the cell."""
    (low, high), ceiling = ax.get_xlim(), ax.get_ylim()[1]
    for name, (grid, values) in curves.items():
        style = _style(name, mixer)
        ax.plot(grid, values, **style)
        above = np.flatnonzero((values > ceiling) & (grid >= low) & (grid <= high))
        for peak in np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else ():
            place = [grid[peak[values[peak].argmax()]]], [0.975 * ceiling]
            ax.plot(*place, marker="^", color=style["color"], markersize=4, linestyle="none")


def _annotate(ax: Axes, cell: Cell) -> None:
    """Write W1 and the collapsed share (if any has collapsed) above a cell, in each theory's colour."""
    collapsed = cell.collapsed()
    found = {name: f"{item.wasserstein:.2g}" for name, item in cell.distances.items()}
    lines = [("W₁", found)]
    if max(collapsed["sampled"], collapsed["exact"]) > _WORTH_SAYING:
        lines.append((f"s < {COLLAPSED:g}", {name: f"{share:.1%}" for name, share in collapsed.items()}))
    for line, (label, numbers) in enumerate(lines):
        place: Look = {"transform": ax.transAxes, "va": "bottom", "fontsize": 8.5}
        height = 1.02 + 0.085 * (len(lines) - 1 - line)
        ax.text(0.0, height, label, ha="left", color=INK, **place)
        for name, left in (("sampled", 0.38), ("exact", 0.6), ("fixed", 0.8), ("scalar", 1.0)):
            if name in numbers:
                colour = _SAMPLES if name == "sampled" else _style(name, cell.mixer)["color"]
                ax.text(left, height, numbers[name], ha="right", color=colour, **place)


def draw_spectrum(answer: Answer, title: str, path: Path, colour: str = EXACT) -> Path:
    """Draw one spectrum as two charts: the density of its upper bands, and its distribution function.

    Only the distribution function shows mass at zero and in narrow bands far below the upper bands.

    Args:
        answer: The spectrum, with sampled singular values if there are any.
        title: The first line above the figure; further lines describe the spectrum in words.
        path: The file to write.
        colour: The colour of the theory's curve if the theory is exact.
    """
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    style = {"color": colour if answer.density.exact else SCALAR, "linewidth": 1.6}
    _draw_upper_bands(left, answer, style)
    _draw_shares(right, answer, style)
    words = textwrap.fill(describe_spectrum(answer), 115)
    figure.suptitle(f"{title}\n{words}", fontsize=11, color=INK)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    # the legend goes below the curve if the curve starts high, or else to its upper left
    right.legend(frameon=False, fontsize=9, loc="lower center" if answer.density.below > 0.3 else "upper left")
    return save_figure(figure, path)


def describe_spectrum(answer: Answer) -> str:
    """Return a sentence about the range of the singular values and the share that has collapsed."""
    curve, bands = answer.density, answer.edges
    collapsed, low, high = curve.collapsed(), float(bands.min()), float(bands.max())
    if curve.below > _WORTH_SAYING:
        low = 0.0
    alive = bands[bands[:, 1] > COLLAPSED]
    if collapsed > 1 - _WORTH_SAYING:
        words = [f"all singular values have collapsed: the largest is {high:.2g}"]
    elif collapsed > _WORTH_SAYING and len(alive):
        words = [f"{collapsed:.1%} of singular values are below {COLLAPSED:g}"]
        if float(alive.min()) > COLLAPSED:
            words[0] += f", the others between {float(alive.min()):.3g} and {high:.3g}"
    else:
        words = [f"all singular values lie between {low:.3g} and {high:.3g}"]
    if abs(curve.mass + curve.below - 1) > 0.02:
        words.append(f"the curve holds {curve.mass + curve.below:.1%} of the mass")
    if answer.distances is not None:
        words.append(f"W₁ to samples {answer.distances.wasserstein:.2g}")
    return " · ".join(words)


def _upper_bands(answer: Answer) -> tuple[float, float]:
    """Return the lower and upper end of the bands whose lower ends are within a factor of 30 of the largest value."""
    bands = answer.edges
    high = float(bands.max())
    near = bands[(bands[:, 0] > high / 30)]
    return (float(near.min()) if len(near) else max(float(bands[-1, 0]), high * 1e-12)), high


def _lowest(answer: Answer) -> float:
    """Return the lower end of the spectrum on its grid, or twelve decades below the upper end if that is larger."""
    curve = answer.density
    below = float(curve.cumulative()[0])
    return max(curve.quantile(below + 0.002 * (1 - below)), float(answer.edges.max()) * 1e-12)


def _draw_upper_bands(ax: Axes, answer: Answer, style: Look) -> None:
    """Draw the density of the upper bands, and write the share of singular values left of the axis."""
    low, high = _upper_bands(answer)
    logarithmic = high > 10 * low
    if logarithmic:
        low = _lowest(answer)
        limits = (low / 3, high * 3)
    else:
        room = 0.25 * (high - low) or 0.1 * high
        limits = (max(low / 2, low - room), high + room)
    grid, values = _full_curve(answer.density, limits[1])
    values = values * grid * np.log(10) if logarithmic else values
    inside = (grid >= limits[0]) & (grid <= limits[1])
    peak = float(values[inside].max(initial=0.0))
    left_out = float(np.interp(limits[0], answer.density.x.sqrt().numpy(), answer.density.cumulative().numpy()))
    if answer.sampled is not None:
        s = singular_values(answer.sampled)
        shown = s[(s >= limits[0]) & (s <= limits[1])]
        if len(shown) > 1:
            edges = fitting_edges(shown) if logarithmic else np.linspace(*limits, _BINS + 1)
            width = np.diff(np.log10(edges)) if logarithmic else np.diff(edges)
            heights = np.histogram(shown, edges)[0] / len(s) / width
            ax.stairs(heights, edges, fill=True, color=SAMPLED)
            peak = max(peak, min(float(heights.max()), 1.6 * peak))
    ax.plot(grid, values, **style)
    room = 1.12 if left_out < _WORTH_SAYING else 1.35  # leaves space for the words above the curve
    ax.set(xscale="log" if logarithmic else "linear", xlim=limits, ylim=(0, room * max(peak, 1e-12)))
    name_ticks(ax.xaxis, limits, logarithmic)
    name_ticks(ax.yaxis, ax.get_ylim(), False)
    ax.set(xlabel="singular value", ylabel="density per decade" if logarithmic else "density")
    if left_out > _WORTH_SAYING:
        words = f"◂ {left_out:.1%} of singular values\n    lie left of this axis"
        ax.text(0.015, 0.97, words, transform=ax.transAxes, va="top", fontsize=9, color=style["color"])


def _draw_shares(ax: Axes, answer: Answer, style: Look) -> None:
    """Draw the distribution function of the singular values, down to at most twelve decades below the largest."""
    curve, high = answer.density, float(answer.edges.max())
    lowest = _lowest(answer)
    logarithmic = curve.below > _WORTH_SAYING or high > 10 * lowest
    bottom = min(lowest / 3, 0.03) if logarithmic else lowest
    room = 0.25 * (high - lowest) or 0.1 * high
    limits = (bottom, high * 2) if logarithmic else (max(bottom / 2, bottom - room), high + room)
    if answer.sampled is not None:
        s = np.concatenate([[0.0], singular_values(answer.sampled), [limits[1]]])
        shares = np.concatenate([[0.0], np.arange(1, len(s) - 1) / (len(s) - 2), [1.0]])
        ax.step(s, shares, where="post", color=SAMPLED, linewidth=5, label="sampled networks")
    grid = np.concatenate([[limits[0] * 1e-3], curve.x.sqrt().numpy(), [limits[1]]])
    shares = np.concatenate([[curve.below], curve.cumulative().numpy(), [1.0]])
    label = "exact theory" if curve.exact else f"{curve.method}: not exact here"
    ax.plot(grid, shares, label=label, **style)
    ax.set(xscale="log" if logarithmic else "linear", xlim=limits, ylim=(0, 1.04))
    name_ticks(ax.xaxis, limits, logarithmic)
    name_ticks(ax.yaxis, (0.0, 1.0), False)
    ax.set(xlabel="singular value", ylabel="share of singular values below")
    left_out = float(np.interp(limits[0], grid, shares))
    if left_out > _WORTH_SAYING:
        ax.plot([limits[0]], [left_out], marker="<", color=style["color"], clip_on=False, markersize=7)
        words, place = f"{left_out:.1%} lie left of this axis", (8, -6 if left_out > 0.15 else 16)
        look = {"fontsize": 9, "color": style["color"], "va": "top", "bbox": {"color": "white", "pad": 1}}
        ax.annotate(words, (limits[0], left_out), xytext=place, textcoords="offset points", **look)
    if limits[0] < COLLAPSED < limits[1]:
        ax.axvline(COLLAPSED, color=INK, linewidth=0.8, linestyle="--", label=f"collapsed: below {COLLAPSED:g}")


def fitting_edges(s: np.ndarray, count: int = 60) -> np.ndarray:
    """Return a histogram's bin edges, equally spaced on a logarithmic axis within each band of values.

    Each band gets a number of the `count` bins proportional to its number of values, and at least ten bins. Each gap
    between bands is one bin.
    """
    logs = np.sort(np.log10(s))
    gaps = np.diff(logs)
    wide = np.flatnonzero(gaps > max(20 * float(np.median(gaps)), 1e-9)) + 1
    least = max(10, len(logs) // 50)  # the fewest values of a band: smaller groups belong to a neighbouring band
    starts = [0]
    for cut in wide:
        if cut - starts[-1] >= least and len(logs) - cut >= least:
            starts.append(int(cut))
    edges = []
    for band in np.split(logs, starts[1:]):
        bins = max(10, round(count * len(band) / len(logs)))
        edges.append(np.linspace(band[0], band[-1] + 1e-6, bins + 1))
    return 10 ** np.unique(np.concatenate(edges))


def _ceiling(heights: np.ndarray, curve: np.ndarray) -> float:
    """Return the upper end of the density axis, chosen so that very high first bars or spikes are cut off."""
    rest = max(heights[2:].max(), 1e-12)
    top = rest if heights[:2].max() > 6 * rest else heights.max()
    return max(1.2 * top, 1.05 * min(curve.max(), 1.6 * top))
