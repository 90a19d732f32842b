"""Small SVG pictures for pages: lines over axes, matrices as heat maps, and coloured grids.

Colours of text and axes come from the page's style sheet, so that a picture fits a light and a dark page. All text goes
through an XML tree, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from jpmhc.report.style import ARC_COLOURS, common_power, linear_ticks, logarithmic_ticks, tick_labels

_WIDTH, _HEIGHT = 390, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 12, 44
# Points of a line up to which each is marked.
_MARKED = 25
# Decades that a logarithmic axis shows below its largest value.
_DECADES = 12


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a chart.

    Attributes:
        name: What the legend calls it.
        x: Places along the axis, ascending.
        y: Values; one that is not finite leaves a gap.
        colour: Its colour.
        dash: Lengths of dashes and gaps, as "6 3"; empty: drawn through.
        low: Lower end of a band around the line, if it has one.
        high: Upper end of that band.
        steps: Whether the value holds from each place to the next, as that of a distribution of few values does.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dash: str = ""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    steps: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: What it measures.
        logarithmic: Whether equal distances are equal factors.
        limits: Its two ends; found from the data where None.
        whole: Whether it counts something, so that only whole numbers are named.
    """

    label: str
    logarithmic: bool = False
    limits: tuple[float, float] | None = None
    whole: bool = False


class _Scale:
    """Turns values into places between two ends of a picture."""

    def __init__(self, axis: Axis, values: np.ndarray, start: float, stop: float) -> None:
        finite = values[np.isfinite(values)]
        positive = finite[finite > 0]
        self.logarithmic = axis.logarithmic and (len(positive) > 0 or axis.limits is not None)
        if axis.limits is not None:
            low, high = axis.limits
        elif self.logarithmic:
            high = float(positive.max())
            low = max(float(positive.min()), high * 10.0**-_DECADES)
            if high < 10 * low and not 1e-3 < low < 1e5:  # ticks between powers of ten would have long names
                low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)
            else:
                low, high = (low / 1.1, high * 1.1) if high < 100 * low else (low / 1.5, high * 1.5)
        else:
            low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
            pad = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
            low, high = (low if low == 0 else low - pad), high + pad
        self.low, self.high, self.start, self.stop = low, high, start, stop
        self.whole = axis.whole

    def ticks(self, most: int) -> list[float]:
        found = (logarithmic_ticks if self.logarithmic else linear_ticks)(self.low, self.high, most)
        return [tick for tick in found if not self.whole or tick == round(tick)]

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return places in the picture; values beyond an end lie at that end."""
        low, high = self.low, self.high
        inside = np.clip(values, low, high)
        if self.logarithmic:
            low, high, inside = math.log(low), math.log(high), np.log(inside)
        return self.start + (inside - low) / (high - low) * (self.stop - self.start)


def draw_lines(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    marks: Sequence[tuple[float, str]] = (),
    points: int = 400,
    description: str = "",
) -> Markup:
    """Draw lines over two axes and return the picture.

    Args:
        lines: What to draw, the first lowest.
        x: The horizontal axis.
        y: The vertical axis. Values that a logarithmic one has no place for lie on its lower end and are marked there.
        marks: Vertical lines, each at a value with the words beside it.
        points: The most points a line keeps; of longer ones the lowest and the highest of each stretch stay.
        description: What a screen reader says.
    """
    picture = _picture(_WIDTH, _HEIGHT, description)
    kept = [_thin(line, points) for line in lines]
    empty = np.zeros(0)
    scale_x = _Scale(x, np.concatenate([empty, *(line[0] for line in kept)]), _LEFT, _WIDTH - _RIGHT)
    heights = [part for line in kept for part in line[1:]]
    scale_y = _Scale(y, np.concatenate([empty, *heights]), _HEIGHT - _BOTTOM, _TOP)
    _draw_axes(picture, scale_x, scale_y, x.label, y.label)
    for row, (value, words) in enumerate(marks):
        if scale_x.low < value < scale_x.high:
            _draw_mark(picture, float(scale_x.place(np.array([value]))[0]), words, row)
    for line, (places, middle, low, high) in zip(lines, kept):
        group = ElementTree.SubElement(picture, "g", {"style": f"--c:{_safe_colour(line.colour)}", "class": "line"})
        ElementTree.SubElement(group, "title").text = line.name
        across = scale_x.place(places)
        if line.low is not None:
            _draw_band(group, across, scale_y.place(low), scale_y.place(high))
        _draw_line(group, line, across, middle, scale_y)
    return _markup(picture)


def draw_matrix(matrix: Sequence[Sequence[float]], description: str = "") -> Markup:
    """Draw a small matrix as a heat map with its numbers: blue above zero, red below, grey for what is not finite."""
    values = np.array(matrix, dtype=float)
    rows, columns = values.shape
    cell = 40
    picture = _picture(columns * cell, rows * cell, description)
    top = max(1.0, float(np.abs(values[np.isfinite(values)]).max(initial=0.0)))
    for (row, column), value in np.ndenumerate(values):
        finite = math.isfinite(value)
        kind = "positive" if value >= 0 else "negative" if finite else "lost"
        strength = 0.85 * min(1.0, abs(value) / top) if finite else 0.5
        box = {"x": str(column * cell), "y": str(row * cell), "width": str(cell), "height": str(cell)}
        ElementTree.SubElement(picture, "rect", {**box, "class": f"cell {kind}", "fill-opacity": f"{strength:.2f}"})
        if columns <= 8:
            place = {"x": str(column * cell + cell // 2), "y": str(row * cell + cell // 2 + 4), "class": "number"}
            ElementTree.SubElement(picture, "text", place).text = f"{value:.2f}".replace("-0.00", "0.00")
    return _markup(picture)


def draw_grid(grid: Sequence[Sequence[int]], wrong: Sequence[tuple[int, int]] = (), description: str = "") -> Markup:
    """Draw an ARC grid in its colours, with a cross on each wrong cell (row, column)."""
    values = np.array(grid, dtype=int)
    rows, columns = values.shape
    picture = _picture(columns, rows, description, kind="grid")
    for colour in np.unique(values):
        path = []
        for row, line in enumerate(values == colour):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(int), [0]])))
            path += [f"M{a} {row}h{b - a}v1H{a}z" for a, b in zip(edges[::2], edges[1::2])]
        fill = ARC_COLOURS[colour] if 0 <= colour < len(ARC_COLOURS) else "#ffffff"
        ElementTree.SubElement(picture, "path", {"d": "".join(path), "fill": fill})
    rules = "".join(f"M0 {k}H{columns}" for k in range(1, rows)) + "".join(f"M{k} 0V{rows}" for k in range(1, columns))
    ElementTree.SubElement(picture, "path", {"d": rules, "class": "rule"})
    crosses = "".join(f"M{column + 0.3:g} {row + 0.3:g}l.4 .4m0-.4l-.4 .4" for row, column in wrong)
    for kind in ("cross-under", "cross") if crosses else ():
        ElementTree.SubElement(picture, "path", {"d": crosses, "class": kind})
    return _markup(picture)


def _draw_axes(picture: ElementTree.Element, x: _Scale, y: _Scale, x_label: str, y_label: str) -> None:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    axes = ElementTree.SubElement(picture, "g", {"class": "axes"})
    ticks = x.ticks(6)
    for place, label in zip(x.place(np.array(ticks)), tick_labels(ticks)):
        ElementTree.SubElement(axes, "path", {"d": f"M{place:.1f} {bottom}v4"})
        at = {"x": f"{place:.1f}", "y": str(bottom + 17), "text-anchor": "middle"}
        ElementTree.SubElement(axes, "text", at).text = label
    ticks = y.ticks(6)
    labels, power = (tick_labels(ticks), "") if y.logarithmic else common_power(ticks)
    for place, label in zip(y.place(np.array(ticks)), labels):
        ElementTree.SubElement(axes, "path", {"d": f"M{_LEFT} {place:.1f}H{right}", "class": "rule"})
        at = {"x": str(_LEFT - 6), "y": f"{place + 4:.1f}", "text-anchor": "end"}
        ElementTree.SubElement(axes, "text", at).text = label
    ElementTree.SubElement(axes, "path", {"d": f"M{_LEFT} {_TOP}V{bottom}H{right}"})
    at = {"x": f"{(_LEFT + right) / 2:.0f}", "y": str(_HEIGHT - 8), "text-anchor": "middle", "class": "label"}
    ElementTree.SubElement(axes, "text", at).text = x_label
    middle = (_TOP + bottom) / 2
    at = {"transform": f"translate(13 {middle:.0f}) rotate(-90)", "text-anchor": "middle", "class": "label"}
    ElementTree.SubElement(axes, "text", at).text = f"{y_label}, in {power}" if power else y_label


def _draw_mark(picture: ElementTree.Element, place: float, words: str, row: int) -> None:
    """Draw a vertical line with its words, which stand on a line of their own so that those of two do not meet."""
    group = ElementTree.SubElement(picture, "g", {"class": "mark"})
    ElementTree.SubElement(group, "path", {"d": f"M{place:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"})
    right = place > _WIDTH * 0.7
    at = {"x": f"{place + (-4 if right else 4):.1f}", "y": str(_TOP + 10 + 15 * row)}
    at["text-anchor"] = "end" if right else "start"
    ElementTree.SubElement(group, "text", at).text = words


def _draw_band(group: ElementTree.Element, across: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    good = np.isfinite(low) & np.isfinite(high)
    there = [f"{a:.1f} {b:.1f}" for a, b in zip(across[good], high[good])]
    back = [f"{a:.1f} {b:.1f}" for a, b in zip(across[good][::-1], low[good][::-1])]
    if there:
        ElementTree.SubElement(group, "path", {"d": f"M{'L'.join(there + back)}z", "class": "band"})


def _draw_line(group: ElementTree.Element, line: Line, across: np.ndarray, values: np.ndarray, y: _Scale) -> None:
    places = y.place(values)
    path, pen = [], "M"
    for a, b, value in zip(across, places, values):
        if math.isfinite(value):
            path.append(f"H{a:.1f}V{b:.1f}" if line.steps and pen == "L" else f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
        else:
            pen = "M"
    ElementTree.SubElement(group, "path", {"d": "".join(path), "stroke-dasharray": line.dash})
    if len(values) <= _MARKED and not line.steps:
        for a, b, place, value in zip(across, places, line.x, values):
            if math.isfinite(value):
                dot = ElementTree.SubElement(group, "circle", {"cx": f"{a:.1f}", "cy": f"{b:.1f}", "r": "2.6"})
                ElementTree.SubElement(dot, "title").text = f"{line.name}: {value:.5g} at {place:g}"
    beyond = np.isfinite(values) & ((values < y.low) | (values > y.high))
    for a, value in list(zip(across[beyond], values[beyond]))[:_MARKED]:
        top = value > y.high
        tip, wing = (_TOP + 1, 7) if top else (_HEIGHT - _BOTTOM - 1, -7)
        mark = ElementTree.SubElement(group, "path", {"d": f"M{a:.1f} {tip}l-4 {wing}h8z", "class": "beyond"})
        ElementTree.SubElement(mark, "title").text = f"{line.name}: {value:.3g}, {'above' if top else 'below'} the axis"


def _thin(line: Line, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return a line's places, values and band; of a long one the lowest and the highest value of each stretch."""
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    low, high = (y if part is None else np.asarray(part, dtype=float) for part in (line.low, line.high))
    if len(x) > points:
        kept: list[int] = []
        for stretch in np.array_split(np.arange(len(x)), max(1, points // 2)):
            good = np.isfinite(y[stretch])
            ends = (
                {int(stretch[good][k]) for k in (y[stretch][good].argmin(), y[stretch][good].argmax())}
                if good.any()
                else set()
            )
            kept += sorted(ends | set(stretch[~good][:1].tolist()))  # a gap stays a gap
        x, y, low, high = x[kept], y[kept], low[kept], high[kept]
    return x, y, low, high


def _picture(width: int, height: int, description: str, kind: str = "chart") -> ElementTree.Element:
    names = {"viewBox": f"0 0 {width} {height}", "role": "img", "class": kind}
    return ElementTree.Element("svg", {**names, "aria-label": description} if description else names)


def _safe_colour(colour: str) -> str:
    if not (colour.startswith("#") and colour[1:].isalnum()):
        raise ValueError(f"a colour must be written as #rrggbb, not {colour!r}")
    return colour


def _markup(picture: ElementTree.Element) -> Markup:
    return Markup(ElementTree.tostring(picture, encoding="unicode", short_empty_elements=True))
