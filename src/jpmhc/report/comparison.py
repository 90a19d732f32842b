"""Write the result of a comparison, the content of `comparison.json`, as a table, a figure and a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from jpmhc.experiments.comparison.comparison import Result
from jpmhc.experiments.comparison.experiment import PLAIN as PLAIN_ARM
from jpmhc.experiments.comparison.experiment import Curves, split_arm
from jpmhc.experiments.comparison.statistics import (
    ArmSummary,
    Mean,
    best_runs,
    correlate_with_loss,
    losses_by_time,
    share_of_time,
    student_quantile,
)
from jpmhc.report.charts import DASHES, Axis, Chart, Line, draw_figure
from jpmhc.report.page import Section, Table, render_page
from jpmhc.report.style import PLAIN, SOFT, Look, colour_of, save_figure

_EMPTY = "–"  # the cell of a number that is not known
_STEP = Axis("step", whole=True)
Looks = dict[str, Look]  # colour and dashes by arm
Values = Sequence[float] | np.ndarray
ArmCurves = dict[str, dict[int, dict[str, Curves]]]  # a run's curves by arm and seed


def format_table(result: Result) -> str:
    """Return a Markdown table of means with standard errors and of paired differences with 95 % intervals."""
    titles, *rows = table_rows(result)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([table, *describe_tests(result), *describe_times(result), *describe_correlations(result)])


def describe_tests(result: Result) -> list[str]:
    """Return a sentence with F and p for each F test of the hypothesis that the arms' mean losses are equal."""
    return [
        f"Equal mean losses of {', '.join(test['arms'])} over seeds {', '.join(map(str, test['seeds']))}: "
        f"F = {test['f']:.3g}, p = {test['p']:.2g}."
        for test in result["equal_means"]
    ]


def describe_times(result: Result) -> list[str]:
    """Return a sentence for each arm with several numbers of steps that reaches the plain model's final loss.

    The sentence says in which share of the plain model's training time the arm reaches that loss.
    """
    curves = losses_by_time(result["summary"])
    time, loss = min(curves.pop(PLAIN_ARM, []), key=lambda point: point[1], default=(None, None))
    if time is None or loss is None:
        return []
    shares = {arm: share_of_time(curve, time, loss) for arm, curve in curves.items()}
    return [
        f"{arm} reaches the plain model's final loss in {share:.0%} of its training time."
        for arm, share in shares.items()
        if share is not None
    ]


def describe_correlations(result: Result) -> list[str]:
    """Return a sentence with the rank correlation, over arms, of the loss with each other measured number.

    The list is empty if there are too few arms.
    """
    correlations = correlate_with_loss(result["summary"])
    if not correlations:
        return []
    ordered = sorted(correlations.items(), key=lambda item: -abs(item[1][0]))
    named = ", ".join(f"{name} {value:+.2f} ({count})" for name, (value, count) in ordered)
    return [f"Rank correlation with the loss, in brackets the number of arms: {named}."]


def find_baselines(result: Result) -> list[str]:
    """Return the arms whose losses were subtracted from other arms' losses, in the order of `--baselines`."""
    differences = [row["differences"] for row in reversed(result["summary"])]  # a baseline's own row lacks its name
    return list(dict.fromkeys(name for row in sorted(differences, key=len, reverse=True) for name in row))


def table_rows(result: Result) -> list[list[str]]:
    """Return the table's rows of cells, without columns that are empty for every arm; the first row is the heading."""
    baselines = find_baselines(result)
    titles = ["arm", "runs", "parameters", "learning rate", "loss"]
    for baseline in baselines:
        titles += [f"minus {baseline}", "95 % interval"]
    titles += ["exactly solved", "pass@1", "pass@2", "gradient norm", "∏H collapsed", "ms per step", "seconds"]
    columns = zip(titles, *(_format_row(row, baselines) for row in result["summary"]))
    return [list(row) for row in zip(*(column for column in columns if set(column[1:]) != {_EMPTY}))]


def _format_row(row: ArmSummary, baselines: list[str]) -> list[str]:
    metrics = row["metrics"]
    cells = [
        row["arm"],
        f"{len(row['seeds'])}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
        f"{row['parameters']:,}",
        f"{row['learning_rate']:g}" + (f" of {len(row['rates'])}" if len(row["rates"]) > 1 else ""),
        _format_mean(metrics.get("loss"), ".4f"),
    ]
    for baseline in baselines:
        difference = row["differences"].get(baseline)
        mean = None if difference is None else difference["mean"]
        interval = None if difference is None else difference["interval"]
        cells.append(_EMPTY if mean is None else f"{mean:+.4f}")
        cells.append(_EMPTY if interval is None else f"{interval[0]:+.4f} … {interval[1]:+.4f}")
    cells += [_format_mean(metrics.get(name), ".1%") for name in ("exact_accuracy", "pass@1", "pass@2")]
    cells.append(_format_mean(metrics.get("gradient_norm"), ".3g"))
    cells.append(_format_mean(metrics.get("collapsed"), ".1%"))
    cells.append(_EMPTY if row["step_seconds"] is None else f"{1000 * row['step_seconds']:.1f}")
    return [*cells, f"{row['seconds']:.0f}"]


def _format_mean(metric: Mean | None, form: str) -> str:
    if metric is None or metric["mean"] is None:
        return _EMPTY
    error = metric["standard_error"]
    return f"{metric['mean']:{form}}" + ("" if error is None else f" ± {error:{form}}")


def draw_comparison(result: Result, path: Path) -> Path:
    """Draw the charts of a comparison into one file, and return the file's path."""
    charts = make_charts(result)
    return save_figure(draw_figure(charts, columns=3 if len(charts) > 4 else 2, shared_legend=True), path)


def render_comparison(result: Result) -> str:
    """Return the HTML page of a comparison."""
    settings = result["settings"]
    task = settings["task"]
    kind = task["kind"] if isinstance(task, dict) else task
    seeds = len({run["seed"] for run in result["runs"]})
    means = "A line is the mean over seeds, its band the 95 % interval." if seeds > 1 else "One seed, no error bars."
    lead = [
        f"{len(result['summary'])} arms on the task {kind}, {len(result['runs'])} runs, each arm at its best learning "
        f"rate. {means}"
    ]
    heading, *rows = table_rows(result)
    errors = ["± is the standard error of the mean; differences are paired by seed."] if seeds > 1 else []
    note = " ".join([*errors, *describe_tests(result), *describe_times(result), *describe_correlations(result)])
    sections = [
        Section("Results", tables=[Table(heading, rows, note)]),
        Section("Curves and differences", charts=make_charts(result)),
        Section("Configuration", folded=[("Settings", json.dumps(settings, indent=2, default=str))]),
    ]
    return render_page("Comparison of mixers", lead, sections)


def make_charts(result: Result) -> list[Chart]:
    """Return the charts of a comparison, without charts that would be empty.

    The charts are: validation loss by step; validation loss minus the loss of the baseline's run with the same seed, by
    step; final loss by learning rate; final loss by training time; gradient norm by step; share of singular values of
    the product of all skips below 0.1, by step; final loss minus the baseline's loss.
    """
    curves = _curves_of(result)
    looks = arm_looks(list(curves))
    baseline = next(iter(find_baselines(result)), "")
    losses, gaps, norms, collapsed = [], [], [], []
    for arm, runs in curves.items():
        own = {seed: one["validation"] for seed, one in runs.items() if one["validation"].get("step")}
        others = curves.get(baseline, {}) if arm != baseline else {}
        pairs = [(one, others[seed]["validation"]) for seed, one in own.items() if seed in others]
        pairs = [(one, other) for one, other in pairs if one["step"] == other["step"]]
        differences = [np.subtract(one["loss"], other["loss"]) for one, other in pairs]
        losses += _draw_mean(arm, looks, own.values(), "loss")
        if pairs:
            gaps.append(_mean_line(arm, looks, pairs[0][0]["step"], differences))
        norms += _draw_mean(arm, looks, [one.get("train", {}) for one in runs.values()], "gradient_norm", True)
        collapsed += _draw_mean(arm, looks, [one.get("mixing", {}) for one in runs.values()], "collapsed")
    share = Axis("share of singular values below 0.1", limits=(-0.02, 1.02))
    charts = [
        Chart("validation loss", losses, _STEP, Axis("loss", True)),
        Chart(f"validation loss minus that of {baseline}, by seed", gaps, _STEP, Axis("difference of losses")),
        _draw_rates(result, looks),
        _draw_times(result),
        Chart("gradient norm", norms, _STEP, Axis("norm of the gradient", True)),
        Chart("lost by the product of all skips", collapsed, _STEP, share),
        draw_differences(result),
    ]
    return [chart for chart in charts if chart.lines]


def arm_looks(arms: Sequence[str]) -> Looks:
    """Return each arm's look: the colour of its mixer, and dashes that differ between arms with the same mixer."""
    counts: dict[str, int] = {}
    looks = {}
    for arm in arms:
        colour = colour_of(split_arm(arm)[0])
        number = counts.setdefault(colour, int(colour == PLAIN))  # plain's grey is close to the identity's grey
        looks[arm] = {"colour": colour, "dashes": DASHES[number % len(DASHES)]}
        counts[colour] += 1
    return looks


def _curves_of(result: Result) -> ArmCurves:
    """Return the curves of each arm's finished runs at the arm's best learning rate, by arm and seed."""
    return {
        row["arm"]: {run["seed"]: run["curves"] for run in best_runs(result["runs"], row["arm"]) if run["final"]}
        for row in result["summary"]
    }


def find_band(curves: Sequence[Values], as_factor: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean of curves [seeds, points], and the lower and upper end of its 95 % interval. [points] each

    With `as_factor` the interval is computed from logarithms, so that it is positive for positive values.
    """
    values = np.array(curves, float)
    mean, spread = values.mean(0), np.log(np.maximum(values, 1e-300)) if as_factor else values
    if len(values) < 2:
        return mean, mean, mean
    reach = student_quantile(len(values) - 1) * spread.std(0, ddof=1) / len(values) ** 0.5
    return (mean, mean * np.exp(-reach), mean * np.exp(reach)) if as_factor else (mean, mean - reach, mean + reach)


def _draw_mean(arm: str, looks: Looks, curves: Iterable[Curves], name: str, as_factor: bool = False) -> list[Line]:
    """Return one line with the mean over seeds of the curve `name`, or no line if no seed has this curve."""
    logged = [one for one in curves if one.get("step")]
    return [_mean_line(arm, looks, logged[0]["step"], [one[name] for one in logged], as_factor)] if logged else []


def _mean_line(
    arm: str, looks: Looks, steps: Sequence[float], curves: Sequence[Values], as_factor: bool = False
) -> Line:
    mean, low, high = find_band(curves, as_factor)
    several = len(curves) > 1
    return Line(arm, steps, mean, **looks[arm], low=low if several else None, high=high if several else None)


def _draw_rates(result: Result, looks: Looks) -> Chart:
    """Return a chart of the first seed's final loss by learning rate, with a filled dot at the best rate."""
    lines = []
    for row in result["summary"]:
        points = sorted((float(rate), loss) for rate, loss in row["rates"].items() if loss is not None)
        if len(row["rates"]) > 1 and points:
            rates, values = zip(*points)
            lines.append(Line(row["arm"], rates, values, **looks[row["arm"]], marker="o", filled=False))
            best = [(rate, loss) for rate, loss in points if rate == row["learning_rate"]]
            lines += [Line("", [rate], [loss], looks[row["arm"]]["colour"], marker="o") for rate, loss in best]
    return Chart("final loss by learning rate, first seed", lines, Axis("learning rate", True), Axis("loss"))


def _draw_times(result: Result) -> Chart:
    """Return a chart of final losses by training time, with a line for each arm with several numbers of steps."""
    curves = losses_by_time(result["summary"])
    looks = arm_looks(list(curves))
    lines = []
    for arm, points in curves.items():
        times, losses = zip(*points)
        lines.append(Line(arm, times, losses, **looks[arm], marker="o"))
    return Chart("final loss by training time", lines, Axis("seconds of training", True), Axis("loss"))


def draw_differences(result: Result) -> Chart:
    """Return a chart of each arm's final loss minus the first baseline's loss, paired by seed, with 95 % intervals.

    An arm's dot is filled if its interval does not contain zero.
    """
    baseline = next(iter(find_baselines(result)), "")
    rows = [
        (row["arm"], mean, difference["interval"])
        for row in result["summary"]
        if (difference := row["differences"].get(baseline)) and (mean := difference["mean"]) is not None
    ]
    lines = [Line("", [0, 0], [-0.5, len(rows) - 0.5], SOFT, marker="")] if rows else []
    for height, (arm, mean, interval) in enumerate(rows):
        colour = colour_of(split_arm(arm)[0])
        clear = interval is not None and interval[0] * interval[1] > 0
        if interval is not None:
            lines.append(Line("", interval, [height, height], colour, marker=""))
        lines.append(Line("", [mean], [height], colour, marker="o", filled=clear))
    known = any(interval is not None for *_, interval in rows)
    x = Axis("difference of the loss" + ", 95 % interval" * known)
    y = Axis("", names=[arm for arm, *_ in rows])
    return Chart(f"final loss minus that of {baseline}, by seed", lines, x, y)
