"""Show one spectrum: a table for a terminal, a figure, and the curve as CSV.

Bands are the intervals, separated by gaps, that contain all singular values. A singular value below 0.1 has collapsed.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from jpmhc.files import write_csv
from jpmhc.report.style import EXACT, INK, SAMPLED, Look, finish_axes, save_figure
from jpmhc.spectra.density import COLLAPSED, Density
from jpmhc.spectra.distances import Distances, singular_values
from jpmhc.spectra.network import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALAR = "#1d1d1f"
BINS = 50
# Shares of singular values below this are not mentioned.
WORTH_SAYING = 0.005
# Two neighbouring grid points enclose a gap between bands if their ratio is above _GAP and the density of log s at both
# is below _DARK.
_GAP = 1.5
_DARK = 0.01


@dataclass(frozen=True, eq=False)
class Answer:
    """The predicted spectrum of one network, and sampled singular values to compare."""

    network: Network
    density: Density
    edges: Tensor  # lower and upper end of each band, in singular values. [k, 2]
    moments: Tensor  # first four moments of squared singular values, without smoothing. [4]
    sampled: Tensor | None  # squared singular values of sampled networks; None if no networks were sampled
    distances: Distances | None  # distances between `density` and `sampled`; None without samples
    seconds: float  # computation time of the theory


def print_answer(answer: Answer) -> None:
    """Print a short table that describes a spectrum."""
    curve = answer.density
    table = Table(show_header=False, box=None)
    exact = "exact" if curve.exact else "NOT exact here"
    table.add_row("method", f"{curve.method} ({exact}), residual at most {curve.residual:.0e}, {answer.seconds:.2f} s")
    table.add_row("mass", f"{curve.mass:.5f} captured on {len(curve.x)} points, {curve.below:.5f} below them")
    if int(curve.interpolated.sum()):
        table.add_row("unconverged", f"{int(curve.interpolated.sum())} points, interpolated from their neighbours")
    bands = ", ".join(f"{low:.4g} – {high:.4g}" for low, high in answer.edges.tolist())
    table.add_row("singular values", bands)
    table.add_row("moments of s²", "  ".join(f"{value:.6g}" for value in answer.moments.tolist()))
    table.add_row("mean of s²", f"{curve.first_moment:.6g} on the grid, {curve.exact_moment:.6g} exactly")
    quantiles = "  ".join(f"{curve.quantile(p):.4g}" for p in (0.01, 0.1, 0.5, 0.9, 0.99))
    table.add_row("quantiles of s", f"{quantiles} (1, 10, 50, 90, 99 %); ratio of 99 % to 1 %: {curve.condition():.4g}")
    table.add_row("collapsed", f"{curve.collapsed():.2%} of singular values are below {COLLAPSED:g}")
    if answer.distances is not None:
        d = answer.distances
        table.add_row(
            "to samples",
            f"W1 {d.wasserstein:.3g}, KS {d.kolmogorov:.3g}, L1 {d.l1:.3g}, L2 {d.l2:.3g}, Linf {d.linf:.3g}",
        )
    Console().print(table)


def write_curve(curve: Density, path: Path) -> Path:
    """Write a density as CSV: squared and plain singular values, their densities, and the distribution function."""
    s, values = curve.singular_values()
    columns = (curve.x, curve.values, curve.eta, s, values, curve.cumulative(), curve.interpolated.long())
    names = ["x", "density_x", "eta", "singular_value", "density_s", "cumulative", "interpolated"]
    return write_csv(path, names, zip(*(column.tolist() for column in columns)))


def draw_spectrum(answer: Answer, title: str, path: Path, colour: str = EXACT) -> Path:
    """Draw one spectrum as `plot_density` does, with the title and a description of the spectrum above the figure."""
    figure = _draw_curves(answer.density, answer.edges, answer.sampled, colour)
    figure.suptitle(f"{title}\n{textwrap.fill(describe_spectrum(answer), 115)}", fontsize=11, color=INK)
    return save_figure(figure, path)


def plot_density(curve: Density, sampled: Tensor | None = None) -> Figure:
    """Return a figure of two charts: the density of the upper bands, and the distribution function.

    Only the distribution function shows mass at zero and in narrow bands far below the upper bands.

    Args:
        curve: The density.
        sampled: The squared singular values of sampled networks, drawn behind the density.
    """
    s, values = curve.singular_values()
    lit = torch.nonzero(s * values >= _DARK).flatten()
    cuts = torch.nonzero(lit.diff() > 1).flatten()
    first, last = torch.cat([lit[:1], lit[cuts + 1]]), torch.cat([lit[cuts], lit[-1:]])
    bands = torch.stack([s[first], s[last]], -1) if len(lit) else s[[0, -1]][None]
    return _draw_curves(curve, bands, sampled, EXACT)


def _draw_curves(curve: Density, bands: Tensor, sampled: Tensor | None, colour: str) -> Figure:
    """Return the figure of `plot_density`; `colour` is the colour of the theory's curve if the theory is exact."""
    from jpmhc.report.charts import NotebookFigure  # matplotlib takes half a second, for which --help need not wait

    figure = NotebookFigure(figsize=(10, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    style = {"color": colour if curve.exact else SCALAR, "linewidth": 1.6}
    _draw_upper_bands(left, curve, bands, sampled, style)
    _draw_shares(right, curve, bands, sampled, style)
    # the legend goes below the curve if the curve starts high, or else to its upper left
    right.legend(frameon=False, fontsize=9, loc="lower center" if curve.below > 0.3 else "upper left")
    return figure


def describe_spectrum(answer: Answer) -> str:
    """Return one line with the range of the singular values, the share that has collapsed, and W1 to samples if any."""
    curve, bands = answer.density, answer.edges
    collapsed, low, high = curve.collapsed(), float(bands.min()), float(bands.max())
    if curve.below > WORTH_SAYING:
        low = 0.0
    alive = bands[bands[:, 1] > COLLAPSED]
    if collapsed > 1 - WORTH_SAYING:
        words = [f"all singular values have collapsed: the largest is {high:.2g}"]
    elif collapsed > WORTH_SAYING and len(alive):
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


def _upper_bands(bands: Tensor) -> tuple[float, float]:
    """Return the lower and the upper end of the bands above 1/30 of the largest singular value, or of the last band."""
    high = float(bands.max())
    near = bands[(bands[:, 0] > high / 30)]
    return (float(near.min()) if len(near) else max(float(bands[-1, 0]), high * 1e-12)), high


def _lowest(curve: Density, bands: Tensor) -> float:
    """Return the 0.2 % quantile of the singular values on the grid, at least 10⁻¹² times the largest singular value."""
    below = float(curve.cumulative()[0])
    return max(curve.quantile(below + 0.002 * (1 - below)), float(bands.max()) * 1e-12)


def _draw_upper_bands(ax: Axes, curve: Density, bands: Tensor, sampled: Tensor | None, style: Look) -> None:
    """Draw the density of the upper bands, and write the share of singular values left of the axis."""
    low, high = _upper_bands(bands)
    logarithmic = high > 10 * low
    if logarithmic:
        low = _lowest(curve, bands)
        limits = (low / 3, high * 3)
    else:
        margin = 0.25 * (high - low) or 0.1 * high
        limits = (max(low / 2, low - margin), high + margin)
    grid, values = full_curve(curve, limits[1], logarithmic)
    inside = (grid >= limits[0]) & (grid <= limits[1])
    peak = float(values[inside].max(initial=0.0))
    left_out = float(np.interp(limits[0], curve.x.sqrt().numpy(), curve.cumulative().numpy()))
    if sampled is not None:
        heights = draw_samples(ax, singular_values(sampled), limits, logarithmic)
        peak = max(peak, min(float(heights.max(initial=0.0)), 1.6 * peak))
    ax.plot(grid, values, **style)
    headroom = 1.12 if left_out < WORTH_SAYING else 1.35  # leaves space for the words above the curve
    ax.set(xscale="log" if logarithmic else "linear", xlim=limits, ylim=(0, headroom * max(peak, 1e-12)))
    ax.set(xlabel="singular value", ylabel="density per decade" if logarithmic else "density")
    finish_axes(ax)
    if left_out > WORTH_SAYING:
        words = f"◂ {left_out:.1%} of singular values\n    lie left of this axis"
        ax.text(0.015, 0.97, words, transform=ax.transAxes, va="top", fontsize=9, color=style["color"])


def _draw_shares(ax: Axes, curve: Density, bands: Tensor, sampled: Tensor | None, style: Look) -> None:
    """Draw the distribution function of the singular values, down to at most twelve decades below the largest."""
    high, lowest = float(bands.max()), _lowest(curve, bands)
    logarithmic = curve.below > WORTH_SAYING or high > 10 * lowest
    bottom = min(lowest / 3, 0.03) if logarithmic else lowest
    margin = 0.25 * (high - lowest) or 0.1 * high
    limits = (bottom, high * 2) if logarithmic else (max(bottom / 2, bottom - margin), high + margin)
    if sampled is not None:
        s = np.concatenate([[0.0], singular_values(sampled), [limits[1]]])
        shares = np.concatenate([[0.0], np.arange(1, len(s) - 1) / (len(s) - 2), [1.0]])
        ax.step(s, shares, where="post", color=SAMPLED, linewidth=5, label="sampled networks")
    grid = np.concatenate([[limits[0] * 1e-3], curve.x.sqrt().numpy(), [limits[1]]])
    shares = np.concatenate([[curve.below], curve.cumulative().numpy(), [1.0]])
    label = "exact theory" if curve.exact else f"{curve.method}: not exact here"
    ax.plot(grid, shares, label=label, **style)
    ax.set(xscale="log" if logarithmic else "linear", xlim=limits, ylim=(0, 1.04))
    ax.set(xlabel="singular value", ylabel="share of singular values below")
    finish_axes(ax)
    left_out = float(np.interp(limits[0], grid, shares))
    if left_out > WORTH_SAYING:
        ax.plot([limits[0]], [left_out], marker="<", color=style["color"], clip_on=False, markersize=7)
        corner = (0.02, left_out - 0.03 if left_out > 0.15 else 0.66)  # the rising curve meets neither corner
        words = f"{left_out:.1%} lie left of this axis"
        ax.text(*corner, words, transform=ax.transAxes, va="top", fontsize=9, color=style["color"])
    if limits[0] < COLLAPSED < limits[1]:
        ax.axvline(COLLAPSED, color=INK, linewidth=0.8, linestyle="--", label=f"collapsed: below {COLLAPSED:g}")


def draw_samples(ax: Axes, s: np.ndarray, limits: tuple[float, float], logarithmic: bool) -> np.ndarray:
    """Draw the histogram of the singular values s within the limits of an axis, and return the bars' heights.

    The heights are shares of all values per unit, or per decade if the axis is logarithmic.
    """
    shown = s[(s >= limits[0]) & (s <= limits[1])]
    if len(shown) < 2:
        return np.zeros(0)
    edges = fitting_edges(shown) if logarithmic else np.linspace(*limits, BINS + 1)
    heights = np.histogram(shown, edges)[0] / len(s) / np.diff(np.log10(edges) if logarithmic else edges)
    ax.stairs(heights, edges, fill=True, color=SAMPLED)
    return heights


def full_curve(curve: Density, top: float, logarithmic: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return singular values up to `top` and their density, with zeros outside the curve's grid and in gaps.

    The density is per unit, or per decade for a logarithmic axis.
    """
    s, values = (part.numpy() for part in curve.singular_values())
    dark = s * values < _DARK
    gap = np.flatnonzero((s[1:] > _GAP * s[:-1]) & dark[1:] & dark[:-1])
    s = np.insert(s, np.repeat(gap + 1, 2), np.stack([s[gap], s[gap + 1]], -1).ravel())
    values = np.insert(values, np.repeat(gap + 1, 2), 0.0)
    s = np.concatenate([[s[0]], s, [s[-1], max(top, s[-1])]])
    return s, np.concatenate([[0.0], values, [0.0, 0.0]]) * (s * np.log(10) if logarithmic else 1)


def fitting_edges(s: np.ndarray) -> np.ndarray:
    """Return a histogram's bin edges, equally spaced on a logarithmic axis within each band of values.

    Each band gets a number of the 60 bins proportional to its number of values, and at least ten bins. Each gap
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
        bins = max(10, round(60 * len(band) / len(logs)))
        edges.append(np.linspace(band[0], band[-1] + 1e-6, bins + 1))
    return 10 ** np.unique(np.concatenate(edges))
