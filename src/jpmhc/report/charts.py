"""Charts as data (lines and two axes), which matplotlib draws into a figure file or onto a page.

A page shows each chart as inline SVG, whose text and axes have the colours of the page's style sheet, light or dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jpmhc.report.style import INK, PAPER, RULE, SOFT, Look, finish_axes

_WIDTH, _HEIGHT = 390, 240  # the size of a chart on a page, in pixels
_MARGINS = {"left": 0.16, "right": 0.97, "bottom": 0.19, "top": 0.96}
# The largest number of points of all lines of a chart, and the upper and lower end of the limit for each line.
_POINTS, _MOST, _FEWEST = 4000, 600, 60
_MARKED = 25  # a line with at most this many points has a dot at each point
_SVG: Any = {
    "svg.hashsalt": "jpmhc",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
}
_LEGEND: Look = {"frameon": False, "labelcolor": INK}
_LONG_NAME = 18  # names beside an axis that have at least this many characters are broken at colons
_DECADES = 12  # the most decades of a logarithmic axis below the largest value

Dashes = tuple[float, ...]  # lengths of dashes and gaps in pixels; empty: a solid line
DASHES: tuple[Dashes, ...] = ((), (7, 3), (2, 3), (9, 3, 2, 3), (12, 4), (4, 2, 1, 2))


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart."""

    name: str  # name in the legend; lines with the same name share an entry, a line without a name has no entry
    x: Sequence[float] | np.ndarray  # positions along the axis, ascending
    y: Sequence[float] | np.ndarray  # values; a value that is not finite leaves a gap
    colour: str  # colour, as #rrggbb
    dashes: Dashes = ()  # lengths of dashes and gaps
    low: Sequence[float] | np.ndarray | None = None  # lower end of a band around the line; None for no band
    high: Sequence[float] | np.ndarray | None = None  # upper end of the band
    steps: bool = False  # whether the line is a step function, constant from each position to the next
    marker: str | None = None  # matplotlib marker at each point; by default a dot if the line has few points
    filled: bool = True  # whether markers are filled


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    label: str
    logarithmic: bool = False  # whether the axis is logarithmic
    limits: tuple[float, float] | None = None  # the two ends; None for the ends of the data
    whole: bool = False  # whether only whole numbers have ticks
    # names at 0, 1, 2, … instead of numbers; on a vertical axis, the first name is at the top
    names: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Chart:
    """A chart: lines over two axes, with a title."""

    title: str
    lines: Sequence[Line]  # in drawing order; figures and pages leave out a chart without lines
    x: Axis
    y: Axis  # values beyond the ends of the axis are drawn as triangles at the end.
    marks: Sequence[tuple[float, str]] = ()  # position and word of each vertical line
    note: str = ""  # sentence below the chart on a page

    @property
    def legend(self) -> dict[str, Line]:
        """The legend's lines by name; empty for a single line, because the title names that line."""
        named: dict[str, Line] = {}
        for line in filter(lambda line: line.name, self.lines):
            entry = named.setdefault(line.name, line)
            if entry.colour != line.colour:  # lines of several colours share this name, so their entry is grey
                named[line.name] = replace(entry, colour=SOFT)
        return named if len(named) > 1 else {}

    def draw(self, ax: Axes) -> None:
        """Draw the chart, without title and legend, on matplotlib axes."""
        points = min(_MOST, max(_FEWEST, _POINTS // max(1, len(self.lines))))
        lines = [_thin(line, points) for line in self.lines]
        values = np.concatenate([np.zeros(0), *(part for line in lines for part in line[1:])])
        for axis, data, name in (
            (self.x, np.concatenate([np.zeros(0), *(line[0] for line in lines)]), "x"),
            (self.y, values, "y"),
        ):
            *limits, logarithmic = _find_limits(axis, data[np.isfinite(data)])
            scale = "log" if logarithmic else "linear"
            ax.set(**{f"{name}scale": scale, f"{name}lim": limits, f"{name}label": axis.label})
        for number, (line, (x, y, low, high)) in enumerate(zip(self.lines, lines)):
            _draw_line(ax, line, x, y, f"line-{number}")
            if line.low is not None:
                ax.fill_between(x, low, high, color=line.colour, alpha=0.16, linewidth=0, gid="band")
        if self.y.names:
            names = [name if len(name) < _LONG_NAME else name.replace(":", ":\n") for name in self.y.names]
            ax.set_yticks(range(len(names)), names)
        finish_axes(ax, whole=(self.x.whole, self.y.whole))
        bottom, top = ax.get_xlim()
        for row, (value, word) in enumerate(mark for mark in self.marks if bottom < mark[0] < top):
            _draw_mark(ax, value, word, row)


class NotebookFigure(Figure):
    """A matplotlib figure that a notebook displays without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


def draw_figure(charts: Sequence[Chart], *, columns: int = 2, heading: str = "", shared_legend: bool = False) -> Figure:
    """Return a matplotlib figure of all charts that have lines, row by row, with `heading` above them.

    With a shared legend, one legend for all charts stands below them, instead of one below each chart.
    """
    charts = [chart for chart in charts if chart.lines]
    columns = max(1, min(columns, len(charts)))
    rows = -(-len(charts) // columns)
    figure = NotebookFigure(figsize=(5.5 * columns, 3.7 * rows + 0.19 * heading.count("\n")), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(h_pad=0.08, w_pad=0.08)  # type: ignore[call-arg]
    legend: dict[str, Line] = {}
    for number, chart in enumerate(charts):
        ax = figure.add_subplot(rows, columns, number + 1)
        chart.draw(ax)
        ax.set_title(chart.title, fontsize=10, color=INK)
        if shared_legend:
            legend |= {name: line for name, line in chart.legend.items() if name not in legend}
        elif chart.legend:
            handles, names = _make_handles(chart.legend)
            look: Look = {"bbox_to_anchor": (0.5, -0.17), "ncols": 2 if len(names) > 3 else 1, **_LEGEND}
            ax.legend(handles, names, loc="upper center", fontsize=8, **look)
    if legend:
        handles, names = _make_handles(legend)
        figure.legend(handles, names, loc="outside lower center", ncols=6, fontsize=9, **_LEGEND)
    if heading:
        figure.suptitle(heading, x=0.01, ha="left", fontsize=10, color=INK, linespacing=1.4)
    return figure


def draw_svg(chart: Chart) -> Markup:
    """Return a chart as SVG for a page; a browser shows a line's name when the pointer is on the line."""
    figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))  # SVG has 72 units per inch
    ax = figure.subplots()
    text = io.StringIO()
    with matplotlib.rc_context(_SVG):
        chart.draw(ax)
        for label in (ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels(), *ax.texts):
            label.set_fontsize(11.5)
        longest = max((len(label.get_text()) for label in ax.get_yticklabels()), default=0)
        beyond = max(0, longest - 6) * 7 / _WIDTH  # long numbers need 7 pixels per character
        figure.subplots_adjust(**_MARGINS | {"left": 0.3 if chart.y.names else _MARGINS["left"] + beyond})
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawing = text.getvalue().partition("</metadata>")[2].rpartition("</svg>")[0]
    for number, line in enumerate(chart.lines):
        title = f'<g class="line"><title>{escape(line.name)}</title>'
        drawing = drawing.replace(f'<g id="line-{number}">', title)
    drawing = drawing.replace('<g id="band">', '<g class="band">')
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)
    drawing = use_page_colours(re.sub(r"<[^>]+>", lambda tag: _round(tag[0]), drawing))
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" class="chart" aria-label="{escape(chart.title)}"'
    return Markup(f'{head} xmlns:xlink="http://www.w3.org/1999/xlink">{drawing}</svg>')


def use_page_colours(text: str) -> str:
    """Replace the colours of text, axes, grid lines and background by the variables of a page's style sheet."""
    for colour, name in ((INK, "ink"), (SOFT, "soft"), (RULE, "rule"), (PAPER, "paper")):
        text = text.replace(colour, f"var(--{name})")
    return text


def _round(tag: str) -> str:
    """Cut the coordinates in an SVG tag to hundredths of a pixel."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag)


def _make_handles(legend: dict[str, Line]) -> tuple[list[Line2D], list[str]]:
    return [Line2D([], [], **_look(line, 2.0)) for line in legend.values()], list(legend)


def _look(line: Line, width: float) -> Look:
    style = (0, tuple(length / width for length in line.dashes)) if line.dashes else "-"
    look = {"color": line.colour, "linewidth": width, "linestyle": "none" if len(line.x) == 1 else style}
    marker = "o" if line.marker is None and len(line.x) == 1 else line.marker
    if marker:
        look |= {"marker": marker, "markersize": 6, "markerfacecolor": line.colour if line.filled else PAPER}
    return look


def _draw_line(ax: Axes, line: Line, x: np.ndarray, y: np.ndarray, identity: str) -> None:
    (low, high), scale = ax.get_ylim(), ax.get_yscale()
    low, high = sorted((low, high))
    look = _look(line, 1.6)
    if line.marker is None and len(x) <= _MARKED and not line.steps:
        look |= {"marker": "o", "markersize": 3.6}
    style = "steps-post" if line.steps else "default"
    inside = np.clip(y, low, high)  # NaN stays NaN
    ax.plot(x, inside, gid=identity, drawstyle=style, clip_on=bool(scale == "log" or len(x) > _MARKED), **look)
    for beyond, marker in ((y < low, "v"), (y > high, "^")):
        where = np.flatnonzero(beyond & np.isfinite(y))[:_MARKED]
        if len(where):
            ax.plot(x[where], inside[where], linestyle="none", marker=marker, color=line.colour, clip_on=False)


def _draw_mark(ax: Axes, value: float, word: str, row: int) -> None:
    """Draw a vertical line at a value, and beside it a word, `row` lines of text below the top of the chart."""
    ax.axvline(value, color=SOFT, linewidth=0.8, linestyle="--")
    left = ax.transLimits.transform(ax.transScale.transform((value, ax.get_ylim()[0])))[0] < 0.3
    offset = ((4 if left else -4), -2 - 13 * row)
    look: Look = {"ha": "left" if left else "right", "va": "top", "fontsize": 8, "color": SOFT}
    ax.annotate(word, (value, 1), xycoords=("data", "axes fraction"), xytext=offset, textcoords="offset points", **look)


def _find_limits(axis: Axis, values: np.ndarray) -> tuple[float, float, bool]:
    """Return the two ends of an axis, and whether the axis is logarithmic, which needs positive values or limits."""
    positive = values[values > 0]
    logarithmic = axis.logarithmic and (len(positive) > 0 or axis.limits is not None)
    if axis.names:
        return len(axis.names) - 0.5, -0.5, False
    if axis.limits is not None:
        return *axis.limits, logarithmic
    if logarithmic:
        high = float(positive.max())
        low = max(float(positive.min()), high * 10.0**-_DECADES)
        if high < 10 * low and not 1e-3 < low < 1e5:  # ticks between powers of ten would have long names
            return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9), True
        margin = 1.1 if high < 100 * low else 1.5
        return low / margin, high * margin, True
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low if low == 0 else low - margin, high + margin, False


def _thin(line: Line, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a line's x, y, low and high, thinned to about `points` points: the extremes of each stretch, and gaps."""
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    y = np.where(np.isfinite(y), y, np.nan)
    low, high = (y if part is None else np.asarray(part, dtype=float) for part in (line.low, line.high))
    if len(x) > points:
        chosen: list[int] = []
        for stretch in np.array_split(np.arange(len(x)), max(1, points // 2)):
            finite = stretch[np.isfinite(y[stretch])]
            ends = {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])} if len(finite) else set()
            gap = set(stretch[np.isnan(y[stretch])][:1].tolist())  # a gap stays a gap
            chosen += sorted(ends | gap)
        x, y, low, high = x[chosen], y[chosen], low[chosen], high[chosen]
    return x, y, low, high
