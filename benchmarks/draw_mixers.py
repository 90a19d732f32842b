"""Tables and figures of docs/results/which_mixer.md from the JSON files that `compare_mixers.py collect` wrote.

    python benchmarks/draw_mixers.py [--baseline identity] [--results benchmarks/results/mixers] [--to docs/results]

Prints a table for each comparison, and draws the language model's losses (which_mixer_language.png) and the paired
differences to the plain model in every comparison (which_mixer.png). It also writes the table that `jpmhc recommend`
shows, src/jpmhc/diagnose/measured.json. With another baseline it prints the tables alone.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from harness import RESULTS
from jpmhc import MIXERS
from jpmhc.experiments.comparison.statistics import compare_means, summarize
from jpmhc.report.charts import draw_figure
from jpmhc.report.comparison import draw_differences, format_table, make_charts
from jpmhc.report.style import save_figure

LOSSES = Path(__file__).parents[1] / "src" / "jpmhc" / "diagnose" / "measured.json"
TITLES = {
    "language": "language model, 27 million parameters",
    "language_second": "language model, second text and seed",
    "parts": "language model, one part changed",
    "prose": "language model on English prose",
    "large": "language model, 112 million parameters",
    "clock": "language model, 112 million parameters, by time",
    "bytes": "bytes read twice, 16 layers",
    "deep": "bytes, 48 layers",
    "sigmoid_gates": "sigmoid gates for all",
    "softmax_gates": "softmax matrices as gates for all",
    "matched": "equal parameters",
    "wide": "bytes, d = 384",
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
    for name in TITLES:
        if (path := arguments.results / f"{name}.json").exists():
            found[name] = read_result(path, arguments.baseline)
            print(f"### {name}\n\n{format_table(found[name])}\n")
    if arguments.baseline != "plain":
        return
    if "language" in found:
        print(f"wrote {write_losses(found['language'], LOSSES)}")
        print(f"wrote {draw_language(found['language'], arguments.to / 'which_mixer_language.png')}")
    charts = [
        dataclasses.replace(draw_differences(without_options(result)), title=TITLES[name])
        for name, result in found.items()
    ]
    heading = "held-out loss minus that of the plain model, 95 % interval over seeds; full dots: zero is outside"
    print(f"wrote {save_figure(draw_figure(charts, columns=3, heading=heading), arguments.to / 'which_mixer.png')}")


def read_result(path: Path, baseline: str) -> dict[str, Any]:
    """Read a stored comparison, whose runs have one learning rate, and subtract a mixer."""
    stored = json.loads(path.read_text())
    common = {"learning_rate": stored["settings"].get("lr"), "steps": stored["settings"].get("steps")}
    unknown = {"step_seconds": None, "tokens_per_second": None, "peak_bytes": None}
    runs = [{**unknown, **common, "arm": run.get("mixer"), **run} for run in stored["runs"]]
    mixers = stored["settings"].get("mixers") or list(dict.fromkeys(run["arm"] for run in runs))
    tests = compare_means(runs, tuple(mixers))
    return {
        "settings": stored["settings"],
        "summary": summarize(runs, mixers, (baseline,)),
        "equal_means": tests,
        "runs": runs,
    }


def without_options(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out the arms with options, whose plain model differs."""
    return {**result, "summary": [row for row in result["summary"] if ":" not in row["arm"]]}


def write_losses(result: dict[str, Any], path: Path) -> Path:
    """Write the table of losses minus plain that `recommend` shows."""
    rows = [row for row in result["summary"] if row["arm"] in MIXERS and "plain" in row["differences"]]
    count = max(len(row["seeds"]) for row in rows)
    seeds = "one seed" if count == 1 else f"up to {count} seeds"
    content = {
        "model": "a decoder of 27 million parameters with 16 connections, 59 million tokens of Python source, " + seeds,
        "command": "python benchmarks/compare_mixers.py train language",
        "minus_plain": {row["arm"]: round(row["differences"]["plain"]["mean"], 3) for row in rows},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def draw_language(result: dict[str, Any], path: Path) -> Path:
    """Draw the loss of the arms without options: minus plain along training, and at the end by learning rate."""
    _, differences, rates, *_ = make_charts(without_options(result))
    return save_figure(draw_figure([differences, rates], shared_legend=True), path)


if __name__ == "__main__":
    main()
