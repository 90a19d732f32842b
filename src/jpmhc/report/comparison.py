"""A comparison of mixers as a table and as a figure, from what `comparison.json` holds."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jpmhc.experiments.comparison.statistics import student_quantile
from jpmhc.report.style import PLAIN, colour_of, finish_axes, save_figure


def format_table(result: dict[str, Any]) -> str:
    """Write a comparison as a table in Markdown: means with standard errors, paired differences with 95 % intervals."""
    titles, *rows = table_rows(result)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table_rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the cells of that table, the heading first."""
    baseline = result["settings"]["baseline"]
    accuracy = any("exact_accuracy" in row["metrics"] for row in result["summary"])
    titles = ["mixer", "runs", "parameters", "loss", f"difference to {baseline}", "95 % interval"]
    titles += ["exactly solved"] * accuracy + ["gradient norm", "∏H collapsed", "seconds"]
    return [titles, *(_format_row(row, accuracy) for row in result["summary"])]


def _format_row(row: dict[str, Any], accuracy: bool) -> list[str]:
    metrics = row["metrics"]
    loss = metrics.get("loss", {})
    interval = loss.get("interval")
    cells = [
        row["mixer"],
        f"{row['runs']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
        f"{row['parameters']:,}",
        _format_mean(loss, ".4f"),
        "–" if loss.get("difference") is None else f"{loss['difference']:+.4f}",
        "–" if interval is None else f"{interval[0]:+.4f} … {interval[1]:+.4f}",
    ]
    if accuracy:
        cells.append(_format_mean(metrics.get("exact_accuracy", {}), ".1%"))
    cells.append(_format_mean(metrics.get("gradient_norm", {}), ".3g"))
    cells.append(_format_mean(metrics.get("collapsed", {}), ".1%"))
    return [*cells, f"{row['seconds']:.0f}"]


def _format_mean(metric: dict[str, Any], form: str) -> str:
    if metric.get("mean") is None:
        return "–"
    error = metric["standard_error"]
    return f"{metric['mean']:{form}}" + ("" if error is None else f" ± {error:{form}}")


def draw_comparison(result: dict[str, Any], path: Path) -> Path:
    """Draw a comparison: four panels, means over seeds in bands of their 95 % intervals.

    The panels are the validation loss along training minus the baseline's with the same seed, the gradient's norm, how
    much of the product of all skips has collapsed, and the final differences.
    """
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    baseline = result["settings"]["baseline"]
    mixers = [row["mixer"] for row in result["summary"]]
    colours = {mixer: colour_of(mixer) for mixer in mixers}
    runs = {(run["mixer"], run["seed"]): run["curves"] for run in result["runs"] if run["final"]}
    for mixer in mixers:
        own = {seed: curves for (which, seed), curves in runs.items() if which == mixer}
        pairs = [
            (own[seed]["validation"], runs[baseline, seed]["validation"]) for seed in own if (baseline, seed) in runs
        ]
        if mixer != baseline and pairs:
            gaps = [np.subtract(mine["loss"], theirs["loss"]) for mine, theirs in pairs]
            _draw_band(axes[0], pairs[0][0]["step"], gaps, mixer, colours[mixer])
        for axis, group, name in ((axes[1], "train", "gradient_norm"), (axes[2], "mixing", "collapsed")):
            curves = [curve[group] for curve in own.values() if curve[group]]
            if curves:
                values = [curve[name] for curve in curves]
                _draw_band(axis, curves[0]["step"], values, mixer, colours[mixer], name == "gradient_norm")
    axes[0].axhline(0, color="0.5", linewidth=1)
    axes[0].set(title=f"held-out loss minus that of {baseline}, paired by seed", xlabel="step", ylabel="difference")
    axes[1].set(title="norm of the gradient", xlabel="step", ylabel="norm", yscale="log")
    axes[2].set(title="singular values of ∏H below 0.1", xlabel="step", ylabel="share", ylim=(-0.02, 1.02))
    draw_differences(axes[3], result)
    axes[3].set_title(f"final loss minus that of {baseline}, paired by seed")
    handles = [Line2D([], [], color=one, linewidth=2, linestyle=_dashes(one)) for one in colours.values()]
    figure.legend(handles, mixers, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    for axis in axes:
        axis.title.set_fontsize(10)
        finish_axes(axis)
    return save_figure(figure, path)


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


def _draw_band(axis: Axes, steps: list[int], curves: Any, label: str, colour: Any, as_factor: bool = False) -> None:
    mean, low, high = find_band(curves, as_factor)
    axis.plot(steps, mean, label=label, color=colour, linewidth=1.5, linestyle=_dashes(colour))
    axis.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)


def _dashes(colour: str) -> Literal["--", "-"]:
    """Return the style of a line: the plain model's is dashed, as its grey is close to that of the identity."""
    return "--" if colour == PLAIN else "-"


def draw_differences(axis: Axes, result: dict[str, Any]) -> None:
    """Draw the paired difference of the final loss of every mixer, with its 95 % interval.

    The dot is full where the interval leaves zero out.
    """
    rows = [row for row in result["summary"] if row["metrics"].get("loss", {}).get("difference") is not None]
    for height, row in enumerate(reversed(rows)):
        loss, colour = row["metrics"]["loss"], colour_of(row["mixer"])
        clear = bool(loss["interval"]) and loss["interval"][0] * loss["interval"][1] > 0
        if loss["interval"]:
            axis.plot(loss["interval"], [height, height], color=colour, linewidth=2)
        axis.plot(loss["difference"], height, "o", color=colour, markerfacecolor=colour if clear else "white")
    axis.set_yticks(range(len(rows)), [row["mixer"] for row in reversed(rows)])
    axis.axvline(0, color="0.5", linewidth=1)
    axis.set(xlabel="difference of the loss, 95 % interval", ylim=(-0.6, len(rows) - 0.4))
