"""The configurations of training runs, and the comparison of two configurations when a run is resumed."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jpmhc import checks
from jpmhc.checks import Count, Decay, NonNegative, Positive, Share
from jpmhc.experiments.models.arc_decoder import ArcDecoderConfig
from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks import TASKS, counter, kind_of
from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.tasks.counter import Seed
from jpmhc.experiments.tasks.task import TaskConfig
from jpmhc.experiments.training.processes import PATIENCE
from jpmhc.files import parse_json

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
Preset = Literal["paper", "trm", "arc-small", "laptop"]

_ELSEWHERE = {"out", "resume", "stop_at"}  # settings of one command, not of the run
_BINDING = ("task.", "model.", "batch", "seed")  # settings that must not change when a checkpoint is resumed


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run of the recursive model."""

    preset: Preset = "laptop"  # The preset of all other defaults.
    task: TaskConfig = field(default_factory=TASKS["sudoku"])  # The task that the model learns.
    model: RecursiveConfig = field(default_factory=RecursiveConfig)
    """The model; its fields are options without the prefix "model."."""

    steps: Count = 1000  # Number of optimiser steps; each is one supervision step.
    stop_at: Count | None = None
    """Step after which to stop early, without a change of the learning rates; None: the last step. --resume latest
    continues to the last step."""
    batch: Count = 768  # Rows per step, over all processes.
    accumulate: Count = 1
    """Number of parts into which each process divides its rows, to process them one after the other in less memory."""
    lr: NonNegative = 1e-4  # Learning rate of AdamAtan2.
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # Decay of AdamAtan2's moments.
    weight_decay: NonNegative = 0.1  # Decoupled weight decay of matrices; mixing logits, norms and biases do not decay.
    decay_everything: bool = False  # Whether mixing logits, norms and biases decay, too.
    clip: Annotated[float, "(0, inf]"] | None = None
    """Norm to which larger gradients of AdamAtan2's parameters are clipped; None: no clipping."""
    warmup: Annotated[int, "[0, inf)"] = 2000  # Number of steps in which all learning rates rise linearly.
    decay_at: tuple[Annotated[float, "(0, 1)"], ...] = ()  # Fractions of the run at which the learning rates drop.
    decay_to: tuple[Share, ...] = ()  # Factor of the base learning rates after each drop, between 0 and 1.
    puzzle_lr: NonNegative = 1e-2  # Learning rate of the puzzle table (SignSGD on the rows in the batch).
    puzzle_weight_decay: NonNegative = 0.1  # Weight decay of the puzzle table's rows in the batch.
    frame_lr: NonNegative = 1e-2  # Learning rate of the Riemannian optimiser of Grassmann frames.
    frame_iterations: Count = 2  # Iterations of the Riemannian optimiser's Cayley retraction.
    frame_adaptive: bool = False
    """Whether the Riemannian optimiser scales its momentum by second moments, as Adam does."""
    ema: Decay = 0.999  # Decay of the averaged weights that are evaluated; 0: evaluate the weights of the last step.
    seed: Seed = 0  # Seed of initial weights and of exploration in halting; the task has its own seed.

    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device to train on.
    threads: Count | None = None
    """Number of CPU threads per process; None: PyTorch's default, one per core. Small models are as fast with one
    thread, and much faster if the cores are busy with other work."""
    compile: bool = False  # Whether to compile the step.
    strategy: Strategy = "ddp"
    """Strategy of several processes (started with torchrun): replicas (ddp), or DeepSpeed's ZeRO stages."""
    patience: Annotated[float, "(0, 1e6]"] = PATIENCE
    """Seconds that processes wait for a process that does not answer before they end the run."""

    out: Path = Path("out/train")  # Folder of the run, for configuration, log and checkpoints.
    resume: str = "no"
    """Checkpoint to resume. no: start a new run; latest: the newest checkpoint; intact: the newest undamaged one; auto:
    latest, or a new run if there is no checkpoint; or the folder of a checkpoint or of another run."""
    checkpoint_every: Count = 1000  # Steps between checkpoints; one is always written at the end.
    keep: Count = 2  # Number of newest checkpoints to keep.
    log_every: Count = 10  # Steps between lines of the log.
    evaluate_every: Annotated[int, "[0, inf)"] = 0  # Steps between evaluations on test rows; 0: only at the end.
    evaluate_variants: Count | None = None  # Number of variants of each test puzzle in these evaluations; None: all.
    evaluate_batch: Count = 256  # Rows per evaluation batch on each process.

    def __post_init__(self) -> None:
        checks.fields(self)
        counter.refuse_seed(self.task.seed, "task.seed")
        if len(self.decay_at) != len(self.decay_to):
            raise ValueError(f"decay_at and decay_to differ in length: {self.decay_at} and {self.decay_to}")
        if list(self.decay_at) != sorted(self.decay_at):
            raise ValueError(f"decay_at must be rising fractions of the run, not {self.decay_at}")
        if self.stop_at is not None and self.stop_at > self.steps:
            raise ValueError(f"stop_at must be a step of the run, at most {self.steps}, not {self.stop_at}")
        if self.evaluate_variants is not None and not self.task.votes:
            raise ValueError(f"evaluate_variants is for tasks whose variants vote; {kind_of(self.task)} has none")

    def with_task(self, kind: str) -> "TrainConfig":
        """Return a copy for the task `kind` of `TASKS`, with the task's default options."""
        variants = self.evaluate_variants if TASKS[kind].votes else None
        return dataclasses.replace(self, task=TASKS[kind](), evaluate_variants=variants)

    @property
    def last_step(self) -> int:
        """The step after which this command ends."""
        return self.steps if self.stop_at is None else self.stop_at

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of all learning rates at a step: the linear warm-up times the drops at `decay_at`."""
        factor = 1.0
        for at, to in zip(self.decay_at, self.decay_to):
            if step >= at * self.steps:
                factor = to
        return factor * min(1.0, (step + 1) / self.warmup) if self.warmup else factor

    def to_json(self) -> str:
        """Return the configuration as JSON text, with the task's name as `kind` among the task's fields."""
        fields = dataclasses.asdict(self)
        fields["task"] = {"kind": kind_of(self.task), **fields["task"]}
        return json.dumps(fields, indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Read the configuration that `to_json` wrote."""
        return restore(cls, parse_json(text.encode()))


@dataclass(frozen=True)
class ArcDecoderRun:
    """The settings of a training run of the ARC decoder and its final evaluation."""

    preset: Literal["arc-decoder", "arc-decoder-long", "arc-decoder-tiny"] = "arc-decoder"
    """The preset of all other defaults."""
    task: ArcConfig = field(default_factory=lambda: ArcConfig(augmentations=80, keep_answer_colours=True))
    """The puzzles and their variants."""
    model: ArcDecoderConfig = field(default_factory=ArcDecoderConfig)
    """The model; its fields are options without the prefix "model."."""
    epochs: Count = 90  # Number of times that training sees every pair, each time in a random variant.
    tokens: Count = 12_288  # Tokens per step, into which several pairs are packed.
    predict_inputs: bool = True  # Whether training also predicts the tokens of input grids, as the public decoder does.
    lr: NonNegative = 1.66e-3  # Highest learning rate of NorMuon, for matrices of attention and feed-forward layers.
    other_lr: NonNegative = 3e-4  # Highest learning rate of AdamW, for all other parameters.
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of feed-forward matrices and of the projections of hyper-connections."""
    light_weight_decay: NonNegative = 0.01  # Decoupled weight decay of attention, embeddings and the last layer.
    clip: Positive = 1.0  # Norm to which larger gradients are clipped.
    warmup: Share = 0.02  # Share of the run in which the learning rates rise.
    decay: Share = 0.2  # Share of the run, at its end, in which the learning rates fall to zero.
    seed: Seed = 0  # Seed of initial weights, order of pairs and dropout; the task has its own seed.

    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device to train on.
    threads: Count | None = None  # Number of CPU threads; None: PyTorch's default.
    compile: Literal["auto", "yes", "no"] = "auto"  # Whether to compile the step; auto: on CUDA, which needs it.
    record: Literal["auto", "yes", "no"] = "auto"
    """Whether to record the step as a CUDA graph, so that the host need not launch its kernels; auto: on CUDA."""
    out: Path = Path("out/arc-decoder")  # Folder of the run, for configuration, log, checkpoint and score.
    resume: bool = False  # Whether to resume the run in the folder.
    minutes: Positive | None = None
    """Minutes after which the run saves a checkpoint and stops; --resume continues it. None: no limit."""
    save_minutes: Positive = 4.0  # Minutes between checkpoints; one is always written at the end.
    log_every: Count = 50  # Steps between lines of the log.
    evaluate_variants: Count | None = 80  # Variants of each test that the final evaluation answers; None: all.
    slots: Count = 1024  # Number of answers that are written at the same time.

    def __post_init__(self) -> None:
        checks.fields(self)
        if self.evaluate_variants is not None and self.evaluate_variants > self.task.augmentations + 1:
            raise ValueError(
                f"evaluate_variants ({self.evaluate_variants}) must not exceed the variants that the task draws, "
                f"{self.task.augmentations} and each puzzle itself"
            )

    def rate_factor(self, progress: float) -> float:
        """Return the factor of the learning rates at `progress`, the finished share of the run from 0 to 1.

        The factor rises from 0 to 1, stays at 1, and falls to 0.

        >>> [ArcDecoderRun().rate_factor(progress) for progress in (0.01, 0.5, 0.9)]
        [0.5, 1.0, 0.5]
        """
        rise = progress / self.warmup if self.warmup else 1.0
        fall = (1 - progress) / self.decay if self.decay else 1.0
        return round(min(1.0, rise, fall), 12)

    def to_json(self) -> str:
        """Return the configuration as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "ArcDecoderRun":
        """Read the configuration that `to_json` wrote."""
        return restore(cls, parse_json(text.encode()))


# Settings that may change when a run is resumed, because they do not change its result.
FREE = (
    "preset",
    "device",
    "threads",
    "compile",
    "record",
    "slots",
    "evaluate_variants",
    "out",
    "resume",
    "minutes",
    "save_minutes",
    "log_every",
)


@dataclass(frozen=True)
class Change:
    """A setting that differs between a checkpoint and the present run, with both values as in JSON."""

    name: str  # field of the configuration, with a dot before a field of the task or of the model
    saved: object  # the setting's value in the checkpoint
    present: object  # the setting's value in the present run
    refused: bool  # whether the difference forbids resuming the checkpoint

    def __str__(self) -> str:
        return f"{self.name} {self.present} instead of {self.saved}"


def list_changes(saved: TrainConfig, present: TrainConfig) -> list[Change]:
    """Return all settings that differ between the configurations of a checkpoint (`saved`) and of the present run."""
    old, new = flatten_fields(json.loads(saved.to_json())), flatten_fields(json.loads(present.to_json()))
    files = {
        f"task.{name}" for name in present.task.file_options
    }  # they may move: the fingerprint covers their content
    return [
        Change(name, old.get(name), new.get(name), name.startswith(_BINDING) and name not in files)
        for name in old | new
        if name not in _ELSEWHERE and old.get(name) != new.get(name)
    ]


def flatten_fields(fields: Mapping[str, object], separator: str = ".") -> dict[str, object]:
    """Return nested dictionaries as one flat dictionary, with keys such as "model.dim"."""
    flat: dict[str, object] = {}
    for name, value in fields.items():
        inner = flatten_fields(value, separator) if isinstance(value, dict) else None
        flat |= {name: value} if inner is None else {name + separator + key: each for key, each in inner.items()}
    return flat


def restore(cls: Any, fields: Any, name: str = "") -> Any:
    """Return an instance of the dataclass `cls` with `fields` from JSON; raise a ValueError for a wrong field.

    Lists and texts become tuples and paths where the class has those types. If `cls` is `TaskConfig`, the entry `kind`
    of `fields` names the class. Messages use `name`, the name of the field that holds the dataclass.
    """
    if not isinstance(fields, dict):
        subject = f"its {name}" if name else "the saved configuration"
        raise ValueError(f"{subject} must be an object with fields, not {checks.quote(fields)}")
    if cls is TaskConfig:
        fields = dict(fields)
        checks.choice(kind := fields.pop("kind", None), TASKS, "task")
        cls = TASKS[kind]
    hints = get_type_hints(cls)
    if unknown := fields.keys() - {field.name for field in dataclasses.fields(cls)}:
        names = checks.quote(", ".join(sorted(unknown)))
        raise ValueError(f"this version does not know these fields of the saved configuration: {names}")
    prefix = f"{name}." if name else ""
    return cls(**{key: _restore_type(value, hints[key], prefix + key) for key, value in fields.items()})


def _restore_type(value: Any, hint: Any, name: str) -> Any:
    """Convert a JSON value to the type `hint`; raise a ValueError if it has another type."""
    if hint is TaskConfig or dataclasses.is_dataclass(hint):
        return restore(hint, value, name)
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for arm in arms:
        if get_origin(arm) is Literal and any(value == word and type(value) is type(word) for word in get_args(arm)):
            return value
        if get_origin(arm) is tuple and isinstance(value, list):
            inner = get_args(arm)
            hints = [inner[0]] * len(value) if inner[-1] is ... else inner
            if len(hints) == len(value):
                return tuple(_restore_type(each, one, name) for each, one in zip(value, hints))
        if arm is Path and isinstance(value, str):
            return Path(value)
        if type(value) is arm or (arm is float and type(value) is int):
            return value
    expected = [arm.__name__ if isinstance(arm, type) else str(arm).replace("typing.", "") for arm in arms]
    words = " | ".join(expected).replace("NoneType", "None")
    raise ValueError(f"{name} of the saved configuration is {checks.quote(value)}, and must be {words}")
