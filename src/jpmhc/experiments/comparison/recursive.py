"""Training the recursive model on a puzzle task for a comparison, with the training loop of `jpmhc train`."""

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from jpmhc.experiments.comparison.experiment import (
    Curves,
    Experiment,
    Job,
    Progress,
    Run,
    Show,
    Stop,
    Train,
    append_values,
    make_run,
    summarize_mixing,
    thin_curves,
)
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.learner import NonFiniteLoss
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.progress import Display

_SCORES = {"lm_loss": "loss", "exact_accuracy": "exact_accuracy", "token_accuracy": "token_accuracy"}


@dataclass(frozen=True)
class RecursiveExperiment(Experiment):
    """The recursive model, trained with every arm, learning rate and seed on one of the tasks `TASKS`."""

    run: TrainConfig = field(default_factory=TrainConfig)
    """The run that is repeated; its seed decides the initial weights, the puzzles and their order."""

    # Settings that a comparison decides itself, among them the folder of a run.
    decided: ClassVar = ("out", "resume", "stop_at", "seed", "device", "strategy", "keep", "checkpoint_every")

    def __post_init__(self) -> None:
        if self.run.model.streams < 2:
            raise ValueError("a comparison of mixers needs at least 2 streams")

    def settings(self) -> dict[str, object]:
        fields = json.loads(self.run.to_json())
        del fields["task"]["seed"], fields["model"]["mixer"], fields["lr"]
        return {name: value for name, value in fields.items() if name not in self.decided}

    def open(self, device: torch.device) -> Train:
        return partial(self.train, device)

    def train(self, device: torch.device, job: Job, folder: Path, stop: Stop, show: Show) -> Run | None:
        """Start one run, or resume it from its newest checkpoint; `stop` is ignored. See `Train`."""
        run = self.configure(job.arm)
        task = dataclasses.replace(run.task, seed=job.seed)
        config = dataclasses.replace(run, task=task, seed=job.seed, lr=job.learning_rate, keep=1, out=folder)
        began, diverged = time.monotonic(), None
        if checkpoint.list_folders(folder):
            begun = checkpoint.choose_checkpoint(folder, "intact")
        else:
            begun = None
            shutil.rmtree(folder, ignore_errors=True)  # the rest of a run without a checkpoint
        trainer = Trainer(config, World(0, 1, device), begun, _Progress(job, show))
        try:
            outcome = trainer.run()
        except NonFiniteLoss:
            diverged = trainer.learner.step
        else:
            if outcome.stopped:
                raise KeyboardInterrupt
        seconds = time.monotonic() - began
        learner, curves = trainer.learner, read_log(folder / "log.jsonl")
        data = trainer.task.fingerprint()
        return make_run(job, learner.core, device, data, learner.step, seconds, curves, diverged)


class _Progress(Display):
    """A progress display that hands each step to the comparison's display."""

    def __init__(self, job: Job, report: Show) -> None:
        super().__init__(speaks=False)
        self.job, self.report = job, report
        self.looked: tuple[int, float] | None = None

    def show(self, name: str, done: int, total: int, detail: str | None = None) -> None:
        if name == "step":
            now, pace = time.monotonic(), None
            if self.looked is not None and done > self.looked[0]:
                pace = (now - self.looked[1]) / (done - self.looked[0])
            self.looked = done, now
            self.report(self.job, Progress(done, total, None, pace))


def read_log(path: Path) -> dict[str, Curves]:
    """Return the training, validation and mixing curves from the log file of a run."""
    train: Curves = {}
    validation: Curves = {}
    mixing: Curves = {}
    for record in map(json.loads, path.read_text().splitlines()):
        step = record["step"]
        if record["kind"] == "train":
            append_values(train, step, {"loss": float(record["lm_loss"]), "norm": float(record["gradient_norm"])})
        elif record["kind"] == "evaluate":
            scores = {ours: record[name] for name, ours in _SCORES.items()}
            votes = {name: value for name, value in record.items() if name.startswith("pass@")}
            append_values(validation, step, {**scores, **votes})
        elif record["kind"] == "mixing":
            append_values(mixing, step, summarize_mixing(record))
    train = thin_curves(train["step"], loss=train["loss"], gradient_norm=train["norm"])
    return {"train": train, "validation": validation, "mixing": mixing}
