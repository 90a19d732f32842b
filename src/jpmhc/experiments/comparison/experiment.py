"""The interface between a comparison and the models that it trains: arms, jobs, runs, and experiments.

An arm is a text: a mixer, or the plain residual, and options, such as `cayley:streams=2,read=sigmoid`.

With the same seed every arm gets the same data in the same order, the same number of steps, and the same initial
weights outside its hyper-connections, unless the arm's options change them.
"""

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar, cast
from urllib.parse import quote

import torch
from torch import nn

from jpmhc import checks
from jpmhc.experiments.models.connections import ConnectionConfig, is_for_connections, read_basis
from jpmhc.experiments.training.log import describe_environment
from jpmhc.experiments.training.processes import World
from jpmhc.files import JsonObject
from jpmhc.mixers import MIXERS

PLAIN = "plain"  # the arm with plain residual connections; other arms have the mixers' names

Config = TypeVar("Config", bound=ConnectionConfig)
Settings = TypeVar("Settings")
Curves = dict[str, list[float]]

POINTS = 100  # most points of a training curve
_TAIL = 0.1  # the last tenth of a training curve is averaged to its final number


class Job(NamedTuple):
    """One training run of a comparison, done or not: an arm, a learning rate and a seed."""

    arm: str
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.arm} lr {self.learning_rate:g} seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The job's file name, without an extension."""
        arm = quote(self.arm, safe=":=,").replace(":", "+")  # a path in an option has slashes
        return f"{arm}-lr-{self.learning_rate:g}-seed-{self.seed}"


class Run(TypedDict):
    """The outcome of a job, ready to be written as JSON."""

    arm: str
    learning_rate: float
    seed: int
    steps: int
    parameters: int
    seconds: float  # of training, including measurements and compilation
    step_seconds: float | None  # median over the run; other processes on the machine may have slowed it down
    tokens_per_second: float | None
    peak_bytes: int | None  # of GPU memory
    diverged: int | None  # the step after which the loss was not finite; None if the run did not diverge
    final: dict[str, float]  # the curves' final values, including `loss`; empty if the run diverged
    curves: dict[str, Curves]  # `train`, `validation` and `mixing`, each with its own `step`
    environment: dict[str, object]  # device, versions, commit, command, data


class Progress(NamedTuple):
    """The progress of a run in training."""

    step: int
    steps: int
    loss: float | None = None
    step_seconds: float | None = None


Show = Callable[[Job, Progress], None]


Stop = Callable[[], bool]  # called every few steps; True interrupts the run
Train = Callable[[Job, Path, Stop, Show], Run | None]
"""A function that starts or resumes a job, calls `Show` with its progress, and returns its run, or None if `Stop`
interrupted the run. An interrupted run leaves a checkpoint in the folder, which the caller removes when the run is
finished."""


class Experiment(ABC):
    """The settings that all runs of a comparison share; subclasses are frozen dataclasses."""

    run: Any  # the settings that all runs repeat, with their learning rate `lr` and their `model`
    decided: ClassVar[tuple[str, ...]]  # settings of a run that arms cannot change
    plain_arms: ClassVar[tuple[str, ...]] = (PLAIN,)  # the arms without a mixer

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return all settings that decide a run's outcome except arm, learning rate and seed, ready for JSON."""

    def configure(self, arm: str) -> Any:
        """Return the settings of one arm's runs, in which the arm's options replace settings of the run or its model.

        Raises a ValueError for an arm that these settings cannot train.
        """
        mixer, options = self.split_arm(arm)
        fixed = {"preset", "task", "model", "lr", *self.decided}
        own = {f.name for f in dataclasses.fields(self.run)} & options.keys() - fixed
        run = change_settings(self.run, {name: options.pop(name) for name in own}, arm)
        return dataclasses.replace(run, model=change_settings(self.set_mixer(run.model, mixer), options, arm))

    def set_mixer(self, model: Any, mixer: str) -> Any:
        """Return the model's configuration with an arm's mixer; `configure` then applies the arm's options."""
        return configure_mixer(model, mixer)

    def check(self, arms: Sequence[str]) -> None:
        """Raise a ValueError for an arm that these settings cannot train."""
        for arm in arms:
            self.configure(arm)

    @classmethod
    def split_arm(cls, arm: str) -> tuple[str, dict[str, str]]:
        """Split an arm's text into its mixer and its options; raise a ValueError for an unknown mixer."""
        mixer, options = split_arm(arm)
        if ":" not in mixer:
            checks.choice(mixer, (*cls.plain_arms, *MIXERS), "mixer")
        return mixer, options

    def count_steps(self, arm: str) -> int:
        """Return the number of steps of an arm's runs."""
        return int(self.configure(arm).steps)

    @abstractmethod
    def open(self, device: torch.device) -> Train:
        """Load the data, and return a function that trains one job after the other in this process.

        The function may reuse a compiled model for the next job.
        """


def split_arm(arm: str) -> tuple[str, dict[str, str]]:
    """Split an arm's text into its mixer and its options.

    >>> split_arm("cayley:streams=2,read=sigmoid")
    ('cayley', {'streams': '2', 'read': 'sigmoid'})
    >>> split_arm("my_mixers:Shrinking:streams=2")
    ('my_mixers:Shrinking', {'streams': '2'})
    """
    parts = re.fullmatch(r"(.*?)(?::(\w+=.*))?", arm, re.DOTALL)
    assert parts is not None
    mixer, text = parts.groups(default="")
    options = dict(part.split("=", 1) for part in text.split(",") if part.count("=") == 1)
    if len(options) != (text.count(",") + 1 if text else 0) or mixer.partition(":")[0] in MIXERS.keys() - {mixer}:
        raise ValueError(f"the arm {arm!r} must be a mixer and options, such as cayley:streams=2,read=sigmoid")
    return mixer, options


def change_settings(settings: Settings, options: Mapping[str, str], arm: str) -> Settings:
    """Return a copy of a dataclass in which options replace fields.

    `options` has the fields' new values as text, such as {"streams": "2"}; error messages name the arm.
    """
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    changes = {}
    for name, text in options.items():
        field = name if name in fields else f"mixer_{name}"
        if field not in fields:
            raise ValueError(f"the arm {arm!r} has no option {name}: its options are {', '.join(fields)}")
        value: object = text
        if field == "mixer_basis":
            value = read_basis(Path(text))
        else:
            with suppress(ValueError):
                value = json.loads(text.lower())
        now = fields[field]
        if isinstance(now, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if now is not None and type(value) is not type(now):
            raise ValueError(f"{name} in the arm {arm!r} must be like {now}, not {checks.quote(text)}")
        changes[field] = value
    changed: Settings = dataclasses.replace(settings, **changes)  # type: ignore[type-var]
    if isinstance(settings, ConnectionConfig) and settings.plain and not cast(ConnectionConfig, changed).plain:
        raise ValueError(f"the arm {arm!r} is the plain model, which has no streams: name a mixer, such as identity")
    return changed


def sort_options(arm: str) -> str:
    """Return an arm's text with its options in alphabetical order, so that each arm has one text.

    >>> sort_options("cayley:streams=2,read=sigmoid")
    'cayley:read=sigmoid,streams=2'
    """
    mixer, options = split_arm(arm)
    return f"{mixer}:{','.join(f'{name}={options[name]}' for name in sorted(options))}" if options else arm


def configure_mixer(config: Config, mixer: str) -> Config:
    """Return a model's configuration with this mixer; "plain" resets the mixer, streams and connections to defaults."""
    if mixer != PLAIN:
        return dataclasses.replace(config, mixer=mixer)
    plain: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(config) if is_for_connections(f.name)}
    return dataclasses.replace(config, mixer=ConnectionConfig.mixer, streams=ConnectionConfig.streams, **plain)


def thin_curves(steps: Sequence[float], count: int = POINTS, **curves: Sequence[float]) -> Curves:
    """Split curves into at most `count` stretches, and return the last step and the mean value of each stretch.

    >>> thin_curves([1, 2, 3, 4, 5], 3, loss=[1.0, 3.0, 5.0, 7.0, 10.0])
    {'step': [2, 4, 5], 'loss': [2.0, 6.0, 10.0]}
    """
    size = max(1, -(-len(steps) // count))

    def cut(values: Sequence[float]) -> list[Sequence[float]]:
        return [values[start : start + size] for start in range(0, len(values), size)]

    means = {name: [sum(part) / len(part) for part in cut(values)] for name, values in curves.items()}
    return {"step": [part[-1] for part in cut(steps)], **means}


def append_values(curves: Curves, step: int, values: Mapping[str, float]) -> None:
    """Append the values at a step to the curves with the same names, and the step to the curve `step`."""
    for name, value in {"step": step, **values}.items():
        curves.setdefault(name, []).append(value)


def summarize_mixing(statistics: JsonObject) -> dict[str, float]:
    """Select the numbers that a comparison records from the result of `mixing_statistics`."""
    distances = statistics["distance_to_identity"].values()
    return {
        **statistics["product_singular_values"],
        "collapsed": statistics["product_collapsed"],
        "distance_to_identity": sum(distances) / len(distances),
    }


def make_run(
    job: Job,
    model: nn.Module,
    device: torch.device,
    data: str,
    steps: int,
    seconds: float,
    curves: dict[str, Curves],
    diverged: int | None = None,
    step_seconds: float | None = None,
    tokens_per_second: float | None = None,
) -> Run:
    """Return the outcome of a job that was trained on a device; `data` is the fingerprint of the training data."""
    return {
        "arm": job.arm,
        "learning_rate": job.learning_rate,
        "seed": job.seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens_per_second,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "diverged": diverged,
        "final": {} if diverged is not None else final_values(**curves),
        "curves": curves,
        "environment": {**describe_environment(World(0, 1, device)), "data": data},
    }


def final_values(train: Curves, validation: Curves, mixing: Curves) -> dict[str, float]:
    """Return the curves' final values; for noisy training curves, the mean of their last tenth."""
    last = {name: values[-1] for curves in (validation, mixing) for name, values in curves.items()}
    tail = {name: values[-max(1, round(_TAIL * len(values))) :] for name, values in train.items()}
    means = {name: sum(values) / len(values) for name, values in tail.items()}
    final = {**last, "train_loss": means["loss"], "gradient_norm": means["gradient_norm"]}
    return {name: value for name, value in final.items() if name != "step"}
