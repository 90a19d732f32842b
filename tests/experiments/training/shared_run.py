"""Two processes train the same small run under every strategy; started by test_distributed.py with torchrun."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World, join_processes

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS = 50


def configuration(out: Path) -> TrainConfig:
    """A run with puzzle vectors, Grassmann frames, clipping, decay, exploration and averaging."""
    return TrainConfig(
        task=ArcConfig(tasks=("25ff71a9", "a85d4709", "25d8a9c8"), augmentations=3, side=4, test_on="training"),
        model=RecursiveConfig(
            dim=32,
            heads=2,
            inner_multiple=16,
            puzzle_slots=2,
            h_cycles=2,
            l_cycles=1,
            halt_max_steps=3,
            halt_exploration=0.3,
            mixer="grassmann",
            streams=4,
            mixer_dynamic=False,
        ),
        steps=STEPS,
        batch=8,
        lr=1e-4,
        warmup=5,
        decay_at=(0.8,),
        decay_to=(0.3,),
        clip=1.0,
        frame_lr=0.1,
        ema=0.9,
        device="cpu",
        out=out,
        log_every=1,
        checkpoint_every=30,
        keep=10,
    )


def precise(out: Path) -> TrainConfig:
    """A run that multiplies differences by a million, for float64: rounding then still leaves nine digits."""
    config = configuration(out)
    model = dataclasses.replace(config.model, dim=16, streams=2, compute="float64")
    return dataclasses.replace(config, model=model, lr=3e-4, frame_lr=2.0)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Everything that is made inside has weights in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def run_all(folder: Path, world: World) -> None:
    """Every strategy; the stage that shards everything also goes on from a checkpoint."""
    for strategy in STRATEGIES:
        config = dataclasses.replace(configuration(folder / strategy), strategy=strategy)
        if strategy == "zero2":
            config = dataclasses.replace(config, accumulate=2)
        Trainer(config, world).run()
        if strategy == "zero3":
            resumed = dataclasses.replace(config, out=folder / "zero3-resumed")
            found = checkpoint.verify_checkpoint(config.out / "checkpoints" / "step-00000030")
            Trainer(resumed, world, found).run()
    with float64():
        Trainer(precise(folder / "precise"), world).run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_processes("cpu") as joined:
        run_all(Path(sys.argv[1]), joined)
