"""Training the recursive model on a puzzle task for a comparison, with the usual training loop."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from jpmhc.experiments.comparison.experiment import (
    Curves,
    Experiment,
    Job,
    Progress,
    Run,
    Session,
    Show,
    append_values,
    average_stretches,
    change_settings,
    configure_mixer,
    make_run,
    summarize_mixing,
)
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.learner import NonFiniteLoss
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.progress import Display

# Settings that a comparison decides itself, among them the folder of a run.
DECIDED = ("out", "resume", "stop_at", "seed", "device", "strategy", "keep", "checkpoint_every")
_SCORES = {"lm_loss": "loss", "exact_accuracy": "exact_accuracy", "token_accuracy": "token_accuracy"}


@dataclass(frozen=True)
class RecursiveExperiment(Experiment):
    """The recursive model, trained with every arm, learning rate and seed on a task of `TASKS`."""

    run: TrainConfig = field(default_factory=TrainConfig)
    """The run that is repeated; its seed decides the initial weights, the puzzles and their order."""

    def __post_init__(self) -> None:
        if self.run.model.streams < 2:
            raise ValueError("a comparison of mixers needs at least 2 streams")

    def settings(self) -> dict[str, object]:
        fields = json.loads(self.run.to_json())
        del fields["task"]["seed"], fields["model"]["mixer"], fields["lr"]
        return {name: value for name, value in fields.items() if name not in DECIDED}

    def default_rate(self) -> float:
        return self.run.lr

    def count_steps(self, arm: str) -> int:
        return self.run.steps

    def configure(self, arm: str) -> TrainConfig:
        """Return the settings of one arm's run; the arm's options change settings of the model."""
        mixer, options = self.split_arm(arm)
        return dataclasses.replace(
            self.run, model=change_settings(configure_mixer(self.run.model, mixer), options, arm)
        )

    def open(self, device: torch.device) -> Session:
        return RecursiveSession(self, device)


@dataclass(frozen=True)
class RecursiveSession:
    """One process that trains recursive models."""

    experiment: RecursiveExperiment
    device: torch.device

    def train(self, job: Job, folder: Path, stop: Callable[[], bool], show: Show) -> Run | None:
        """Start one run, or resume it from its newest checkpoint; `stop` is ignored. See `Session`."""
        run = self.experiment.configure(job.arm)
        task = dataclasses.replace(run.task, seed=job.seed)  # type: ignore[type-var]
        config = dataclasses.replace(run, task=task, seed=job.seed, lr=job.learning_rate, keep=1, out=folder)
        began, diverged = time.monotonic(), None
        if checkpoint.list_folders(folder):
            begun = checkpoint.find_checkpoint(folder, "intact")
        else:
            begun = None
            shutil.rmtree(folder, ignore_errors=True)  # the rest of a run without a checkpoint
        trainer = Trainer(config, World(0, 1, self.device), begun, _Progress(job, show))
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
        return make_run(job, learner.core, self.device, data, learner.step, seconds, curves, diverged)


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
    lines: dict[str, list[dict]] = {"train": [], "evaluate": [], "mixing": []}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        lines.setdefault(record["kind"], []).append(record)
    ends, losses = average_stretches([float(record["lm_loss"]) for record in lines["train"]])
    steps = [lines["train"][end - 1]["step"] for end in ends]
    norms = average_stretches([float(record["gradient_norm"]) for record in lines["train"]])[1]
    validation: Curves = {}
    mixing: Curves = {}
    for record in lines["evaluate"]:
        scores = {ours: record[name] for name, ours in _SCORES.items()}
        votes = {name: value for name, value in record.items() if name.startswith("pass@")}
        append_values(validation, record["step"], {**scores, **votes})
    for record in lines["mixing"]:
        append_values(mixing, record["step"], summarize_mixing(record))
    train: Curves = {"step": steps, "loss": losses, "gradient_norm": norms}
    return {"train": train, "validation": validation, "mixing": mixing}
