"""The training loop: supervision steps, optimisers, averages, checkpoints, evaluation, and what stops it."""

import dataclasses
import math
import re
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jpmhc.connections import parameter_groups
from jpmhc.models import Carry, RecursiveCore, RecursiveModel, Step, refill
from jpmhc.optim import GrassmannianOptimizer, SignSGD, grassmann_frames
from jpmhc.tasks.batch import Batch, Task
from jpmhc.tasks.evaluate import answers_of, evaluate
from jpmhc.training import checkpoint
from jpmhc.training.checkpoint import Checkpoint
from jpmhc.training.config import TrainConfig
from jpmhc.training.distributed import World, join, share
from jpmhc.training.ema import WeightAverage
from jpmhc.training.log import Log
from jpmhc.training.mixing import mixing_statistics
from jpmhc.training.progress import Progress
from jpmhc.training.stream import Stream


class NonFiniteLoss(ValueError):
    """The loss is not a finite number; the message says where, and where the state was saved."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps done."""
    stopped: bool
    """Ended early by SIGTERM."""
    checkpoint: Path
    """The last checkpoint."""
    metrics: dict[str, Any]
    """The last evaluation; empty when stopped."""


class Sums(NamedTuple):
    """Sums over the rows of a step, over all ranks."""

    loss: float
    language: float
    halting: float
    halted: float  # rows that halted; the next three are sums over them
    exact: float
    correct: float
    steps: float
    stop: float  # ranks that were asked to stop


def train(config: TrainConfig) -> Outcome:
    """Run a configuration to its end, or until SIGTERM, which saves a checkpoint first."""
    if config.resume == "no" and checkpoint.folders(config.out):
        raise ValueError(f"{config.out} already holds checkpoints: add --resume latest, or choose another --out")
    with join(config.device) as world:
        found = None if config.resume == "no" else checkpoint.find(config.out, config.resume)
        return Trainer(config, world, found).run()


class Trainer:
    """Everything a run holds between its steps.

    Args:
        config: The run.
        world: The processes it is shared by.
        resume: Verified checkpoint to go on from.
    """

    def __init__(self, config: TrainConfig, world: World, resume: Checkpoint | None = None) -> None:
        self.config, self.world = config, world
        self.rows = world.rows(config.batch, config.accumulate)
        self.task: Task = config.task.build()
        if resume is not None:
            self._check(resume)
        torch.manual_seed(config.seed)
        task = self.task
        self.model = RecursiveModel(config.model, task.vocabulary, task.length, task.identifiers).to(world.device)
        self.core: RecursiveCore = self.model.core
        saved = None if resume is None else resume.shared(world.device)
        if saved is not None:  # before the core is shared out: shards are cut from these weights
            self.core.load_state_dict(saved["core"])
            self.model.puzzles.load_state_dict(saved["puzzles"])
        groups = parameter_groups(self.core, config.weight_decay)
        frames = grassmann_frames(self.core)
        for group in groups:
            group["params"] = [p for p in group["params"] if not any(p is frame for frame in frames.values())]
        self.frames: GrassmannianOptimizer | None = None
        if frames:
            self.frames = GrassmannianOptimizer(
                self.core, lr=config.frame_lr, adaptive=config.frame_adaptive, iterations=config.frame_iterations
            )
        self.shared = share(world, self.core, [group for group in groups if group["params"]], config)
        self.sign = SignSGD(self.model.puzzles.parameters(), config.puzzle_lr, config.puzzle_weight_decay)
        self.average = WeightAverage(self.shared.tensors(), config.ema) if config.ema else None
        parts, length = len(self.rows) // config.accumulate, self.task.length
        self.carries = [self.model.empty_carry(parts, length) for _ in range(config.accumulate)]
        self.step = 0
        if resume is not None and saved is not None:
            self._restore(resume, saved)
        self.stop = False
        self.started = time.monotonic()
        self.first = self.step

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the last step."""
        config = self.config
        if self.world.rank == 0:
            config.out.mkdir(parents=True, exist_ok=True)
            (config.out / "config.json").write_text(config.to_json() + "\n")
        self.world.wait()
        previous = signal.signal(signal.SIGTERM, self._ask_to_stop)
        stream = Stream(
            self.task,
            config.batch,
            self.rows,
            config.seed,
            config.model.halt_exploration,
            config.model.halt_max_steps,
            self.world.device,
        )
        metrics: dict[str, Any] = {}
        written: Path | None = None
        chief = self.world.rank == 0
        try:
            with Log(config.out, self.step) if chief else _Silent() as log, Progress(config, chief) as progress:
                for step, rows, minimum in stream.steps(self.step, config.steps):
                    logs = (step + 1) % config.log_every == 0 or step + 1 == config.steps
                    sums, norms = self.advance(step, rows, minimum, logs)
                    if logs:
                        values = self._values(step, sums, norms)
                        log.write("train", step, values)
                        progress.show(step, values)
                    progress.advance(step)
                    self.step = step + 1
                    last = self.step == config.steps
                    evaluates = last or (config.evaluate_every and self.step % config.evaluate_every == 0)
                    # Saved before it is evaluated, which may take long: what was trained cannot be lost any more.
                    due = evaluates or sums.stop or self.step % config.checkpoint_every == 0
                    written = self.save(config.out) if due else None
                    if sums.stop and not last:
                        return Outcome(self.step, True, written or config.out, {})
                    if evaluates:
                        signal.signal(signal.SIGTERM, previous)  # nothing is left to save: SIGTERM ends it at once
                        metrics = self.evaluate()
                        signal.signal(signal.SIGTERM, self._ask_to_stop)
                        log.write("evaluate", step, metrics)
                        progress.evaluated(step, metrics)
                        mixing = self.mixing(rows)
                        if mixing:
                            log.write("mixing", step, mixing)
        finally:
            signal.signal(signal.SIGTERM, previous)
        return Outcome(self.step, False, written or config.out, metrics)

    def advance(self, step: int, rows: Batch, minimum: Tensor, logs: bool) -> tuple[Sums, dict[str, Tensor]]:
        """One optimiser step on this rank's rows; returns sums over all ranks, and gradient norms where asked for."""
        config, last = self.config, len(self.carries) - 1
        size = len(self.rows) // len(self.carries)
        total = torch.zeros(len(Sums._fields), dtype=torch.float64, device=self.world.device)
        total[-1] = float(self.stop)
        fetched = _Fetched()
        before, finite = list(self.carries), []
        for i, carry in enumerate(self.carries):
            cut = slice(i * size, (i + 1) * size)
            carry = refill(carry, rows.inputs[cut], rows.labels[cut], rows.identifiers[cut])
            puzzle = self.model.puzzles(carry.identifiers)
            with self.shared.parts(i == last):
                out: Step = self.shared.module(
                    puzzle, carry.inputs, carry.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, minimum[cut]
                )
                total += _sums(out)
                finite.append(torch.isfinite(out.language + out.halting))
                if i == last:
                    fetched = _Fetched(self.world.sum(total))
                self.shared.backward(out.loss / config.batch, i == last)
            before[i] = carry
            self.carries[i] = carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)
        # The forward pass is long done when the backward pass has been queued, so reading the loss here costs no wait.
        sums = Sums(*fetched.values())
        if not math.isfinite(sums.loss):
            self._fail(step, sums.loss, before, finite)
        rate = config.rate(step)
        norms = dict(self.shared.gradient_norms()) if logs else {}
        norms["total"] = self.shared.step(rate)
        self.sign.param_groups[0]["lr"] = rate * config.puzzle_lr
        self.sign.step()
        self.sign.zero_grad(set_to_none=True)
        if self.frames is not None:
            self.frames.param_groups[0]["lr"] = rate * config.frame_lr
            self.frames.step()
            self.frames.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return sums, norms

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the averaged weights on held-out rows, the same on every rank."""
        model = self.snapshot()
        if self.config.compile:
            model.compile_prediction()
        rows = self.task.test_selection(self.config.evaluate_variants, self.config.seed)
        scorer = evaluate(
            self.task,
            self.task.scorer(rows),
            answers_of(model),
            batch_size=self.config.evaluate_batch,
            rank=self.world.rank,
            world=self.world.size,
            gather=self.world.collect,
        )
        return scorer.result()

    def mixing(self, rows: Batch, count: int = 4) -> dict[str, Any]:
        """Statistics of the residual mixers on a few rows."""
        model = self.snapshot()
        with torch.no_grad():
            puzzle = model.puzzles(rows.identifiers[:count])
        return mixing_statistics(model.core, puzzle, rows.inputs[:count])

    def snapshot(self) -> RecursiveModel:
        """A model with the averaged weights (whole, uncompiled) and the present puzzle table; every rank must ask."""
        task, device = self.task, self.world.device
        model = RecursiveModel(self.config.model, task.vocabulary, task.length, 1).to(device)
        model.puzzles = self.model.puzzles
        tensors = self.shared.tensors() if self.average is None else self.average.averages
        model.core.load_state_dict(self._whole(tensors))
        return model.eval()

    def _values(self, step: int, sums: Sums, norms: dict[str, Tensor]) -> dict[str, Any]:
        """One line of the log."""
        batch, halted = self.config.batch, max(sums.halted, 1.0)
        layers: dict[str, float] = {}
        total = float(norms.pop("total"))
        for name, norm in norms.items():
            layer = re.sub(r"^(network\..*?\d+)\..*", r"\1", name)
            layers[layer] = layers.get(layer, 0.0) + float(norm) ** 2
        largest = max(layers, key=lambda layer: layers[layer])
        elapsed = time.monotonic() - self.started
        done = step + 1 - self.first
        return {
            "loss": sums.loss / batch,
            "lm_loss": sums.language / batch,
            "q_loss": sums.halting / batch,
            "halted": int(sums.halted),
            "exact_accuracy": sums.exact / halted,
            "token_accuracy": sums.correct / halted,
            "supervision_steps": sums.steps / halted,
            "rate": self.config.rate(step),
            "gradient_norm": total,
            "largest_layer_gradient_norm": math.sqrt(layers[largest]),
            "largest_layer": largest,
            "sequences_per_second": done * batch / elapsed,
            "eta_seconds": elapsed / done * (self.config.steps - step - 1),
        }

    # --- saving and restoring ----------------------------------------------------------------------------------------

    def save(self, run: Path) -> Path:
        """Write a checkpoint of the present step under a run's folder; every rank must ask."""
        chief = self.world.rank == 0
        path = run / "checkpoints" / f"step-{self.step:08d}.unfinished"
        if chief:
            checkpoint.begin(run, self.step)
        weights = self._whole(self.shared.tensors())
        average = None if self.average is None else self._whole(self.average.averages)
        self.world.wait()
        if chief:
            task = self.task
            content = {
                "shape": (task.vocabulary, task.length, task.identifiers),
                "core": weights,
                "average": average,
                "puzzles": self.model.puzzles.state_dict(),
                "frames": None if self.frames is None else self.frames.state_dict(),
                "dense": None if self.shared.sharded else self.shared.state(),
            }
            checkpoint.write(path, "shared.pt", content)
        carry = {name: torch.cat([getattr(c, name) for c in self.carries]) for name in Carry._fields}
        mine = {
            "carry": carry,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None,
            "dense": self.shared.state() if self.shared.sharded else None,
        }
        checkpoint.write(path, f"rank-{self.world.rank}.pt", mine)
        self.world.wait()
        if chief:
            checkpoint.finish(path, self.config, self.task.fingerprint(), self.world.size, self.config.keep)
        self.world.wait()
        return path.with_suffix("")

    def _whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """The core's state dict with these tensors as its dense parameters."""
        state = {name: tensor for name, tensor in self.core.state_dict().items()}
        state.update(self.shared.whole(tensors))
        return state

    def _check(self, resume: Checkpoint) -> None:
        """Refuse a checkpoint of another run before any work is done on it."""
        differences = self.config.differences(resume.config)
        if differences:
            raise ValueError(f"{resume.path} belongs to another configuration: {'; '.join(differences)}")
        if self.task.fingerprint() != resume.fingerprint:
            raise ValueError(f"{resume.path} was trained on other data: the task's fingerprint differs")
        sharded = self.config.strategy != "ddp"
        if (resume.config.strategy != "ddp") != sharded:
            raise ValueError(
                f"{resume.path} was written with --strategy {resume.config.strategy}; "
                f"its optimiser state does not fit --strategy {self.config.strategy}"
            )
        if sharded and resume.ranks != self.world.size:
            raise ValueError(f"{resume.path} has {resume.ranks} shards and needs as many processes")

    def _restore(self, resume: Checkpoint, saved: dict[str, Any]) -> None:
        device, size = self.world.device, len(self.rows) // len(self.carries)
        same = resume.ranks == self.world.size
        files = [resume.rank(r, device) for r in ([self.world.rank] if same else range(resume.ranks))]
        first = 0 if same else self.rows.start
        whole = {name: torch.cat([file["carry"][name] for file in files]) for name in Carry._fields}
        for i in range(len(self.carries)):
            cut = slice(first + i * size, first + (i + 1) * size)
            self.carries[i] = Carry(**{name: tensor[cut].clone() for name, tensor in whole.items()})
        if same:
            torch.set_rng_state(files[0]["random"].cpu())
            if files[0]["random_cuda"] is not None and device.type == "cuda":
                torch.cuda.set_rng_state(files[0]["random_cuda"].cpu())
        self.shared.load_state(files[0]["dense"] if self.shared.sharded else saved["dense"])
        if self.frames is not None:
            self.frames.load_state_dict(saved["frames"])
        if self.average is not None:
            if saved["average"] is None:
                raise ValueError(f"{resume.path} has no averaged weights: resume it with --ema 0")
            self.average.load(self.shared.own(saved["average"]))
        self.step = resume.step

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True  # seen by every rank in the sums of the next step

    def _fail(self, step: int, loss: float, before: list[Carry], finite: list[Tensor]) -> None:
        """Save the state that gave a loss that is not finite, rows in flight included, and say which rows did."""
        self.step, self.carries = step, before
        path = self.save(self.config.out / "failed")
        bad = [number for carry, good in zip(before, finite) for number in carry.identifiers[~good].tolist()]
        bad = [number for part in self.world.collect(bad) for number in part]
        names = self.task.describe(np.unique(bad))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise NonFiniteLoss(
            f"the loss is {loss} at step {step}, on {len(bad)} rows of {shown}; the state that led there is in {path}"
        )


class _Fetched:
    """A tensor on its way to the host, which waits for it alone and not for work queued after it."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor is not None and tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        assert self.host is not None
        return self.host.tolist()


class _Silent:
    """The log of a rank that does not log."""

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def _sums(out: Step) -> Tensor:
    """The sums of one part, without the last."""
    halted = out.halted.double()
    parts = (
        out.loss.detach(),
        out.language.detach().sum(),
        out.halting.detach().sum(),
        halted.sum(),
        (halted * out.exact).sum(),
        (halted * out.correct).sum(),
        (halted * out.steps).sum(),
    )
    return torch.stack([part.double() for part in (*parts, torch.zeros_like(parts[0]))])
