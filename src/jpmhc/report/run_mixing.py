"""Show a run's skips as heat maps, with their distance to the identity, their constraint error and their product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jpmhc.report.charts import Axis, Chart, Line
from jpmhc.report.page import Picture, Section, Table, show_matrix
from jpmhc.report.run_groups import RunGroup, Series, draw_lines
from jpmhc.report.run_record import RunRecord, to_number
from jpmhc.report.style import PLAIN

_MOST_MAPS = 24  # the most heat maps of a section
_MOST_STREAMS = 16
_DECADES = 6  # the most decades of the axis of singular values


def mixing_section(group: RunGroup) -> Section:
    """Return the section about a group's skips; the section is empty if the first run logged no "mixing" lines."""
    logged = group.runs[0].of_kind("mixing")
    if not logged:
        return Section("")
    last = logged[-1]
    text = f"At step {last['step']}, averaged over tokens" + (", first seed." if len(group.runs) > 1 else ".")
    charts = [_draw_product(group, last), *_draw_history(group)]
    return Section(f"Skips: {group.name}", [text], _tabulate(last), charts, _show_maps(last))


def _show_maps(last: dict[str, Any]) -> list[tuple[str, list[Picture]]]:
    skips = last.get("skips")
    maps = [
        show_matrix(str(name), [[to_number(value) for value in row] for row in matrix])
        for name, matrix in (skips.items() if isinstance(skips, dict) else ())
        if _is_matrix(matrix)
    ]
    more = f", the first {_MOST_MAPS} of {len(maps)}" if len(maps) > _MOST_MAPS else ""
    return [(f"Mean skip H of each connection{more}: to stream (row) from stream (column)", maps[:_MOST_MAPS])]


def _is_matrix(matrix: Any) -> bool:
    if not isinstance(matrix, list) or not 1 <= len(matrix) <= _MOST_STREAMS:
        return False
    widths = {len(row) if isinstance(row, list) else 0 for row in matrix}
    return len(widths) == 1 and 1 <= widths.pop() <= _MOST_STREAMS


def _tabulate(last: dict[str, Any]) -> list[Table]:
    distance, violation = (last.get(key) for key in ("distance_to_identity", "violation"))
    if not isinstance(distance, dict) or not isinstance(violation, dict):
        return []
    rows = [
        [str(name), f"{to_number(value):.3g}", f"{to_number(violation.get(name)):.1e}"]
        for name, value in distance.items()
    ]
    return [Table(["connection", "distance of H to I", "violation of its set"], rows[:64])]


def _draw_product(group: RunGroup, last: dict[str, Any]) -> Chart:
    """Return a chart of the singular values of H_k … H_1 by depth k, for the measured skips and for random skips."""
    lines: list[Line] = []
    for key, name, colour, dashes in (
        ("random_product_over_depth", "random skips of this mixer, as the theory draws them", PLAIN, (4.0, 3.0)),
        ("product_over_depth", "measured", group.colour, ()),
    ):
        values = last.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(row, list) for row in values):
            continue
        depth = range(1, len(values) + 1)
        for k in range(min(map(len, values))):
            lines.append(Line(name, depth, [to_number(row[k]) for row in values], colour, dashes))
    finite = np.array([value for line in lines for value in line.y if 0 < value < np.inf])
    top = max(2.0, float(finite.max(initial=0)) * 1.3)
    limits = max(min(0.5, float(finite.min(initial=1)) / 1.3), top * 10.0**-_DECADES), top
    note = "Mean over tokens of each singular value of H_k … H_1 within one supervision step."
    x, y = Axis("connections passed", whole=True), Axis("singular value", True, limits)
    return Chart("product of all skips over depth", lines, x, y, note=note)


def _draw_history(group: RunGroup) -> list[Chart]:
    share = Axis("share of singular values below 0.1", limits=(-0.02, 1.02))
    charts: tuple[tuple[str, Axis, Series], ...] = (
        ("distance of the skips to I", Axis("mean over connections"), _combine("distance_to_identity", np.mean)),
        ("violation of the set", Axis("largest of all connections", True), _combine("violation", np.max)),
        ("lost by the product of all skips", share, lambda run: run.series("mixing", "product_collapsed")),
    )
    return [Chart(title, draw_lines([group], series), Axis("step", whole=True), y) for title, y, series in charts]


def _combine(key: str, combine: Callable[[list[float]], float]) -> Series:
    """Return the series of a number that is logged per connection, combined (mean or maximum) over connections."""

    def series(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        logged = [line for line in run.of_kind("mixing") if isinstance(line.get(key), dict) and line[key]]
        values = [float(combine([to_number(value) for value in line[key].values()])) for line in logged]
        return np.array([line["step"] for line in logged], dtype=float), np.array(values)

    return series
