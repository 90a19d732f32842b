"""What a run's mixers do: skips as heat maps, their distance to the identity and to their set, and their product."""

from __future__ import annotations

from typing import Any

import numpy as np

from jpmhc.report.page import Picture, Section, Table, draw_chart
from jpmhc.report.run_groups import RunGroup
from jpmhc.report.run_record import RunRecord, to_number
from jpmhc.report.svg import Axis, Line, draw_lines, draw_matrix

_STEP = Axis("step", whole=True)
# Heat maps shown; a deep model has more connections than a page has room for.
_MAPS = 24
_LARGEST = 16  # streams


def mixing_section(group: RunGroup) -> Section:
    """Return the section about the mixers of a group of runs, empty where nothing was logged of them."""
    logged = group.runs[0].of_kind("mixing")
    if not logged:
        return Section("")
    last = logged[-1]
    title = f"Skips: {group.name}"
    maps = _draw_maps(last)
    text = [f"At step {last['step']}, averaged over tokens" + (", first seed." if len(group.runs) > 1 else ".")]
    return Section(title, text, _table(last), [("", _draw_product(group, last) + _draw_history(group)), *maps])


def _draw_maps(last: dict[str, Any]) -> list[tuple[str, list[Picture]]]:
    skips = last.get("skips")
    found = [
        Picture(str(name), draw_matrix([[to_number(v) for v in row] for row in matrix], f"skip of {name}"), small=True)
        for name, matrix in (skips.items() if isinstance(skips, dict) else ())
        if _is_matrix(matrix)
    ]
    if not found:
        return []
    more = f", the first {_MAPS} of {len(found)}" if len(found) > _MAPS else ""
    return [(f"Mean skip H of each connection{more}: to stream (row) from stream (column)", found[:_MAPS])]


def _is_matrix(matrix: Any) -> bool:
    if not isinstance(matrix, list) or not 1 <= len(matrix) <= _LARGEST:
        return False
    return all(isinstance(row, list) and len(row) == len(matrix[0]) and 1 <= len(row) <= _LARGEST for row in matrix)


def _table(last: dict[str, Any]) -> list[Table]:
    distance, violation = (last.get(key) for key in ("distance_to_identity", "violation"))
    if not isinstance(distance, dict) or not isinstance(violation, dict):
        return []
    rows = [
        [str(name), f"{to_number(value):.3g}", f"{to_number(violation.get(name)):.1e}"]
        for name, value in distance.items()
    ]
    return [Table(["connection", "distance of H to I", "violation of its set"], rows[:64])]


def _draw_product(group: RunGroup, last: dict[str, Any]) -> list[Picture]:
    """Draw the singular values of the product of all skips over depth, beside those of random skips."""
    lines = []
    for key, word, dash in (
        ("product_over_depth", "measured", ""),
        ("random_product_over_depth", "random skips of this mixer", "4 3"),
    ):
        values = last.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(row, list) for row in values):
            continue
        depth = list(range(1, len(values) + 1))
        streams = min(map(len, values))
        colour = group.colour if not dash else "#8a8a8a"
        for k in range(streams):
            lines.append(
                Line(f"{word}, {k + 1} of {streams}", depth, [to_number(row[k]) for row in values], colour, dash)
            )
    if not lines:
        return []
    legend = [
        ("measured", group.colour, ""),
        ("random skips of this mixer, as the theory draws them", "#8a8a8a", "4 3"),
    ]
    y = Axis("singular value", True, _limits(lines))
    svg = draw_lines(lines[::-1], Axis("connections passed", whole=True), y, description="product of skips")
    note = "Mean over tokens of each singular value of H_k … H_1 within one supervision step."
    return [Picture("product of all skips over depth", svg, legend, note)]


def _limits(lines: list[Line]) -> tuple[float, float]:
    """Return the ends of the axis: six decades at most, and room around values that are all one."""
    values = np.array([value for line in lines for value in line.y])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return 0.1, 10.0
    top = max(2.0, float(values.max()) * 1.3)
    return max(min(0.5, float(values.min()) / 1.3), top * 1e-6), top


def _draw_history(group: RunGroup) -> list[Picture]:
    charts = (
        ("distance of the skips to I", "mean over connections", False, _combine("distance_to_identity", np.mean)),
        ("violation of the set", "largest of all connections", True, _combine("violation", np.max)),
        ("lost by the product of all skips", "share of singular values below 0.1", False, _collapsed),
    )
    found = []
    for title, label, logarithmic, series in charts:
        line = group.line(series)
        if line is not None:
            limits = (0.0, 1.0) if series is _collapsed else None
            found.append(draw_chart(title, [line], _STEP, Axis(label, logarithmic, limits)))
    return found


def _combine(key: str, how: Any) -> Any:
    def series(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        logged = [line for line in run.of_kind("mixing") if isinstance(line.get(key), dict) and line[key]]
        values = [float(how([to_number(value) for value in line[key].values()])) for line in logged]
        return np.array([line["step"] for line in logged], dtype=float), np.array(values)

    return series


def _collapsed(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    return run.series("mixing", "product_collapsed")
