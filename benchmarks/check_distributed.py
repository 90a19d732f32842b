"""How far two processes drift from one over fifty steps, in float32 and float64. Writes docs/results/distributed.md.

python benchmarks/check_distributed.py
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from jpmhc.trm.training.config import TrainConfig
from jpmhc.trm.training.distributed import join
from jpmhc.trm.training.loop import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.trm.training import shared_run

PAGE = Path(__file__).parent.parent / "docs" / "results" / "distributed.md"
STEPS = 50
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


def configuration(
    out: Path, case: tuple[int, int, float, float], strategy: str, compute: str, parts: int
) -> TrainConfig:
    """The suite's run, of another size and with other rates."""
    dim, streams, lr, frame_lr = case
    run = shared_run.configuration(out)
    model = dataclasses.replace(run.model, dim=dim, streams=streams, compute=compute)  # type: ignore[arg-type]
    return dataclasses.replace(
        run,
        model=model,
        steps=STEPS,
        accumulate=parts,
        lr=lr,
        frame_lr=frame_lr,
        strategy=strategy,  # type: ignore[arg-type]
    )


def work(folder: Path) -> None:
    """Every case as one of the processes that torchrun started, or alone: then also with rows in two parts."""
    torch.set_num_threads(1)
    with join("cpu") as world:
        kinds = KINDS if world.size > 1 else [KINDS[0], KINDS[1], ("parts", "ddp", "float32", 2)]
        for number, case in enumerate(CASES):
            for name, strategy, compute, parts in kinds:
                torch.set_default_dtype(getattr(torch, compute))
                out = folder / f"{world.size}-{name}-{compute}-{number}"
                Trainer(configuration(out, case, strategy, compute, parts), world).run()


def losses(path: Path) -> list[float]:
    records = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if r["kind"] == "train"]


def drift(one: list[float], two: list[float]) -> str:
    largest = max(abs(a - b) for a, b in zip(one, two, strict=True))
    return f"{largest:.1e}" if largest else "0"


def page(folder: Path) -> str:
    lines = [
        *("# Two processes against one", "", "    python benchmarks/check_distributed.py", ""),
        f"Largest difference of the loss over {STEPS} steps on the CPU (gloo), of a small run with Grassmann frames,",
        "puzzle vectors, clipping and exploration. Two replicas equal one process that takes its rows in two parts",
        "*to the bit*; a whole batch is added up in another order.",
        "",
        "| width | streams | learning rate | frame step | replicas and one process | **in float64** | and two parts "
        "| ZeRO-1 and one process | ZeRO-2 | ZeRO-3 |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, case in enumerate(CASES):
        alone = {c: losses(folder / f"1-plain-{c}-{number}") for c in ("float32", "float64")}
        two = losses(folder / f"2-plain-float32-{number}")
        cells = [
            drift(alone["float32"], two),
            drift(alone["float64"], losses(folder / f"2-plain-float64-{number}")),
            drift(losses(folder / f"1-parts-float32-{number}"), two),
            *(drift(alone["float32"], losses(folder / f"2-zero{k}-float32-{number}")) for k in (1, 2, 3)),
        ]
        lines.append(f"| {' | '.join([*map(str, case), *cells])} |")
    lines += [
        "",
        "In float64 the differences are less than 1e-8 of those in float32 in every row: what is seen in float32 is",
        "rounding, which training multiplies, by a million where the frames take steps of 2.0. A fault (a row counted",
        "twice, a gradient not reduced) would not depend on the precision. ZeRO cannot be run in float64, as DeepSpeed",
        "keeps float32 masters; its differences are of the replicas' size in every row.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        for start in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
            print("running", "two processes" if start else "one process", flush=True)
            subprocess.run([sys.executable, *start, __file__, name], check=True)
        PAGE.write_text(page(Path(name)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]))
    else:
        main()
