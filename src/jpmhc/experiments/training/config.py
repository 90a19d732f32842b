"""The configuration of a training run, and its differences from the configuration of a checkpoint."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jpmhc import checks
from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.registry import TASKS, kind_of
from jpmhc.experiments.tasks.task import TaskConfig
from jpmhc.experiments.training.processes import PATIENCE
from jpmhc.files import parse_json

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
Preset = Literal["paper", "trm", "arc-small", "laptop"]

_COUNTS = (
    "steps",
    "batch",
    "accumulate",
    "checkpoint_every",
    "keep",
    "log_every",
    "evaluate_batch",
    "frame_iterations",
)
_INTERVALS = {
    "[0, inf)": ("warmup", "evaluate_every", "lr", "weight_decay", "puzzle_lr", "puzzle_weight_decay", "frame_lr"),
    "(0, inf]": ("clip",),
    "(0, 1e6]": ("patience",),
    "[0, 1)": ("ema",),
}

_ELSEWHERE = {"out", "resume", "stop_at"}  # of one command, not of the run
_BINDING = ("task.", "model.", "batch", "seed")  # a checkpoint fits these alone


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    preset: Preset = "laptop"
    """The preset of all other defaults."""
    task: TaskConfig = field(default_factory=TASKS["sudoku"])
    """The task that is learned."""
    model: RecursiveConfig = field(default_factory=RecursiveConfig)
    """The model; its fields are options without a prefix."""

    steps: int = 1000
    """Optimiser steps; one supervision step each."""
    stop_at: int | None = None
    """Step after which the run ends as if it were the last one, with the learning rates of all steps; None: the last.
    --resume latest goes on to the last step."""
    batch: int = 768
    """Rows of a step, over all processes."""
    accumulate: int = 1
    """Parts into which each process cuts its rows, worked on one after the other to save memory."""
    lr: float = 1e-4
    """Learning rate of AdamAtan2."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamAtan2's moments."""
    weight_decay: float = 0.1
    """Decoupled weight decay; mixing logits, norms and biases have none."""
    decay_everything: bool = False
    """Apply weight decay to mixing logits, norms and biases too."""
    clip: float | None = None
    """Largest norm of the dense gradient (AdamAtan2's parameters); None: no clipping."""
    warmup: int = 2000
    """Steps over which all learning rates rise linearly."""
    decay_at: tuple[float, ...] = ()
    """Fractions of the run at which the learning rates drop."""
    decay_to: tuple[float, ...] = ()
    """Factor of the base rate after each drop, between 0 and 1."""
    puzzle_lr: float = 1e-2
    """Learning rate of the puzzle table (SignSGD on touched rows)."""
    puzzle_weight_decay: float = 0.1
    """Weight decay of touched rows of the puzzle table."""
    frame_lr: float = 1e-2
    """Step of the Riemannian optimiser on Grassmann frames."""
    frame_iterations: int = 2
    """Iterations of its Cayley retraction."""
    frame_adaptive: bool = False
    """Scale its momentum by second moments, as Adam does."""
    ema: float = 0.999
    """Decay of the averaged weights that are evaluated; 0: evaluate the weights themselves."""
    seed: int = 0
    """Seed of initial weights and of exploration in halting; the task has its own."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    threads: int | None = None
    """Threads that each process computes with on a CPU; None: PyTorch's number, one a core. Small models take no longer
    with one, and much less time where the cores do other work too."""
    compile: bool = False
    """Compile the step."""
    strategy: Strategy = "ddp"
    """Strategy of several processes (start them with torchrun): replicas, or DeepSpeed's ZeRO stages."""
    patience: float = PATIENCE
    """Seconds that processes wait for one that does not answer before they give the run up."""

    out: Path = Path("out/train")
    """Folder of the run: configuration, log, checkpoints."""
    resume: str = "no"
    """no; latest: go on from the newest checkpoint; intact: from the newest undamaged one; or the folder of a
    checkpoint or of another run."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end."""
    keep: int = 2
    """Checkpoints kept; older ones are removed."""
    log_every: int = 10
    """Steps between lines of the log."""
    evaluate_every: int = 0
    """Steps between evaluations on held-out rows; 0: at the end alone."""
    evaluate_variants: int | None = None
    """Variants of each test puzzle that these evaluations look at; None: all."""
    evaluate_batch: int = 256
    """Rows of an evaluation batch, on each process."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "evaluate_variants", "threads", "stop_at"):
            checks.optional_whole_number(getattr(self, name), name)
        for interval, names in _INTERVALS.items():
            for name in names:
                checks.inside(getattr(self, name), interval, name)
        for name, interval in (("betas", "[0, 1)"), ("decay_at", "(0, 1)"), ("decay_to", "[0, 1]")):
            for value in getattr(self, name):
                checks.inside(value, interval, name)
        counter.refuse_seed(self.seed)
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
        """Return the same run on another task of the registry, with that task's own defaults."""
        variants = self.evaluate_variants if TASKS[kind].votes else None
        return dataclasses.replace(self, task=TASKS[kind](), evaluate_variants=variants)

    @property
    def last_step(self) -> int:
        """The step after which this command ends."""
        return self.steps if self.stop_at is None else self.stop_at

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of all learning rates at a step: linear warm-up, then the drops."""
        factor = 1.0
        for at, to in zip(self.decay_at, self.decay_to):
            if step >= at * self.steps:
                factor = to
        return factor * min(1.0, (step + 1) / self.warmup) if self.warmup else factor

    def to_json(self) -> str:
        """Write the resolved configuration as JSON, with the task's kind beside its fields."""
        fields = dataclasses.asdict(self)
        fields["task"] = {"kind": kind_of(self.task), **fields["task"]}
        return json.dumps(fields, indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Read the configuration that `to_json` wrote."""
        return cls.from_fields(parse_json(text.encode()))

    @classmethod
    def from_fields(cls, fields: Any) -> "TrainConfig":
        """Make the configuration from JSON; raise an error for a field of another type."""
        parts = [fields] + [fields.get(name) if isinstance(fields, dict) else None for name in ("task", "model")]
        for name, part in zip(("the saved configuration", "its task", "its model"), parts):
            if not isinstance(part, dict):
                raise ValueError(f"{name} must be an object with fields, not {checks.quote(part)}")
        own = {name: value for name, value in fields.items() if name not in ("task", "model")}
        task = dict(fields["task"])
        kind = task.pop("kind", None)
        checks.choice(kind, TASKS, "task")
        return cls(
            task=TASKS[kind](**restore_types(TASKS[kind], task, "task.")),
            model=RecursiveConfig(**restore_types(RecursiveConfig, fields["model"], "model.")),
            **restore_types(cls, own),
        )


@dataclass(frozen=True)
class Change:
    """One setting that differs, with its values as in JSON."""

    name: str
    """Field of the configuration, with a dot before a field of the task or of the model."""
    there: object
    """Value in the checkpoint."""
    here: object
    """Value now."""
    refused: bool
    """Whether it keeps a checkpoint from being resumed."""

    def __str__(self) -> str:
        """Write the change as an option: its value now, and the one that it replaces."""
        there = _spell(self.name, self.there)
        return f"{self.option} instead of {there.removeprefix(f'{_option(self.name)} ')}"

    @property
    def option(self) -> str:
        """The value now as it is typed after `jpmhc train`."""
        return _spell(self.name, self.here)


def list_changes(there: TrainConfig, here: TrainConfig) -> list[Change]:
    """List all settings that differ, in the order of the fields.

    Args:
        there: The configuration in the checkpoint.
        here: The configuration of the run that resumes it.
    """
    old, new = flatten_fields(json.loads(there.to_json())), flatten_fields(json.loads(here.to_json()))
    files = {f"task.{name}" for name in here.task.places}  # they may move: the fingerprint covers their content
    return [
        Change(name, old.get(name), new.get(name), name.startswith(_BINDING) and name not in files)
        for name in old | new
        if name not in _ELSEWHERE and old.get(name) != new.get(name)
    ]


def flatten_fields(fields: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested fields as one level, with a dot between the names of a field and of the field in it."""
    flat: dict[str, object] = {}
    for name, value in fields.items():
        flat |= flatten_fields(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _option(name: str) -> str:
    return f"--{name.removeprefix('model.').replace('_', '-')}"


def _spell(name: str, value: object) -> str:
    option = _option(name)
    if isinstance(value, bool):
        path, dot, last = option.rpartition(".")
        return option if value else f"{path}{dot}no-{last}" if dot else option.replace("--", "--no-", 1)
    words = " ".join(map(str, value)) or "(none)" if isinstance(value, list) else shlex.quote(str(value))
    return f"{option} {words}"


def restore_types(cls: Any, fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give values read from JSON, which has neither tuples nor paths, the types of the fields."""
    hints = get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := fields.keys() - known:
        names = checks.quote(", ".join(sorted(unknown)))
        raise ValueError(f"the saved configuration has fields this version does not know: {names}")
    return {name: _restore_type(value, hints[name], prefix + name) for name, value in fields.items()}


def _restore_type(value: Any, hint: Any, name: str) -> Any:
    """Give a value the type of a field's annotation, or raise an error."""
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
    expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ValueError(f"{name} of the saved configuration is {checks.quote(value)}, and must be {expected}")
