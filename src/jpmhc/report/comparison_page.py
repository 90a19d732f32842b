"""The page of a comparison of mixers, from what `comparison.json` holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpmhc.report.comparison import find_band, table_rows
from jpmhc.report.page import Folded, Picture, Section, Table, draw_chart, render_page
from jpmhc.report.style import colour_of
from jpmhc.report.svg import Axis, Line

_STEP = Axis("step", whole=True)


def render_comparison(result: dict[str, Any]) -> str:
    """Return the HTML page of a comparison."""
    settings = result["settings"]
    baseline, seeds = settings["baseline"], len(settings["seeds"])
    lead = [
        f"{len(settings['mixers'])} mixers with {seeds} seed{'s' if seeds != 1 else ''} each on the task "
        f"{settings.get('task', {}).get('kind', '–')}. A line is the mean over seeds, its band the 95 % interval."
    ]
    heading, *rows = table_rows(result)
    note = f"± is the standard error of the mean; differences are to {baseline} with the same seed."
    pictures = [*_draw_losses(result), *_draw_curves(result)]
    folded = [Folded("Settings", json.dumps(settings, indent=2, default=str))]
    sections = [
        Section("Results", (), [Table(heading, rows, note)]),
        Section("Along training", (), (), [("", pictures)]),
        Section("Configuration", (), (), (), folded),
    ]
    return render_page("Comparison of mixers", lead, sections)


def _curves(result: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the curves of the runs that ended, by mixer and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {row["mixer"]: {} for row in result["summary"]}
    for run in result["runs"]:
        if run["final"] and run["mixer"] in found:
            found[run["mixer"]][run["seed"]] = run["curves"]
    return found


def _draw_losses(result: dict[str, Any]) -> list[Picture]:
    """Draw the validation loss, and its difference to the baseline's with the same seed."""
    curves, baseline = _curves(result), result["settings"]["baseline"]
    losses, gaps = [], []
    for mixer, own in curves.items():
        mine = {seed: one["validation"] for seed, one in own.items() if one["validation"].get("step")}
        pairs = [
            (one, curves[baseline][seed]["validation"])
            for seed, one in mine.items()
            if seed in curves.get(baseline, {})
        ]
        if mine:
            losses.append(_mean_line(mixer, next(iter(mine.values()))["step"], [one["loss"] for one in mine.values()]))
        if pairs and mixer != baseline:
            differences = [np.subtract(one["loss"], other["loss"]) for one, other in pairs]
            gaps.append(_mean_line(mixer, pairs[0][0]["step"], differences))
    found = []
    if losses:
        found.append(draw_chart("validation loss", losses, _STEP, Axis("loss", True)))
    if gaps:
        found.append(draw_chart(f"loss minus that of {baseline}", gaps, _STEP, Axis("difference of losses")))
    return found


def _draw_curves(result: dict[str, Any]) -> list[Picture]:
    found = []
    for title, group, name, axis in (
        ("gradient norm", "train", "gradient_norm", Axis("norm of the gradient", True)),
        ("lost by the product of all skips", "mixing", "collapsed", Axis("share below 0.1", limits=(0.0, 1.0))),
    ):
        lines = []
        for mixer, own in _curves(result).items():
            logged = [one[group] for one in own.values() if one.get(group, {}).get("step")]
            if logged:
                values = [one[name] for one in logged]
                lines.append(_mean_line(mixer, logged[0]["step"], values, name == "gradient_norm"))
        if lines:
            found.append(draw_chart(title, lines, _STEP, axis))
    return found


def _mean_line(mixer: str, steps: Sequence[float], curves: Sequence[Any], as_factor: bool = False) -> Line:
    """Return the mean over seeds, with the 95 % interval of the mean as its band where there are several."""
    mean, low, high = (part.tolist() for part in find_band(curves, as_factor))
    dash = "" if colour_of(mixer) != colour_of(None) else "6 3"  # the plain model is no mixer
    ends = (low, high) if len(curves) > 1 else (None, None)
    return Line(mixer, steps, mean, colour_of(mixer), dash, *ends)
