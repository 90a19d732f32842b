"""A comparison of mixers as a table and as a figure, from what `comparison.json` holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jpmhc.experiments.comparison.comparison import Result
from jpmhc.experiments.comparison.experiment import Curves, split_arm
from jpmhc.experiments.comparison.statistics import ArmSummary, Mean, best_runs, student_quantile
from jpmhc.report.style import PLAIN, colour_of, finish_axes, save_figure


def format_table(result: Result) -> str:
    """Write a comparison as a table in Markdown: means with standard errors, paired differences with 95 % intervals."""
    titles, *rows = table_rows(result)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([table, *describe_tests(result)])


def describe_tests(result: Result) -> list[str]:
    """Say whether the arms' means differ."""
    return [
        f"Equal mean losses of {', '.join(test['arms'])} over seeds {', '.join(map(str, test['seeds']))}: "
        f"F = {test['f']:.3g}, p = {test['p']:.2g}."
        for test in result["equal_means"]
    ]


def find_baselines(result: Result) -> list[str]:
    """Return the arms that the others are compared with."""
    return list(dict.fromkeys(name for row in result["summary"] for name in row["differences"]))


def table_rows(result: Result) -> list[list[str]]:
    """Return the cells of that table, the heading first."""
    baselines = find_baselines(result)
    accuracy = any("exact_accuracy" in row["metrics"] for row in result["summary"])
    titles = ["arm", "runs", "parameters", "learning rate", "loss"]
    for baseline in baselines:
        titles += [f"minus {baseline}", "95 % interval"]
    titles += ["exactly solved"] * accuracy + ["gradient norm", "∏H collapsed", "ms per step", "seconds"]
    return [titles, *(_format_row(row, baselines, accuracy) for row in result["summary"])]


def _format_row(row: ArmSummary, baselines: list[str], accuracy: bool) -> list[str]:
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
        cells.append("–" if mean is None else f"{mean:+.4f}")
        cells.append("–" if interval is None else f"{interval[0]:+.4f} … {interval[1]:+.4f}")
    if accuracy:
        cells.append(_format_mean(metrics.get("exact_accuracy"), ".1%"))
    cells.append(_format_mean(metrics.get("gradient_norm"), ".3g"))
    cells.append(_format_mean(metrics.get("collapsed"), ".1%"))
    cells.append("–" if row["step_seconds"] is None else f"{1000 * row['step_seconds']:.1f}")
    return [*cells, f"{row['seconds']:.0f}"]


def _format_mean(metric: Mean | None, form: str) -> str:
    if metric is None or metric["mean"] is None:
        return "–"
    error = metric["standard_error"]
    return f"{metric['mean']:{form}}" + ("" if error is None else f" ± {error:{form}}")


_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


class ArmStyle(NamedTuple):
    """The line of an arm in a figure."""

    colour: str
    dashes: Literal["-", "--", ":", "-."]  # of matplotlib


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Return the line of every arm: its mixer's colour, dashed differently where a mixer has several arms."""
    counts: dict[str, int] = {}
    styles = {}
    for arm in arms:
        colour = colour_of(split_arm(arm)[0])
        number = counts.setdefault(colour, int(colour == PLAIN))  # plain's grey is close to that of the identity
        styles[arm] = ArmStyle(colour, _DASHES[number % len(_DASHES)])
        counts[colour] += 1
    return styles


def curves_of(result: Result) -> dict[str, dict[int, dict[str, Curves]]]:
    """Return the curves of the runs that ended at each arm's best learning rate, by arm and seed."""
    return {
        row["arm"]: {run["seed"]: run["curves"] for run in best_runs(result["runs"], row["arm"]) if run["final"]}
        for row in result["summary"]
    }


def draw_comparison(result: Result, path: Path) -> Path:
    """Draw a comparison: four panels, means over seeds in bands of their 95 % intervals.

    The panels are the validation loss along training minus the baseline's with the same seed; the final loss by
    learning rate, or the gradient's norm where there is one rate; how much of the product of all skips has collapsed;
    and the final differences.
    """
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    runs = curves_of(result)
    styles = arm_styles(list(runs))
    baseline = next(iter(find_baselines(result)), None)
    for arm, own in runs.items():
        others = runs.get(baseline, {}) if baseline is not None and arm != baseline else {}
        pairs = [(own[seed]["validation"], others[seed]["validation"]) for seed in own if seed in others]
        pairs = [(mine, theirs) for mine, theirs in pairs if mine["step"] == theirs["step"]]
        if pairs:
            gaps = [np.subtract(mine["loss"], theirs["loss"]) for mine, theirs in pairs]
            _draw_band(axes[0], pairs[0][0]["step"], gaps, styles[arm])
        curves = [curve["mixing"] for curve in own.values() if curve["mixing"]]
        if curves:
            _draw_band(axes[2], curves[0]["step"], [curve["collapsed"] for curve in curves], styles[arm])
    axes[0].axhline(0, color="0.5", linewidth=1)
    axes[0].set(title=f"held-out loss minus that of {baseline}, paired by seed", xlabel="step", ylabel="difference")
    if any(len(row["rates"]) > 1 for row in result["summary"]):
        _draw_rates(axes[1], result, styles)
    else:
        for arm, own in runs.items():
            curves = [curve["train"] for curve in own.values()]
            if curves:
                norms = [curve["gradient_norm"] for curve in curves]
                _draw_band(axes[1], curves[0]["step"], norms, styles[arm], True)
        axes[1].set(title="norm of the gradient", xlabel="step", ylabel="norm", yscale="log")
    axes[2].set(title="singular values of ∏H below 0.1", xlabel="step", ylabel="share", ylim=(-0.02, 1.02))
    draw_differences(axes[3], result)
    handles = [Line2D([], [], color=style.colour, linewidth=2, linestyle=style.dashes) for style in styles.values()]
    figure.legend(handles, list(styles), loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    for axis in axes:
        axis.title.set_fontsize(10)
        finish_axes(axis)
    return save_figure(figure, path)


def _draw_rates(axis: Axes, result: Result, styles: dict[str, ArmStyle]) -> None:
    """Draw the loss at the first seed by learning rate; the best rate's dot is full."""
    rates: set[float] = set()
    for row in result["summary"]:
        points = [(float(rate), loss) for rate, loss in row["rates"].items() if loss is not None]
        rates.update(rate for rate, _ in points)
        style = styles[row["arm"]]
        axis.plot(*zip(*points), color=style.colour, linestyle=style.dashes, linewidth=1.5)
        for rate, loss in points:
            face = style.colour if rate == row["learning_rate"] else "white"
            axis.plot(rate, loss, "o", color=style.colour, markerfacecolor=face, markersize=5)
    axis.set(title="final loss by learning rate, first seed", xlabel="learning rate", ylabel="loss", xscale="log")
    axis.set_xticks(sorted(rates), [f"{rate:g}" for rate in sorted(rates)])


def find_band(curves: Any, as_factor: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean over seeds, and the lower and upper end of its 95 % interval.

    Args:
        curves: The values of each seed. [seeds, points]
        as_factor: Take the interval of the logarithms, so that the ends of what is positive are positive too.
    """
    values = np.array(curves, float)
    mean, spread = values.mean(0), np.log(np.maximum(values, 1e-300)) if as_factor else values
    if len(values) < 2:
        return mean, mean, mean
    reach = student_quantile(len(values) - 1) * spread.std(0, ddof=1) / len(values) ** 0.5
    return (mean, mean * np.exp(-reach), mean * np.exp(reach)) if as_factor else (mean, mean - reach, mean + reach)


def _draw_band(axis: Axes, steps: Sequence[float], curves: Any, style: ArmStyle, as_factor: bool = False) -> None:
    mean, low, high = find_band(curves, as_factor)
    axis.plot(steps, mean, color=style.colour, linewidth=1.5, linestyle=style.dashes)
    axis.fill_between(steps, low, high, color=style.colour, alpha=0.12, linewidth=0)


def draw_differences(axis: Axes, result: Result) -> None:
    """Draw the paired difference of every arm's final loss to the first baseline's, with its 95 % interval.

    The dot is full where the interval leaves zero out.
    """
    baseline = next(iter(find_baselines(result)), None)
    rows = [
        (row["arm"], mean, difference["interval"])
        for row in reversed(result["summary"])
        if (difference := row["differences"].get(baseline or "")) and (mean := difference["mean"]) is not None
    ]
    for height, (arm, mean, interval) in enumerate(rows):
        colour = colour_of(split_arm(arm)[0])
        clear = interval is not None and interval[0] * interval[1] > 0
        if interval is not None:
            axis.plot(interval, [height, height], color=colour, linewidth=2)
        axis.plot(mean, height, "o", color=colour, markerfacecolor=colour if clear else "white")
    axis.set_yticks(range(len(rows)), [row[0] for row in rows])
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set(
        title=f"final loss minus that of {baseline}, paired by seed",
        xlabel="difference of the loss, 95 % interval",
        ylim=(-0.6, max(1, len(rows)) - 0.4),
    )
