"""Training the ARC decoder for a comparison; after its training every run answers the test inputs."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from jpmhc.experiments.comparison.experiment import (
    PLAIN,
    Curves,
    Experiment,
    Job,
    Progress,
    Run,
    Show,
    Stop,
    Train,
    make_run,
)
from jpmhc.experiments.evaluation.decoding import SUBMISSIONS, score_decoder
from jpmhc.experiments.models.arc_decoder import ArcDecoderConfig
from jpmhc.experiments.training import arc_decoder
from jpmhc.experiments.training.arc_decoder import CHECKPOINT, PackedLoss, Training
from jpmhc.experiments.training.config import ArcDecoderRun
from jpmhc.experiments.training.progress import Display

_METRICS = {"lm_loss": "loss", "pass@1": "pass@1", "pass@2": "pass@2", "exact_accuracy": "exact_accuracy"}


@dataclass(frozen=True)
class ArcDecoderExperiment(Experiment):
    """The ARC decoder, trained with every arm, learning rate and seed on the same variants of the puzzles."""

    run: ArcDecoderRun = field(default_factory=lambda: ArcDecoderRun())
    """The run that is repeated; its seed decides the initial weights, the order of pairs and each epoch's variants."""

    # Settings that a comparison decides itself, or that do not change the outcome of a run.
    decided: ClassVar[tuple[str, ...]] = ("preset", "seed", "device", "out", "resume", "minutes")

    def settings(self) -> dict[str, object]:
        fields = json.loads(self.run.to_json())
        del fields["model"]["mixer"], fields["model"]["streams"], fields["lr"]
        # The puzzles' folder does not matter: each run records the fingerprint of the puzzles.
        for name in (*self.run.task.file_options, "version"):
            del fields["task"][name]
        fields["task"] = {"kind": "arc", **fields["task"]}
        return {name: value for name, value in fields.items() if name not in self.decided}

    def count_steps(self, arm: str) -> int:
        """Return the number of epochs; optimiser steps cannot be counted before the puzzles are read."""
        return int(self.configure(arm).epochs)

    def set_mixer(self, model: ArcDecoderConfig, mixer: str) -> ArcDecoderConfig:
        return super().set_mixer(model if mixer == PLAIN else dataclasses.replace(model, streams=4), mixer)

    def open(self, device: torch.device) -> Train:
        return ArcDecoderSession(self, device).train


class ArcDecoderSession:
    """One process that trains ARC decoders; consecutive runs of the same arm share a compiled model."""

    def __init__(self, experiment: ArcDecoderExperiment, device: torch.device) -> None:
        self.experiment, self.device = experiment, device
        self.arc = experiment.run.task.build()
        self.display = Display()
        self.arm: str | None = None
        self.compiled: PackedLoss | None = None
        self.answer_seconds = 0.0  # that the previous run's answers took

    def train(self, job: Job, folder: Path, stop: Stop, show: Show) -> Run | None:
        """Start or resume one run, train it to the end and score it; see `Train`."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        if job.arm != self.arm:
            self.arm, self.compiled = job.arm, None
            torch.compiler.reset()  # frees the previous arm's graphs
        run = dataclasses.replace(self.experiment.configure(job.arm), seed=job.seed, lr=job.learning_rate)
        training = Training(run, self.arc, self.device, self.compiled)
        self.compiled = training.loss
        checkpoint = folder / CHECKPOINT
        if checkpoint.exists():
            training.load(checkpoint)
        paces: list[float] = []

        def report(progress: arc_decoder.Progress) -> None:
            pace = None
            if progress.tokens_per_second:
                paces.append(progress.tokens_per_second)
                if progress.step > 1:
                    pace = (training.seconds / progress.share + self.answer_seconds) / run.epochs
            step = 1 if progress.step == 1 else max(progress.epoch, 1)
            show(job, Progress(step, run.epochs, progress.loss, pace))
            self.display.show(str(job), progress.epoch, run.epochs, arc_decoder.summarize(progress))

        training.train(stop, report, lambda: training.save(checkpoint))
        training.save(checkpoint)  # also in case answering is interrupted
        if not training.finished:
            return None
        self.display.finish(str(job))
        score = score_decoder(training.model, self.arc, run.evaluate_variants, 0, run.slots, self.display, stop)
        if score is None:
            return None
        self.display.say(f"{job}: {score.summarize()}")
        out, name = folder.parent.parent, f"{job.file_name}.json"
        score.write(out / "scores" / name, out / SUBMISSIONS / name)
        self.answer_seconds = score.seconds
        train: Curves = {"step": training.curves["epoch"]}
        train |= {name: training.curves[name] for name in ("loss", "gradient_norm", "seconds")}
        scores = {ours: float(score.metrics[name]) for name, ours in _METRICS.items()}
        scores |= {"answer_seconds": score.seconds, "answer_tokens_per_second": score.tokens_per_second}
        validation: Curves = {"step": [float(run.epochs)], **{name: [value] for name, value in scores.items()}}
        return make_run(
            job,
            training.model,
            self.device,
            self.arc.fingerprint(),
            training.step,
            training.seconds,
            {"train": train, "validation": validation, "mixing": {}},
            step_seconds=training.seconds / training.step,
            tokens_per_second=sorted(paces)[len(paces) // 2] if paces else None,
        )
