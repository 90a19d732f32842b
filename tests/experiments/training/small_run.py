"""A run of a second, for tests of the loop."""

import dataclasses
import json

import torch

from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World

SMALL = TrainConfig(
    task=SudokuConfig(puzzles=40, test_puzzles=10),
    model=RecursiveConfig(
        dim=16,
        heads=2,
        inner_multiple=16,
        puzzle_slots=2,
        h_cycles=2,
        l_cycles=1,
        halt_max_steps=3,
        halt_exploration=0.4,
    ),
    steps=4,
    batch=8,
    lr=1e-3,
    warmup=2,
    clip=1.0,
    ema=0.9,
    device="cpu",
    log_every=1,
)


def small(out, **change):
    """The small run in a folder, with changes; `model` takes a dictionary of changes."""
    model = dataclasses.replace(SMALL.model, **change.pop("model", {}))
    return dataclasses.replace(SMALL, out=out, model=model, **change)


def trained(config, resume=None):
    """The run, done."""
    trainer = Trainer(config, World(0, 1, torch.device("cpu")), resume)
    trainer.run()
    return trainer


def losses(folder):
    """The losses in the log of a run, by step."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
