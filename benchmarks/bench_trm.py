"""Measure training steps of the recursive model on random tokens: sequences per second and memory, by mixer.

One step is everything a training run does: refilling halted rows, the recursion, both losses, the backward pass,
AdamAtan2 on the weights, SignSGD on the touched rows of a full-size puzzle table, and the averaged weights.

    python benchmarks/bench_trm.py --device cuda --batch 192 --h-cycles 3 --l-cycles 4
    python benchmarks/bench_trm.py --device cuda --models plain cayley sinkhorn --attend cudnn
    python benchmarks/bench_trm.py --device cuda --models plain cayley sinkhorn --form paper --batch 96 --l-cycles 6
"""

import argparse
import dataclasses
import gc
import time
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from harness import write_csv
from jpmhc.connections import parameter_groups
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveModel, refill_rows
from jpmhc.optim import AdamAtan2, SignSGD

VOCABULARY, POOL = 12, 8


class Run:
    """A model with its optimisers and rows in flight."""

    def __init__(self, config: RecursiveConfig, batch: int, length: int, identifiers: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = RecursiveModel(config, VOCABULARY, length, identifiers).to(device)
        self.carry = self.model.empty_carry(batch, length)
        groups = parameter_groups(self.model.core, 0.1)
        self.adam = AdamAtan2([group for group in groups if group["params"]], 1e-4)
        self.sign = SignSGD(self.model.puzzles.parameters(), 1e-2, 0.1)
        self.averages = [p.detach().clone() for p in self.model.core.parameters()]
        self.update_averages = get_ema_multi_avg_fn(0.999)
        generator = torch.Generator(device).manual_seed(0)

        def tokens(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator, device=device)

        self.pool = [
            (tokens(VOCABULARY, batch, length), tokens(VOCABULARY, batch, length), tokens(identifiers, batch))
            for _ in range(POOL)
        ]
        self.minimum = torch.zeros(batch, dtype=torch.int32, device=device)
        self.number = 0

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Refill halted rows and return what the core is called with in the next step."""
        self.carry = refill_rows(self.carry, *self.pool[self.number % POOL])
        c = self.carry
        return (self.model.puzzles(c.identifiers), c.inputs, c.labels, c.z_h, c.z_l, c.steps, c.halted, self.minimum)

    def step(self) -> torch.Tensor:
        """Take one optimiser step; returns its loss, on the device."""
        out = self.model.core(*self.arguments())
        (out.loss / len(self.minimum)).backward()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.sign.step()
        self.sign.zero_grad(set_to_none=True)
        self.update_averages(self.averages, [p.data for p in self.model.core.parameters()], None)
        self.carry = self.carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)
        self.number += 1
        return out.loss.detach() / len(self.minimum)


def measure(name: str, config: RecursiveConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Time one model, after checking that the compiled step computes what the eager one does."""
    cuda = options.device == "cuda"
    run = Run(config, options.batch, options.length, options.identifiers, options.device)
    with torch.no_grad():
        expected = (run.model.core(*run.arguments()).loss / options.batch).item()
    if options.compile:
        run.model.core.compile(mode=options.mode)
    start = time.perf_counter()
    first = run.step().item()
    compile_seconds = time.perf_counter() - start
    if not abs(first - expected) < 2e-2 * abs(expected):
        raise SystemExit(f"{name}: the compiled step's loss is {first}, the eager one's {expected}: not timed")
    for _ in range(options.warm_up):
        run.step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(options.steps):
        loss = run.step()
    last = loss.item()  # waits for the device
    seconds = (time.perf_counter() - start) / options.steps
    if options.profile:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities if cuda else activities[:1]) as profile:
            run.step().item()
        print(
            profile.key_averages().table(
                sort_by=f"self_{options.device}_time_total", row_limit=30, max_name_column_width=90
            )
        )
    row = {
        "model": name,
        "sequences_per_second": round(options.batch / seconds, 1),
        "ms_per_step": round(seconds * 1e3, 2),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else "",
        "reserved_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else "",
        "parameters": sum(p.numel() for p in run.model.core.parameters()),
        "batch": options.batch,
        "h_cycles": config.h_cycles,
        "l_cycles": config.l_cycles,
        "compute": config.compute,
        "attend": config.attend,
        "kernels": config.kernels if not config.plain else "",
        "compile": options.mode if options.compile else "no",
        "compile_seconds": round(compile_seconds, 1),
        "first_loss": round(first, 5),
        "last_loss": round(last, 5),
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", default=["plain"], help="plain, or names of mixers")
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--identifiers", type=int, default=876_406)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--h-cycles", type=int, default=3)
    parser.add_argument("--l-cycles", type=int, default=4)
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--attend", nargs="+", default=["auto"], help="auto, cudnn, flash, efficient, math; one run each"
    )
    parser.add_argument("--kernels", choices=("auto", "fused", "reference"), default="auto")
    parser.add_argument("--form", choices=("exact", "paper"), default="exact", help="the mixers' settings")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--mode", default="default", help="mode of torch.compile")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the most expensive kernels of one step")
    parser.add_argument("--name", default="trm", help="stem of the CSV file")
    options = parser.parse_args()
    base = RecursiveConfig(
        dim=options.dim,
        heads=options.dim // 64,
        h_cycles=options.h_cycles,
        l_cycles=options.l_cycles,
        compute=options.compute,
    )
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in options.models:
        for attend in options.attend:
            change: dict[str, Any] = {}
            if name != "plain":
                change = {"mixer": name, "mixer_form": options.form, "streams": options.streams}
                change["kernels"] = options.kernels
            try:
                rows.append(measure(name, dataclasses.replace(base, attend=attend, **change), options))
            except RuntimeError as error:  # out of memory, or a kernel that does not compile: the others still count
                failed.append(f"{name} with attend={attend}")
                print(f"{failed[-1]} failed: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
            gc.collect()
            torch._dynamo.reset()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if rows:
        write_csv(options.name, rows, options.device)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
