"""Measure how far two processes drift from one over fifty steps, in float32 and float64.

Writes docs/results/reliability.md:

    python benchmarks/check_distributed.py
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from harness import write_table
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import join_processes

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # for the tests, whose run this is

from tests.experiments.training.shared_run import STEPS, configuration  # noqa: E402

PAGE = ROOT / "docs" / "results" / "reliability.md"
CASES = [  # width, streams, learning rate, step of the frames
    (16, 2, 3e-3, 0.1),
    (16, 2, 1e-3, 0.1),
    (16, 2, 3e-4, 0.2),
    (16, 2, 3e-4, 2.0),
    (16, 2, 1e-4, 0.1),
    (32, 4, 1e-4, 0.1),
]
# Name of a column, strategy, type, parts of a rank's rows. DeepSpeed keeps float32 masters of float64 weights.
KINDS = [
    ("plain", "ddp", "float32", 1),
    ("plain", "ddp", "float64", 1),
    ("zero1", "zero1", "float32", 1),
    ("zero2", "zero2", "float32", 1),
    ("zero3", "zero3", "float32", 1),
]


def configure_run(
    out: Path, case: tuple[int, int, float, float], strategy: str, compute: str, parts: int
) -> TrainConfig:
    """Return the run of the tests with a case's sizes and rates."""
    dim, streams, lr, frame_lr = case
    run = configuration(out)
    model = replace(run.model, dim=dim, streams=streams, compute=compute)  # type: ignore[arg-type]
    changed = replace(run, model=model, lr=lr, frame_lr=frame_lr, accumulate=parts, checkpoint_every=STEPS)
    return replace(changed, strategy=strategy)  # type: ignore[arg-type]


def run_cases(folder: Path) -> None:
    """Run every case as one of the processes that torchrun started, or alone: then also with rows in two parts."""
    torch.set_num_threads(1)
    with join_processes("cpu") as world:
        kinds = KINDS if world.size > 1 else [KINDS[0], KINDS[1], ("parts", "ddp", "float32", 2)]
        for number, case in enumerate(CASES):
            for name, strategy, compute, parts in kinds:
                torch.set_default_dtype(getattr(torch, compute))
                out = folder / f"{world.size}-{name}-{compute}-{number}"
                Trainer(configure_run(out, case, strategy, compute, parts), world).run()


def read_losses(path: Path) -> list[float]:
    """Read the losses of a run from its log."""
    records = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if r["kind"] == "train"]


def format_drift(one: list[float], two: list[float]) -> str:
    """Write the largest difference between the losses of two runs."""
    largest = max(abs(a - b) for a, b in zip(one, two, strict=True))
    return f"{largest:.1e}" if largest else "0"


def list_drifts(folder: Path) -> list[str]:
    """Return the table of all cases."""
    lines = [
        "| width | streams | learning rate | frame step | replicas and one process | **in float64** | and two parts "
        "| ZeRO-1 and one process | ZeRO-2 | ZeRO-3 |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, case in enumerate(CASES):
        alone = {c: read_losses(folder / f"1-plain-{c}-{number}") for c in ("float32", "float64")}
        two = read_losses(folder / f"2-plain-float32-{number}")
        cells = [
            format_drift(alone["float32"], two),
            format_drift(alone["float64"], read_losses(folder / f"2-plain-float64-{number}")),
            format_drift(read_losses(folder / f"1-parts-float32-{number}"), two),
            *(format_drift(alone["float32"], read_losses(folder / f"2-zero{k}-float32-{number}")) for k in (1, 2, 3)),
        ]
        lines.append(f"| {' | '.join([*map(str, case), *cells])} |")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for start in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
            print("running", "two processes" if start else "one process", flush=True)
            subprocess.run([sys.executable, *start, __file__, name], check=True)
        write_table(PAGE, "processes", list_drifts(Path(name)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_cases(Path(sys.argv[1]))
    else:
        main()
