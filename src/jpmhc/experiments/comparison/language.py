"""Training the byte-level decoder for a comparison."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.connections import parameter_groups
from jpmhc.experiments.comparison.curves import Curves, append_values, average_stretches, final_values, summarize_mixing
from jpmhc.experiments.comparison.experiment import Experiment, Run, Show, configure_mixer
from jpmhc.experiments.tasks.language.decoder import MULTIPLE, Decoder, DecoderConfig
from jpmhc.experiments.tasks.language.text import Text, cut_windows, read_library
from jpmhc.experiments.training.environment import describe_environment
from jpmhc.experiments.training.mixing import mixing_statistics
from jpmhc.experiments.training.processes import World

_COUNTS = ("batch", "steps", "evaluate_every", "validation_windows")


@dataclass(frozen=True)
class LanguageExperiment(Experiment):
    """A decoder that learns the bytes of Python's standard library."""

    model: DecoderConfig = field(default_factory=lambda: DecoderConfig(streams=4))
    """The decoder; its fields are options without a prefix."""
    batch: int = 32
    """Rows of a step."""
    steps: int = 500
    """Optimiser steps."""
    lr: float = 3e-3
    """Highest learning rate of AdamW; it rises linearly over the warm-up and falls to a tenth as a cosine."""
    warmup: int = 50
    """Steps over which the learning rate rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's moments."""
    weight_decay: float = 0.1
    """Decoupled weight decay; mixing logits and other vectors have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    match_parameters: bool = False
    """Widen the feed-forward layers until every model has as many parameters as the largest of the comparison."""
    evaluate_every: int = 100
    """Steps between measurements on validation bytes."""
    validation_windows: int = 512
    """Rows of validation bytes that are measured."""
    compile: Literal["no", "default", "reduce-overhead"] = "no"
    """Compile the training step, by torch.compile's mode; reduce-overhead replays CUDA graphs."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.at_least_one(getattr(self, name), name)
        for name in ("warmup", "weight_decay"):
            checks.inside(getattr(self, name), "[0, inf)", name)
        for name in ("lr", "clip"):
            checks.to_positive_number(getattr(self, name), name)
        for beta in self.betas:
            checks.inside(beta, "[0, 1)", "betas")
        if self.model.streams < 2:
            raise ValueError("a comparison of mixers needs at least 2 streams")

    def settings(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        del fields["model"]["mixer"]
        return {"task": {"kind": "language"}, **fields}

    def check(self, mixers: Sequence[str]) -> None:
        for mixer in mixers:
            self.configure(mixer)

    def configure(self, mixer: str, mixers: Sequence[str] = ()) -> DecoderConfig:
        """Return the decoder with a mixer, as large as the largest of several mixers where that is asked for."""
        config = configure_mixer(self.model, mixer)
        if not self.match_parameters or not mixers:
            return config
        missing = max(count_parameters(self.configure(other)) for other in mixers) - count_parameters(config)
        unit = 3 * config.dim * MULTIPLE  # parameters of the smallest widening: gate, up and down
        return dataclasses.replace(config, extra_inner=MULTIPLE * round(missing / unit))

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.55 + 0.45 * math.cos(math.pi * done)

    def train(
        self, mixer: str, mixers: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, show: Show
    ) -> Iterator[Run]:
        text, config = read_library(), self.configure(mixer, mixers)
        model = Decoder(config).to(device)
        run: Callable[[Tensor, Tensor], Tensor] = model
        if self.compile != "no":
            torch.compiler.reset()  # graphs of the mixer before
            run = torch.compile(model, mode=self.compile)
        for seed in seeds:
            # One model serves all seeds, so that it is compiled once.
            torch.manual_seed(seed)
            model.load_state_dict(Decoder(config).state_dict())
            yield {
                "mixer": mixer,
                "seed": seed,
                **self._train_seed(model, run, text, seed, f"{mixer} seed {seed}", show),
            }

    def _train_seed(
        self, model: Decoder, run: Callable[[Tensor, Tensor], Tensor], text: Text, seed: int, name: str, show: Show
    ) -> Run:
        device, length = model.tokens.device, model.config.length
        groups = parameter_groups(model, self.weight_decay)
        optimiser = torch.optim.AdamW(groups, self.lr, self.betas, fused=device.type == "cuda")
        training = text.training.to(device)
        starts = text.draw_starts(seed, self.steps, self.batch, length).to(device)
        history = torch.zeros(2, self.steps, device=device)  # loss, gradient norm
        validation: Curves = {}
        mixing: Curves = {}
        began, diverged = time.monotonic(), None
        for step in range(self.steps):
            for group in optimiser.param_groups:
                group["lr"] = self.lr * self.learning_rate_factor(step)
            if device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            loss = run(*cut_windows(training, starts[step], length))
            loss.backward()
            history[0, step] = loss.detach()
            history[1, step] = torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            done = step + 1
            show(name, done, self.steps)
            if done % self.evaluate_every == 0 or done == self.steps:
                append_values(validation, done, {"loss": self._validate(model, text)})
                if not math.isfinite(validation["loss"][-1]):
                    diverged = done
                    break
                if found := self._measure_mixing(model, text):
                    append_values(mixing, done, summarize_mixing(found))
        losses, norms = history[:, :done].tolist()
        ends, losses = average_stretches(losses)
        train: Curves = {"step": ends, "loss": losses, "gradient_norm": average_stretches(norms)[1]}
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": time.monotonic() - began,
            "diverged": diverged,
            "final": {} if diverged else final_values(train, validation, mixing),
            "curves": {"train": train, "validation": validation, "mixing": mixing},
            "environment": {**describe_environment(World(0, 1, device)), "text": text.fingerprint},
        }

    @torch.no_grad()
    def _validate(self, model: Decoder, text: Text) -> float:
        """Return the mean loss over the validation rows."""
        device, length = model.tokens.device, model.config.length
        starts = text.list_validation_starts(self.validation_windows, length).to(device)
        validation = text.validation.to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in starts.split(4 * self.batch):
            total += model(*cut_windows(validation, part, length)) * len(part)
        return float(total) / len(starts)

    def _measure_mixing(self, model: Decoder, text: Text, rows: int = 2) -> dict[str, Any]:
        """Measure the mixers on a few validation rows."""
        device, length = model.tokens.device, model.config.length
        starts = text.list_validation_starts(rows, length).to(device)
        batch = cut_windows(text.validation.to(device), starts, length)
        return mixing_statistics(model, lambda: model(*batch))


def count_parameters(config: DecoderConfig) -> int:
    """Count the parameters of a decoder without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())
