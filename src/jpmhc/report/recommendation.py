"""What `recommend` found, as a table for a terminal, a file and a figure."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from jpmhc.diagnose.recommend import Candidate, Recommendation
from jpmhc.files import write_csv
from jpmhc.report.style import INK, colour_of, finish_axes, save_figure
from jpmhc.spectra import Density
from jpmhc.spectra.density import COLLAPSED

# What a picture shows of the differences between streams.
_DIFFERENCES = (1e-4, 10.0)


def print_recommendation(found: Recommendation) -> None:
    """Print the ranked mixers and the sentence of assumptions."""
    table = Table(box=None, pad_edge=False)
    table.add_column("mixer", no_wrap=True)
    for column in ("J lost\nstart", "J lost\ndrift", "T lost", "γ\nfirst", "γ\nlast", "layers", "kpar", "kFLOP", "kB"):
        table.add_column(column, justify="right")
    for one in found.candidates:
        table.add_row(*_cells(one))
    console = Console()
    console.print(table)
    console.print(
        "lost: share of singular values below 0.1, of the streams' Jacobian J and of the model's own map T; γ: mean "
        "square gradient at the first and last sublayer; layers: until differences between streams fall below 0.1; "
        "parameters of a connection, FLOPs and bytes a token. Ranked by what J loses after the drift, then by "
        "gradients like the plain network's, then by what is kept on average; a skip that learns nothing comes last.",
        style="dim",
    )
    console.print(f"Assumed: {found.assumptions}", style="dim")
    console.print(f"First choice: {found.best.mixer}")


def _cells(one: Candidate) -> tuple[str, ...]:
    layers = "∞" if math.isinf(one.layers_until_collapse) else f"{one.layers_until_collapse:.0f}"
    return (
        one.mixer,
        f"{one.collapsed_at_start:.1%}",
        f"{one.collapsed:.1%}",
        f"{one.collapsed_model:.1%}",
        f"{float(one.gradient_gains[0]):.3g}",
        f"{float(one.gradient_gains[-1]):.3g}",
        layers,
        f"{one.parameters / 1e3:.0f}",
        f"{one.flops / 1e3:.0f}",
        f"{one.bytes / 1e3:.0f}",
    )


def write_recommendation(found: Sequence[tuple[int, Recommendation]], path: Path) -> Path:
    """Write one row for each depth and mixer as CSV."""
    names = (
        "drift",
        "collapsed_at_start",
        "collapsed",
        "collapsed_model",
        "geometric_mean",
        "direct_path",
        "layers_until_collapse",
        "parameters",
        "flops",
        "bytes",
    )
    rows = (
        [
            depth,
            rank,
            candidate.mixer,
            *(getattr(candidate, name) for name in names),
            float(candidate.gradient_gains[0]),
            float(candidate.gradient_gains[-1]),
        ]
        for depth, recommendation in found
        for rank, candidate in enumerate(recommendation.candidates, 1)
    )
    columns = ["depth", "rank", "mixer", *names, "first_gradient_gain", "last_gradient_gain"]
    return write_csv(path, columns, rows)


def draw_recommendation(found: Sequence[tuple[int, Recommendation]], path: Path) -> Path:
    """Draw gradients by layer, what is left of stream differences by layer, and collapse by mixer or by depth."""
    depth, last = found[-1]
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    gains, differences, collapse = figure.subplots(1, 3)
    for one in last.candidates:
        colour = colour_of(one.mixer)
        layers = np.arange(1, depth + 1)
        gains.plot(layers, one.gradient_gains.numpy(), color=colour, lw=1.4)
        skips = one.network.skips
        logs = torch.linalg.slogdet(skips).logabsdet.cumsum(0) / max(1, skips.shape[-1] - 1)
        differences.plot(layers, logs.clamp(-30, 30).exp().clamp(*_DIFFERENCES).numpy(), color=colour, lw=1.4)
    gains.set(yscale="log", xlabel="sublayer", ylabel="mean square gradient")
    differences.set(yscale="log", xlabel="sublayer", ylabel="what is left of stream differences")
    differences.set_ylim(_DIFFERENCES[0], _DIFFERENCES[1])
    differences.axhline(COLLAPSED, color=INK, lw=0.8, ls="--")
    names = [one.mixer for one in last.candidates]
    if len(found) == 1:
        place = np.arange(len(names))
        colours = [colour_of(name) for name in names]
        collapse.barh(place, [one.collapsed for one in last.candidates], color=colours)
        start = [one.collapsed_at_start for one in last.candidates]
        collapse.plot(start, place, "|", color=INK, markersize=11, markeredgewidth=1.6, label="at the start")
        collapse.set(yticks=place, yticklabels=names, xlim=(0, 1), xlabel=f"share of J below {COLLAPSED:g}, drifted")
        collapse.invert_yaxis()
        collapse.legend(frameon=False, fontsize=9)
    else:
        for name in names:
            curve = [next(c.collapsed for c in one.candidates if c.mixer == name) for _, one in found]
            collapse.plot([depth for depth, _ in found], curve, ".-", color=colour_of(name), lw=1.4)
        collapse.set(xlabel="depth", ylim=(0, 1), ylabel=f"share of J below {COLLAPSED:g}, drifted")
    handles = [Line2D([], [], color=colour_of(name), lw=2) for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    for axes in (gains, differences, collapse):
        finish_axes(axes)
    return save_figure(figure, path)


def draw_spectra(curves: Mapping[str, Mapping[str, Density]], path: Path) -> Path:
    """Draw which share of singular values lies below each, a panel for each mixer, a curve for each of its maps.

    Shares, because skips alone put many singular values in one place, beside which a density shows nothing else.
    """
    figure = Figure(figsize=(3.4 * len(curves), 3.4), layout="constrained")
    for axes, (mixer, found) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        axes.axvspan(1e-4, COLLAPSED, color="#f3f4f6", lw=0)
        for (name, one), dashes in zip(found.items(), (":", "-", "--")):
            label = f"{name}: {one.collapsed():.0%} below {COLLAPSED:g}"
            style = {"color": colour_of(mixer), "lw": 1.4, "ls": dashes, "label": label}
            axes.plot(one.x.sqrt().numpy(), one.cumulative().numpy(), **style)
        axes.set(xscale="log", xlim=(1e-4, 1e2), ylim=(0, 1.02), xlabel="singular value")
        axes.set_title(mixer, fontsize=11)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        finish_axes(axes)
    figure.axes[0].set_ylabel("share of singular values below")
    return save_figure(figure, path)
