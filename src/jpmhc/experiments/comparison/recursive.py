"""Training the recursive model on a puzzle task for a comparison, through the usual training loop."""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jpmhc.experiments.comparison.curves import Curves, append_values, average_stretches, final_values, summarize_mixing
from jpmhc.experiments.comparison.experiment import Experiment, Run, Show, configure_mixer
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.environment import describe_environment
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.progress import Display
from jpmhc.experiments.training.step import NonFiniteLoss

# Settings that a comparison decides itself, or that say where a run lies and not what it does.
DECIDED = ("out", "resume", "seed", "device", "strategy", "keep", "checkpoint_every")
_SCORES = {"lm_loss": "loss", "exact_accuracy": "exact_accuracy", "token_accuracy": "token_accuracy"}


@dataclass(frozen=True)
class RecursiveExperiment(Experiment):
    """The recursive model on a task of the registry."""

    run: TrainConfig = field(default_factory=TrainConfig)
    """The run that is repeated with every mixer and seed; a seed also decides the puzzles and their order."""

    def __post_init__(self) -> None:
        if self.run.model.streams < 2:
            raise ValueError("a comparison of mixers needs at least 2 streams")

    def settings(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.run.to_json())
        del fields["task"]["seed"], fields["model"]["mixer"]
        return {name: value for name, value in fields.items() if name not in DECIDED}

    def check(self, mixers: Sequence[str]) -> None:
        for mixer in mixers:
            configure_mixer(self.run.model, mixer)

    def train(
        self, mixer: str, mixers: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, show: Show
    ) -> Iterator[Run]:
        for seed in seeds:
            out = folder / f"{mixer}-seed-{seed}"
            config = dataclasses.replace(
                self.run,
                model=configure_mixer(self.run.model, mixer),
                task=dataclasses.replace(self.run.task, seed=seed),  # type: ignore[type-var]
                seed=seed,
                keep=1,
                out=out,
            )
            began, diverged = time.monotonic(), None
            if checkpoint.list_folders(out):
                begun = checkpoint.find_checkpoint(out, "intact")
            else:
                begun = None
                shutil.rmtree(out, ignore_errors=True)  # of a run that was ended before its first checkpoint
            trainer = Trainer(config, World(0, 1, device), begun, _Progress(f"{mixer} seed {seed}", show))
            try:
                outcome = trainer.run()
            except NonFiniteLoss:
                diverged = trainer.learner.step
            else:
                if outcome.stopped:
                    raise KeyboardInterrupt
            train, validation, mixing = read_log(out / "log.jsonl")
            yield {
                "mixer": mixer,
                "seed": seed,
                "parameters": sum(p.numel() for p in trainer.learner.core.parameters()),
                "seconds": time.monotonic() - began,
                "diverged": diverged,
                "final": {} if diverged is not None else final_values(train, validation, mixing),
                "curves": {"train": train, "validation": validation, "mixing": mixing},
                "environment": {**describe_environment(World(0, 1, device)), "data": trainer.task.fingerprint()},
            }
            shutil.rmtree(out)


class _Progress(Display):
    """Hands the steps of a run on and shows nothing itself."""

    def __init__(self, run: str, report: Show) -> None:
        super().__init__(speaks=False)
        self.run, self.report = run, report

    def show(self, name: str, done: int, total: int, detail: str | None = None) -> None:
        if name == "step":
            self.report(self.run, done, total)


def read_log(path: Path) -> tuple[Curves, Curves, Curves]:
    """Read the curves of training, of validation and of the mixers from the log of a run."""
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "evaluate": [], "mixing": []}
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
    return {"step": steps, "loss": losses, "gradient_norm": norms}, validation, mixing
