"""Training a language model on text for a comparison."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from jpmhc import checks
from jpmhc.checks import Count, Decay, NonNegative, Positive
from jpmhc.connections import parameter_groups
from jpmhc.diagnose import diagnose
from jpmhc.diagnose.record import Recording, find_layers, record_layers
from jpmhc.diagnose.watch import summarise_calls
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
    append_values,
    configure_mixer,
    make_run,
    summarize_mixing,
    thin_curves,
)
from jpmhc.experiments.models.decoder import MULTIPLE, Decoder, DecoderConfig, count_parameters
from jpmhc.experiments.tasks.language import cut_rows, draw_rows, read_manifest, read_tokens, refuse_second_reading
from jpmhc.experiments.training.mixing import mixing_statistics
from jpmhc.files import replacing
from jpmhc.mixers import MIXERS

WIDE, LONG = f"{PLAIN}-wide", f"{PLAIN}-long"
_LOOK = 20  # steps between checks of the clock and of the loss, which wait for the device
_SAVE_SECONDS = 300.0  # between checkpoints
_MIXING_ROWS = 2
# The names of the numbers of `watch` in the records of a comparison.
_STREAMS = {
    "geometric_mean": "skips/geometric_mean",
    "direct_path": "skips/direct_path",
    "similarity": "similarity",
    "dominance": "dominance",
    "effective_rank": "effective_rank",
    "mean_gain": "signal_gain/mean",
    "largest_gain": "signal_gain/largest",
}


@dataclass(frozen=True)
class LanguageExperiment(Experiment):
    """A decoder that is trained on text."""

    tokens: Path = Path("out/tokens")  # Folder with the tokens of the text.
    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(streams=4))
    """The decoder; its fields are options without the prefix "model."."""
    batch: Count = 32  # Rows per step.
    steps: Count = 1800  # Optimiser steps.
    epochs: Count = 1  # Number of times that training may read each token.
    lr: Positive = 2e-3
    """Highest learning rate, unless the comparison names others. The rate rises linearly during the warm-up and then
    falls to a tenth along a cosine."""
    warmup: Annotated[int, "[0, inf)"] = 200  # Number of steps in which the learning rate rises.
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimiser of the matrices in attention and feed-forward layers; all other parameters have AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # Decay of AdamW's moments.
    weight_decay: NonNegative = 0.1  # Decoupled weight decay of matrices; mixing logits and other vectors do not decay.
    decay_everything: bool = False  # Whether mixing logits and other vectors decay, too.
    clip: Positive = 1.0  # Norm to which larger gradients are clipped.
    time_factor: Positive = 1.5
    """Steps of the arm plain-long for each step of the other arms. Choose the time of a step with streams divided by
    the time of a plain step."""
    evaluate_every: Count = 300  # Steps between measurements on validation text.
    validation_rows: Count = 256  # Rows of validation text for each measurement during training.
    final_validation_rows: Count = 2048  # Rows of validation text for the measurement at the end.
    diagnose_seconds: NonNegative = 0.0
    """Seconds for measuring the Jacobian of each trained decoder on one row of validation text; 0: not measured."""
    compile: Literal["auto", "no", "default", "reduce-overhead"] = "auto"
    """Mode of torch.compile; auto means default on CUDA and no elsewhere."""

    decided: ClassVar[tuple[str, ...]] = ("tokens", "betas", "compile")
    plain_arms: ClassVar[tuple[str, ...]] = (PLAIN, WIDE, LONG)

    @property
    def run(self) -> "LanguageExperiment":
        """This experiment itself, whose fields are also the settings that all runs repeat (see `Experiment`)."""
        return self

    def __post_init__(self) -> None:
        checks.fields(self)
        checks.choice(self.optimizer, ("adamw", "muon"), "optimizer")

    def settings(self) -> dict[str, object]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("tokens", "lr")}
        model = dataclasses.asdict(self.model)
        del model["mixer"], model["vocabulary"]
        manifest = dataclasses.asdict(read_manifest(self.tokens))
        return {"task": {"kind": "language"}, **fields, "model": model, "text": manifest}

    def check(self, arms: Sequence[str]) -> None:
        if self.model.streams < 2:
            raise ValueError("a comparison of mixers needs at least 2 streams")
        available = (read_manifest(self.tokens).training - 1) // self.model.length
        for arm in arms:
            own = self.configure(arm)
            refuse_second_reading(available, own.steps, own.batch, own.model.length, own.epochs)

    def configure(self, arm: str) -> "LanguageExperiment":
        run: LanguageExperiment = super().configure(arm)
        if self.split_arm(arm)[0] == LONG:
            return dataclasses.replace(run, steps=round(run.steps * run.time_factor))
        return run

    def set_mixer(self, model: DecoderConfig, mixer: str) -> DecoderConfig:
        model = dataclasses.replace(model, vocabulary=read_manifest(self.tokens).vocabulary)
        return _widen(model) if mixer == WIDE else configure_mixer(model, PLAIN if mixer == LONG else mixer)

    def open(self, device: torch.device) -> Train:
        return LanguageSession(self, device).train

    def rate_factor(self, step: int) -> float:
        """Return the learning rate's factor at a step: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * done)

    def make_optimizers(self, model: Decoder, rate: float) -> list[torch.optim.Optimizer]:
        """Return AdamW for all parameters or, if chosen, Muon for hidden matrices and AdamW for the others."""
        fused = model.tokens.is_cuda
        groups = parameter_groups(model, self.weight_decay)
        if self.decay_everything:
            groups[1]["weight_decay"] = self.weight_decay
        if self.optimizer == "adamw":
            return [torch.optim.AdamW(groups, rate, self.betas, fused=fused)]
        matrices = model.hidden_matrices()
        hidden = {id(p) for p in matrices}
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in hidden]} for group in groups]
        muon = torch.optim.Muon(matrices, rate, self.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(rest, rate, self.betas, fused=fused)]


def _widen(config: DecoderConfig) -> DecoderConfig:
    """Return a plain decoder whose feed-forward layers are wider.

    It has about as many parameters as the decoder with the mixer that has the most parameters.
    """
    plain = configure_mixer(config, PLAIN)
    largest = max(count_parameters(configure_mixer(config, mixer)) for mixer in MIXERS)
    unit = (3 if plain.feed_forward == "swiglu" else 2) * plain.dim  # parameters per inner feature
    extra = MULTIPLE * round((largest - count_parameters(plain)) / unit / MULTIPLE)
    return dataclasses.replace(plain, extra_inner=extra)


PRESETS = {
    "tiny": LanguageExperiment(
        model=DecoderConfig(dim=64, layers=4, heads=4, length=128, streams=4),
        batch=16,
        steps=150,
        warmup=20,
        lr=3e-3,
        evaluate_every=50,
        validation_rows=32,
        final_validation_rows=128,
    ),
    "27m": LanguageExperiment(model=DecoderConfig(dim=384, layers=8, heads=6, streams=4, compute="bfloat16")),
    "112m": LanguageExperiment(
        model=DecoderConfig(dim=768, layers=12, heads=12, streams=4, compute="bfloat16"),
        steps=4600,
        lr=1e-3,
        evaluate_every=500,
    ),
}


class LanguageSession:
    """One process that trains decoders; consecutive runs of the same arm share a compiled model."""

    def __init__(self, experiment: LanguageExperiment, device: torch.device) -> None:
        self.experiment, self.device = experiment, device
        self.tokens = read_tokens(experiment.tokens)
        self.training = self.tokens.training.to(device)
        self.validation = self.tokens.validation.to(device)
        self.arm: str | None = None
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")

    def train(self, job: Job, folder: Path, stop: Stop, show: Show) -> Run | None:
        """Start or resume one run; see `Train`."""
        if job.arm != self.arm:
            self._build(job.arm)
        return _Training(self, job, folder).run(stop, show)

    def _build(self, arm: str) -> None:
        self.arm = None
        self.settings = self.experiment.configure(arm)
        self.model = Decoder(self.settings.model).to(self.device)
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.model
        mode = self.settings.compile
        if mode == "auto":
            mode = "default" if self.device.type == "cuda" else "no"
        if mode != "no":
            torch.compiler.reset()  # frees the previous arm's graphs
            self.loss = torch.compile(self.model, mode=mode, dynamic=False)
        self.arm = arm


class _Training:
    """The training of one run in a session."""

    def __init__(self, session: LanguageSession, job: Job, folder: Path) -> None:
        self.session, self.job, self.checkpoint = session, job, folder / "checkpoint.pt"
        self.settings, self.model, self.device = session.settings, session.model, session.device
        torch.manual_seed(job.seed)
        self.model.load_state_dict(Decoder(self.settings.model).state_dict())
        self.model.zero_grad(set_to_none=True)
        self.optimizers = self.settings.make_optimizers(self.model, job.learning_rate)
        self.step, self.seconds, self.saved = 0, 0.0, time.monotonic()
        self.history = torch.zeros(2, self.settings.steps, device=self.device)  # loss, gradient norm
        self.validation: Curves = {}
        self.mixing: Curves = {}
        self.paces: list[float] = []
        if self.checkpoint.exists():
            self._load()

    def run(self, stop: Stop, show: Show) -> Run | None:
        settings, length = self.settings, self.settings.model.length
        available = self.session.tokens.count_rows(length)
        starts = draw_rows(available, settings.steps * settings.batch, length, self.job.seed)
        starts = starts.view(settings.steps, settings.batch).to(self.device)
        began, diverged = time.monotonic() - self.seconds, None
        looked, looked_step = time.monotonic(), self.step
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        while self.step < settings.steps:
            self._take_step(*cut_rows(self.session.training, starts[self.step], length))
            last = self.step == settings.steps
            evaluates = last or self.step % settings.evaluate_every == 0
            if self.step % _LOOK == 0 or evaluates or self.step == 1:
                loss = self.history[0, self.step - 1].item()  # waits for the device
                now = time.monotonic()
                pace = (now - looked) / (self.step - looked_step)
                looked, looked_step = now, self.step
                if self.step > 1:
                    self.paces.append(pace)
                show(self.job, Progress(self.step, settings.steps, loss, pace))
                if not math.isfinite(loss):
                    diverged = self.step
                    break
            if evaluates:
                self._evaluate(settings.final_validation_rows if last else settings.validation_rows)
                looked = time.monotonic()
                if not math.isfinite(self.validation["loss"][-1]):
                    diverged = self.step
                    break
            self.seconds = time.monotonic() - began
            if not last and self.step % _LOOK == 0:
                if stop():
                    self._save()
                    return None
                if time.monotonic() - self.saved > _SAVE_SECONDS:
                    self._save()
        return self._describe(diverged)

    def _take_step(self, inputs: Tensor, labels: Tensor) -> None:
        factor = self.settings.rate_factor(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.job.learning_rate * factor
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.session.loss(inputs, labels)
        loss.backward()
        self.history[0, self.step] = loss.detach()
        self.history[1, self.step] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1

    @torch.no_grad()
    def _evaluate(self, rows: int) -> None:
        """Append the loss and mixing statistics on validation rows to the curves; the model runs uncompiled."""
        length = self.settings.model.length
        starts = self.session.tokens.validation_rows(rows, length).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in starts.split(self.settings.batch):
            total += self.model(*cut_rows(self.session.validation, part, length)) * len(part)
        append_values(self.validation, self.step, {"loss": float(total) / len(starts)})
        few = cut_rows(self.session.validation, starts[:_MIXING_ROWS], length)
        if statistics := mixing_statistics(self.model, lambda: self.model(*few)):
            numbers = summarize_mixing(statistics)
            with record_layers(self.model, find_layers(self.model), Recording()) as recording:
                self.model(*few)
            if recording.calls:  # a decoder with delayed reads has none
                streams = summarise_calls(recording.calls)
                numbers |= {name: streams[own] for name, own in _STREAMS.items()}
            append_values(self.mixing, self.step, numbers)

    def _describe(self, diverged: int | None) -> Run:
        losses, norms = self.history[:, : self.step].tolist()
        train = thin_curves([float(step + 1) for step in range(self.step)], loss=losses, gradient_norm=norms)
        pace = sorted(self.paces)[len(self.paces) // 2] if self.paces else None
        run = make_run(
            self.job,
            self.model,
            self.device,
            self.session.tokens.manifest.fingerprint,
            self.step,
            self.seconds,
            {"train": train, "validation": self.validation, "mixing": self.mixing},
            diverged,
            pace,
            self.settings.batch * self.settings.model.length / pace if pace else None,
        )
        if self.settings.diagnose_seconds and diverged is None:
            run["final"] |= self._diagnose()
        return run

    def _diagnose(self) -> dict[str, float]:
        """Measure the Jacobian of all layers, from the embeddings of one validation row to the head's input.

        `jacobian_lost` is the share of singular values below a tenth of the typical singular value, `jacobian_grown`
        the share above ten times the typical singular value.
        """
        length = self.settings.model.length
        inputs, _ = cut_rows(self.session.validation, self.session.tokens.validation_rows(1, length), length)
        x = F.embedding(inputs, self.model.tokens.detach())
        found = diagnose(self.model.network, x, seconds=self.settings.diagnose_seconds, say=None)
        typical, gradients = found.whole.typical(), [layer.gradient for layer in found.layers]
        numbers = {
            "jacobian_lost": found.whole.below(0.1 * typical),
            "jacobian_grown": found.whole.above(10 * typical),
            "jacobian_largest": found.whole.largest / typical,
        }
        if gradients:  # layers with delayed reads are not measured
            numbers["layer_gradients_spread"] = max(gradients) / min(gradients)
        return numbers

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "history": self.history,
            "progress": (self.step, self.seconds, self.validation, self.mixing, self.paces),
        }
        with replacing(self.checkpoint) as file:
            torch.save(state, file)
        self.saved = time.monotonic()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(own)
        self.history = state["history"]
        self.step, self.seconds, self.validation, self.mixing, self.paces = state["progress"]
