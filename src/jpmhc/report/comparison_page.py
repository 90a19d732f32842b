"""The page of a comparison of mixers, from the content of `comparison.json`."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpmhc.experiments.comparison.comparison import Result
from jpmhc.experiments.comparison.experiment import Curves
from jpmhc.report.comparison import (
    ArmStyle,
    arm_styles,
    curves_of,
    describe_tests,
    find_band,
    find_baselines,
    table_rows,
)
from jpmhc.report.page import Folded, Picture, Section, Table, draw_chart, render_page
from jpmhc.report.svg import Axis, Line

_STEP = Axis("step", whole=True)
_DASHES = {"-": "", "--": "6 3", ":": "2 3", "-.": "6 3 2 3"}  # matplotlib's, in SVG


def render_comparison(result: Result) -> str:
    """Return the HTML page of a comparison."""
    settings = result["settings"]
    task = settings["task"]
    kind = task["kind"] if isinstance(task, dict) else task
    runs, arms = len(result["runs"]), len(result["summary"])
    lead = [
        f"{arms} arms on the task {kind}, {runs} runs, each arm at its best learning rate. "
        "A line is the mean over seeds, its band the 95 % interval."
    ]
    heading, *rows = table_rows(result)
    note = " ".join(["± is the standard error of the mean; differences are paired by seed.", *describe_tests(result)])
    curves = curves_of(result)
    styles = arm_styles(list(curves))
    baseline = next(iter(find_baselines(result)), None)
    pictures = [*_draw_losses(curves, styles, baseline), *_draw_curves(curves, styles)]
    folded = [Folded("Settings", json.dumps(settings, indent=2, default=str))]
    sections = [
        Section("Results", (), [Table(heading, rows, note)]),
        Section("Along training", (), (), [("", pictures)]),
        Section("Configuration", (), (), (), folded),
    ]
    return render_page("Comparison of mixers", lead, sections)


ArmCurves = dict[str, dict[int, dict[str, Curves]]]  # by arm and seed


def _draw_losses(curves: ArmCurves, styles: dict[str, ArmStyle], baseline: str | None) -> list[Picture]:
    """Draw the validation loss, and its difference to the baseline's with the same seed."""
    losses, gaps = [], []
    for arm, own in curves.items():
        mine = {seed: one["validation"] for seed, one in own.items() if one["validation"].get("step")}
        others = curves.get(baseline, {}) if baseline is not None and arm != baseline else {}
        pairs = [(one, others[seed]["validation"]) for seed, one in mine.items() if seed in others]
        pairs = [(one, other) for one, other in pairs if one["step"] == other["step"]]
        if mine:
            values = [one["loss"] for one in mine.values()]
            losses.append(_mean_line(arm, next(iter(mine.values()))["step"], values, styles[arm]))
        if pairs:
            differences = [np.subtract(one["loss"], other["loss"]) for one, other in pairs]
            gaps.append(_mean_line(arm, pairs[0][0]["step"], differences, styles[arm]))
    pictures = []
    if losses:
        pictures.append(draw_chart("validation loss", losses, _STEP, Axis("loss", True)))
    if gaps:
        pictures.append(draw_chart(f"loss minus that of {baseline}", gaps, _STEP, Axis("difference of losses")))
    return pictures


def _draw_curves(curves: ArmCurves, styles: dict[str, ArmStyle]) -> list[Picture]:
    pictures = []
    for title, group, name, axis in (
        ("gradient norm", "train", "gradient_norm", Axis("norm of the gradient", True)),
        ("lost by the product of all skips", "mixing", "collapsed", Axis("share below 0.1", limits=(0.0, 1.0))),
    ):
        lines = []
        for arm, own in curves.items():
            logged = [one[group] for one in own.values() if one.get(group, {}).get("step")]
            if logged:
                values = [one[name] for one in logged]
                lines.append(_mean_line(arm, logged[0]["step"], values, styles[arm], name == "gradient_norm"))
        if lines:
            pictures.append(draw_chart(title, lines, _STEP, axis))
    return pictures


def _mean_line(
    arm: str, steps: Sequence[float], curves: Sequence[Any], style: ArmStyle, as_factor: bool = False
) -> Line:
    """Return the mean over seeds, with the 95 % interval of the mean as its band where there are several."""
    mean, low, high = (part.tolist() for part in find_band(curves, as_factor))
    ends = (low, high) if len(curves) > 1 else (None, None)
    return Line(arm, steps, mean, style.colour, _DASHES[style.dashes], *ends)
