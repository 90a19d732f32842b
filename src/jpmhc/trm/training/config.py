"""Configuration of a training run: one dataclass, and the presets it starts from."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jpmhc import checks
from jpmhc.trm.model import RecursiveConfig
from jpmhc.trm.tasks import counter
from jpmhc.trm.tasks.arc import ArcConfig
from jpmhc.trm.tasks.sudoku import SudokuConfig

TASKS: dict[str, type] = {"sudoku": SudokuConfig, "arc": ArcConfig}

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
Preset = Literal["paper", "trm", "arc-small", "laptop"]


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    preset: Preset = "laptop"
    """Where every other default comes from."""
    task: Annotated[SudokuConfig | ArcConfig, tyro.conf.AvoidSubcommands] = field(default_factory=SudokuConfig)
    """What is learned."""
    model: Annotated[RecursiveConfig, tyro.conf.arg(name="")] = field(default_factory=RecursiveConfig)
    """The model; its fields are options without a prefix."""

    steps: int = 1000
    """Optimiser steps; one supervision step each."""
    batch: int = 768
    """Rows of a step, over all ranks."""
    accumulate: int = 1
    """Parts that each rank's rows are cut into, one after the other, to save memory."""
    lr: float = 1e-4
    """Learning rate of AdamAtan2."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamAtan2's moments."""
    weight_decay: float = 0.1
    """Decoupled weight decay; mixing logits, norms and biases have none."""
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
    compile: bool = False
    """Compile the step."""
    strategy: Strategy = "ddp"
    """How several processes share the work (start them with torchrun): replicas, or DeepSpeed's ZeRO stages."""

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
    """Rows of an evaluation batch, on each rank."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "checkpoint_every", "keep", "log_every", "evaluate_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup", "evaluate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("lr", "weight_decay", "puzzle_lr", "puzzle_weight_decay", "frame_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, not {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        checks.at_least_one(self.frame_iterations, "frame_iterations")
        counter.refuse_seed(self.seed)
        counter.refuse_seed(self.task.seed, "task.seed")
        if len(self.decay_at) != len(self.decay_to):
            raise ValueError(f"decay_at and decay_to differ in length: {self.decay_at} and {self.decay_to}")
        if list(self.decay_at) != sorted(self.decay_at) or not all(0 < at < 1 for at in self.decay_at):
            raise ValueError(f"decay_at must be rising fractions between 0 and 1, not {self.decay_at}")
        if not all(0 <= to <= 1 for to in self.decay_to):
            raise ValueError(f"decay_to must be factors between 0 and 1, not {self.decay_to}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), not {self.ema}")
        if self.evaluate_variants is not None and not isinstance(self.task, ArcConfig):
            raise ValueError("evaluate_variants is for ARC: other puzzles have one variant each")
        checks.at_least_one(self.evaluate_variants, "evaluate_variants")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, or None for no clipping, not {self.clip}")

    def rate(self, step: int) -> float:
        """Factor of all learning rates at a step: linear warm-up, then the drops."""
        factor = 1.0
        for at, to in zip(self.decay_at, self.decay_to):
            if step >= at * self.steps:
                factor = to
        return factor * min(1.0, (step + 1) / self.warmup) if self.warmup else factor

    def to_json(self) -> str:
        """The resolved configuration, with the task's kind beside its fields."""
        kind = next(name for name, cls in TASKS.items() if isinstance(self.task, cls))
        fields = dataclasses.asdict(self)
        fields["task"] = {"kind": kind, **fields["task"]}
        return json.dumps(fields, indent=2, default=str)

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """The configuration that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        task = fields.pop("task")
        kind = task.pop("kind")
        if kind not in TASKS:
            raise ValueError(f"unknown task {kind!r}; known are {', '.join(TASKS)}")
        return cls(
            task=_rebuild(TASKS[kind], task),
            model=_rebuild(RecursiveConfig, fields.pop("model")),
            **_typed(cls, fields),
        )


def _rebuild(cls: type, fields: dict[str, Any]) -> Any:
    return cls(**_typed(cls, fields))


def _typed(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither tuples nor paths: give each field the type its default has."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    unknown = fields.keys() - known.keys()
    if unknown:
        raise ValueError(f"the saved configuration has fields this version does not know: {', '.join(sorted(unknown))}")
    typed = {}
    for name, value in fields.items():
        hint = str(known[name].type)
        if isinstance(value, list):
            value = tuple(Path(v) if "Path" in hint else v for v in value)
        elif isinstance(value, str) and "Path" in hint:
            value = Path(value)
        typed[name] = value
    return typed


# Tables trm-config and training-config of the paper; its "6 cycles" are read as inner ones, and it evaluates every 2500
# epochs.
_PAPER = TrainConfig(
    preset="paper",
    task=ArcConfig(),
    model=RecursiveConfig(l_cycles=6, mixer="cayley", streams=4, mixer_form="paper", compute="bfloat16"),
    steps=500_000,
    clip=1.0,
    decay_at=(0.8, 0.9),
    decay_to=(0.316, 0.1),
    compile=True,
    checkpoint_every=12_951,
    evaluate_every=12_951,
    log_every=100,
    out=Path("out/paper"),
)

# The public code: no clipping, no decay of the rate, plain residual connections.
_TRM = TrainConfig(
    preset="trm",
    task=ArcConfig(),
    model=RecursiveConfig(compute="bfloat16"),
    steps=518_000,
    compile=True,
    checkpoint_every=12_951,
    evaluate_every=12_951,
    log_every=100,
    out=Path("out/trm"),
)

# One GPU, hours: a narrower model, smaller batches, fewer variants.
_ARC_SMALL = TrainConfig(
    preset="arc-small",
    task=ArcConfig(),
    model=RecursiveConfig(dim=256, heads=4, compute="bfloat16"),
    steps=50_000,
    batch=128,
    warmup=1000,
    clip=1.0,
    compile=True,
    checkpoint_every=2000,
    evaluate_every=10_000,
    evaluate_variants=20,
    log_every=50,
    out=Path("out/arc-small"),
)

# Two cores, minutes: 4 × 4 Sudoku. Held-out puzzles are solved within 250 steps or so from step 1500 on.
_LAPTOP = TrainConfig(
    preset="laptop",
    task=SudokuConfig(),
    model=RecursiveConfig(dim=64, heads=4, inner_multiple=64, puzzle_slots=1, h_cycles=2, l_cycles=2, halt_max_steps=4),
    steps=2250,
    batch=64,
    lr=2e-3,
    warmup=50,
    clip=1.0,
    ema=0.98,
    checkpoint_every=500,
    evaluate_every=750,
    out=Path("out/laptop"),
)

PRESETS: dict[str, TrainConfig] = {c.preset: c for c in (_PAPER, _TRM, _ARC_SMALL, _LAPTOP)}
