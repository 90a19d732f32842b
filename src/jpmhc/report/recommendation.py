"""Write a recommendation as a table for a terminal, a CSV file and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jpmhc.diagnose.recommend import LEGEND, Candidate, Recommendation
from jpmhc.files import write_csv
from jpmhc.report.charts import DASHES, Axis, Chart, Line, draw_figure
from jpmhc.report.style import INK, colour_of, save_figure
from jpmhc.spectra import Density
from jpmhc.spectra.density import COLLAPSED

_COLUMNS = ("J lost\nstart", "J lost\ndrift", "T lost", "γ\nfirst", "γ\nlast", "until\nlost", "kpar", "kFLOP", "loss")
_MOST_LAYERS = 1e4  # the largest number of layers until collapse on a figure's axis; no model has so many layers


def print_recommendations(recommendations: Sequence[tuple[int, Recommendation]]) -> None:
    """Print each depth's ranked mixers, and then the columns' meaning and the last depth's assumptions."""
    console = Console()
    for depth, recommendation in recommendations:
        table = Table(box=None, pad_edge=False)
        table.add_column("mixer", no_wrap=True)
        for column in _COLUMNS:
            table.add_column(column, justify="right", min_width=max(map(len, column.split("\n"))))
        for one in recommendation.candidates:
            table.add_row(*_cells(one))
        console.print(f"depth {depth}", table, f"First by this theory: {recommendation.best.mixer}", sep="\n")
    last = recommendations[-1][1]
    measured = [one for one in last.candidates if one.measured_loss is not None]
    if measured:
        lowest = min(measured, key=lambda one: one.measured_loss or 0.0)
        console.print(f"Lowest measured loss: {lowest.mixer}")
    costs = "kpar, kFLOP: thousands of parameters per connection and of operations per token."
    console.print(f"{LEGEND} {costs}\nAssumed: {last.assumptions}", style="dim")


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
        "–" if one.measured_loss is None else f"{one.measured_loss:+.3f}",
    )


def write_recommendation(recommendations: Sequence[tuple[int, Recommendation]], path: Path) -> Path:
    """Write one CSV row per depth and mixer, and return the file's path."""
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
        "measured_loss",
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
        for depth, recommendation in recommendations
        for rank, candidate in enumerate(recommendation.candidates, 1)
    )
    columns = ["depth", "rank", "mixer", *names, "first_gradient_gain", "last_gradient_gain"]
    return write_csv(path, columns, rows)


def plot_recommendations(recommendations: Sequence[tuple[int, Recommendation]]) -> Figure:
    """Return a figure of the three charts of `make_charts`, with one row per mixer.

    With recommendations for several depths, each row has one dot per depth, the first depth at the top.
    """
    depths = ", ".join(str(depth) for depth, _ in recommendations)
    order = ", from top to bottom in each row" if len(recommendations) > 1 else ""
    return draw_figure(make_charts(recommendations), columns=3, heading=f"depth {depths}{order}")


def make_charts(recommendations: Sequence[tuple[int, Recommendation]]) -> list[Chart]:
    """Return three charts with one row per mixer.

    The charts are: share of singular values below 0.1; mean square gradient of the first and the last sublayer; number
    of layers until differences between streams fall below 0.1 of their size.
    """
    names = [one.mixer for one in recommendations[-1][1].candidates]
    collapse, gradients, layers = [], [], []
    for depth_number, (_, recommendation) in enumerate(recommendations):
        offset = 0.5 * (depth_number + 0.5) / len(recommendations) - 0.25
        for one in recommendation.candidates:
            y, colour = [names.index(one.mixer) + offset], colour_of(one.mixer)
            fresh, drifted = [one.collapsed_at_start], [one.collapsed]
            first, last = ([float(one.gradient_gains[end])] for end in (0, -1))
            collapse += [
                Line("", fresh + drifted, y + y, colour, marker=""),
                Line("fresh skips", fresh, y, INK, marker="|"),
                Line("drifted skips", drifted, y, colour, marker="o"),
            ]
            gradients += [
                Line("", first + last, y + y, colour, marker=""),
                Line("first sublayer", first, y, colour, marker="o", filled=False),
                Line("last sublayer", last, y, colour, marker="o"),
            ]
            beyond = one.layers_until_collapse >= _MOST_LAYERS
            count = [min(max(one.layers_until_collapse, 1.0), _MOST_LAYERS)]  # the axis is logarithmic
            layers.append(Line("", count, y, colour, marker=">" if beyond else "o"))
    rows, share = Axis("", names=names), Axis("share of singular values", limits=(-0.02, 1.02))
    until = Axis(f"layers (▸: {_MOST_LAYERS:,.0f} or more)", True)
    return [
        Chart(f"J below {COLLAPSED:g}: lost", collapse, share, rows),
        Chart("gradients", gradients, Axis("mean square gradient", True), rows),
        Chart("layers until stream differences are lost", layers, until, rows),
    ]


def draw_spectra(curves: Mapping[str, Mapping[str, Density]], path: Path) -> Path:
    """Draw distribution functions of singular values: one chart per mixer, one curve per density of the mixer.

    Densities would be hard to read: skips alone give many equal singular values, hence one very high peak.
    """
    x, y = Axis("singular value", True, (1e-4, 1e2)), Axis("share of singular values below", limits=(0, 1.02))
    charts = []
    for mixer, maps in curves.items():
        lines = []
        for (name, density), dashes in zip(maps.items(), (DASHES[2], DASHES[0], DASHES[1])):
            words = f"{name}: {density.collapsed():.0%} below {COLLAPSED:g}"
            s, shares = density.x.sqrt().numpy(), density.cumulative().numpy()
            lines.append(Line(words, s, shares, colour_of(mixer), dashes, marker=""))
        charts.append(Chart(mixer, lines, x, y, [(COLLAPSED, "lost")]))
    return save_figure(draw_figure(charts, columns=3), path)
