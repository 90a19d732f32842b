"""Tables and figures of docs/results/which_mixer.md from the JSON files that `compare_mixers.py collect` wrote.

    python benchmarks/draw_mixers.py [--baseline identity] [--results benchmarks/results/mixers] [--to docs/results]

Prints a table for each comparison, and draws the curves of the language model (which_mixer_language.png) and the paired
differences to the plain model in every comparison (which_mixer.png). With another baseline it prints the tables alone.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import f as f_distribution

from compare_mixers import COMPARISONS
from harness import RESULTS
from jpmhc import MIXERS
from jpmhc.experiments.comparison.statistics import summarize
from jpmhc.report.comparison import draw_comparison, format_table
from jpmhc.report.comparison import draw_differences as draw_comparison_differences
from jpmhc.report.style import finish_axes, save_figure

TITLES = {
    "language": "language model, 16 layers",
    "deep": "language model, 48 layers",
    "sigmoid_gates": "sigmoid gates for all",
    "softmax_gates": "softmax matrices as gates for all",
    "matched": "equal parameters",
    "wide": "language model, d = 384",
    "sudoku4": "Sudoku 4 × 4",
    "sudoku6": "Sudoku 6 × 6",
    "arc": "small tasks of ARC-AGI-1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "mixers")
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    parser.add_argument("--baseline", choices=("plain", *MIXERS), default="plain")
    arguments = parser.parse_args()
    found = {}
    for name in COMPARISONS:
        if (path := arguments.results / f"{name}.json").exists():
            found[name] = set_baseline(json.loads(path.read_text()), arguments.baseline)
            print(f"### {name}\n\n{format_table(found[name])}\n")
            for which, mixers in (("all models", found[name]["settings"]["mixers"]), ("mixers", MIXERS)):
                print(f"equal mean losses of {which}: p = {test_equal_means(found[name]['runs'], mixers):.3g}\n")
    if arguments.baseline != "plain":
        return
    if "language" in found:
        print(f"wrote {draw_comparison(found['language'], arguments.to / 'which_mixer_language.png')}")
    print(f"wrote {draw_differences(found, arguments.to / 'which_mixer.png')}")


def set_baseline(result: dict[str, Any], baseline: str) -> dict[str, Any]:
    """The result with the differences to another mixer."""
    settings = {**result["settings"], "baseline": baseline}
    return {**result, "settings": settings, "summary": summarize(result["runs"], settings["mixers"], baseline)}


def test_equal_means(runs: list[dict[str, Any]], mixers: Iterable[str]) -> float:
    """The p of an F test that all mixers have the same mean loss, with seeds as blocks; of seeds that all have."""
    losses: dict[str, dict[int, float]] = {mixer: {} for mixer in mixers}
    for run in runs:
        if run["mixer"] in losses and run["final"]:
            losses[run["mixer"]][run["seed"]] = run["final"]["loss"]
    trained = [each for each in losses.values() if len(each) > 1]
    seeds = set.intersection(*map(set, trained)) if trained else set()
    table = np.array([[each[seed] for seed in sorted(seeds)] for each in trained])  # [mixers, seeds]
    if table.ndim < 2 or min(table.shape) < 2:
        return float("nan")
    rows, columns = table.shape
    between = columns * ((table.mean(1) - table.mean()) ** 2).sum() / (rows - 1)
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    within = (rest**2).sum() / ((rows - 1) * (columns - 1))
    return float(f_distribution.sf(between / within, rows - 1, (rows - 1) * (columns - 1)))


def draw_differences(found: dict[str, dict[str, Any]], path: Path) -> Path:
    """Draw every mixer's paired difference of the loss to the baseline, a panel for each comparison."""
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (name, result) in zip(panels, found.items()):
        draw_comparison_differences(axis, result)
        settings, ended = result["settings"], len(result["runs"])
        asked = len(settings["mixers"]) * len(settings["seeds"])
        part = "" if ended == asked else f" ({ended} of {asked} runs)"
        axis.set_title(TITLES[name] + part, fontsize=11)
        axis.set_xlabel("")
        finish_axes(axis, most=5)
    for axis in panels[len(found) :]:
        axis.set_axis_off()
    label = "held-out loss minus that of the plain model, 95 % interval over seeds; full dots: zero is outside"
    figure.supxlabel(label, fontsize=10)
    return save_figure(figure, path)


if __name__ == "__main__":
    main()
