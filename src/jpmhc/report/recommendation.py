"""What `recommend` found, as a table for a terminal, a file and a figure."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jpmhc.diagnose.recommend import Candidate, Recommendation
from jpmhc.report.style import colour_of
from jpmhc.spectra import Density


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
        "parameters of a connection, FLOPs and bytes a token.",
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
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["depth", "rank", "mixer", *names, "first_gradient_gain", "last_gradient_gain"])
        for depth, one in found:
            for rank, candidate in enumerate(one.candidates, 1):
                gains = candidate.gradient_gains
                values = [getattr(candidate, name) for name in names]
                writer.writerow([depth, rank, candidate.mixer, *values, float(gains[0]), float(gains[-1])])
    return path


def draw_recommendation(found: Sequence[tuple[int, Recommendation]], path: Path) -> Path:
    """Draw gradients by layer, what is left of stream differences by layer, and collapse by mixer or by depth."""
    depth, last = found[-1]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    gains, differences, collapse = figure.subplots(1, 3)
    for one in last.candidates:
        colour = colour_of(one.mixer)
        layers = np.arange(1, depth + 1)
        gains.plot(layers, one.gradient_gains.numpy(), color=colour, lw=1, label=one.mixer)
        skips = one.network.skips
        logs = torch.linalg.slogdet(skips).logabsdet.cumsum(0) / max(1, skips.shape[-1] - 1)
        differences.plot(layers, logs.clamp_min(-30).exp().numpy(), color=colour, lw=1)
    gains.set(yscale="log", xlabel="sublayer", title="mean square gradient")
    differences.set(yscale="log", xlabel="sublayer", title="differences between streams", ylim=(1e-6, 10))
    differences.axhline(0.1, color="#999999", lw=0.8, ls="--")
    names = [one.mixer for one in last.candidates]
    if len(found) == 1:
        place = np.arange(len(names))
        collapse.barh(place, [one.collapsed for one in last.candidates], color="#0b4f9c", label="drifted")
        collapse.barh(
            place, [one.collapsed_at_start for one in last.candidates], 0.35, color="#f0a202", label="at the start"
        )
        collapse.set(yticks=place, yticklabels=names, xlim=(0, 1), title="share of J below 0.1")
        collapse.invert_yaxis()
        collapse.legend(frameon=False, fontsize=7)
    else:
        for name in names:
            curve = [next(c.collapsed for c in one.candidates if c.mixer == name) for _, one in found]
            collapse.plot([depth for depth, _ in found], curve, ".-", color=colour_of(name), lw=1)
        collapse.set(xlabel="depth", ylim=(0, 1), title="share of J below 0.1, drifted")
    gains.legend(frameon=False, fontsize=6, ncols=2)
    figure.savefig(path, dpi=110)
    return path


def draw_spectra(curves: Mapping[str, Mapping[str, Density]], path: Path) -> Path:
    """Draw which share of singular values lies below each, a panel for each mixer, a curve for each of its maps.

    Shares, because skips alone put many singular values in one place, beside which a density shows nothing else.
    """
    figure = Figure(figsize=(3.2 * len(curves), 3.0), layout="constrained")
    for axes, (mixer, found) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        axes.axvspan(1e-4, 0.1, color="#fbeeea", lw=0)
        for name, one in found.items():
            label = f"{name}: {one.collapsed():.0%} below 0.1"
            axes.plot(one.x.sqrt().numpy(), one.cumulative().numpy(), lw=1.2, label=label)
        axes.set(xscale="log", xlim=(1e-4, 1e2), ylim=(0, 1), xlabel="singular value", title=mixer)
        axes.legend(frameon=False, fontsize=6, loc="upper left")
    figure.axes[0].set_ylabel("share below")
    figure.savefig(path, dpi=110)
    return path
