"""The learner: the state of a training run, a training step, and writing the state to a checkpoint.

A step takes new rows, accumulates gradients over parts of the batch, updates weights, puzzle vectors and the running
averages of the weights, and returns the step's losses and gradient norms.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from jpmhc.connections import parameter_groups
from jpmhc.experiments.models.recursive import Carry, RecursiveCore, RecursiveModel, Step, refill_rows
from jpmhc.experiments.tasks.task import Batch, Task
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.checkpoint import Checkpoint
from jpmhc.experiments.training.config import TrainConfig, list_changes
from jpmhc.experiments.training.contents import (
    Content,
    explaining_misfit,
    load_weights,
    require_like,
    require_optimiser_state,
    require_shape,
)
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.strategies import distribute_core
from jpmhc.files import JsonObject
from jpmhc.optim import GrassmannianOptimizer, SignSGD, grassmann_frames

# Strategies with the same layout of the optimiser's state: ZeRO stages 1 and 2 shard one flat tensor per parameter
# group, stage 3 shards every parameter.
_SAME_OPTIMISER_STATE = (("ddp",), ("zero1", "zero2"), ("zero3",))


class NonFiniteLoss(ValueError):
    """The error for a loss that is not finite; the message names the step, the rows and the saved checkpoint."""


class Sums(NamedTuple):
    """Sums over the rows of a step on all processes."""

    loss: float
    language: float
    halting: float
    halted: float  # number of rows that halted; `exact`, `correct` and `steps` are sums over these rows
    exact: float
    correct: float
    steps: float
    stop: float  # number of processes that were asked to stop


class Learner:
    """The state of a run: model, optimisers, averaged weights, rows in progress, and the number of finished steps."""

    def __init__(self, config: TrainConfig, world: World, task: Task, resume: Checkpoint | None = None) -> None:
        self.config, self.world, self.task = config, world, task
        self.rows = world.rows(config.batch, config.accumulate)
        if resume is not None and task.fingerprint() != resume.fingerprint:
            moved = [str(change) for change in list_changes(resume.config, config) if change.name.startswith("task.")]
            where = f" ({', '.join(moved)})" if moved else ""
            raise ValueError(f"{resume.path} was trained on other data{where}: the task's fingerprint differs")
        torch.manual_seed(config.seed)
        self.model = RecursiveModel(config.model, task.vocabulary, task.length, task.identifier_count).to(world.device)
        self.core: RecursiveCore = self.model.core
        saved = None if resume is None else resume.shared(world.device)
        if resume is not None and saved is not None:  # before the core is distributed: shards are cut from these
            file = resume.path / "shared.pt"
            require_shape(saved, task, file)
            if saved["average"] is not None:  # through the core, which knows the names of earlier versions
                load_weights(self.core, saved, "average", file)
                saved["average"] = {name: tensor.clone() for name, tensor in self.core.state_dict().items()}
            load_weights(self.core, saved, "core", file)
            load_weights(self.model.puzzles, saved, "puzzles", file)
        groups = parameter_groups(self.core, config.weight_decay)
        if config.decay_everything:
            groups[1]["weight_decay"] = config.weight_decay
        frames = grassmann_frames(self.core)
        for group in groups:
            group["params"] = [p for p in group["params"] if not any(p is frame for frame in frames.values())]
        self.frame_optimiser: GrassmannianOptimizer | None = None
        if frames:
            self.frame_optimiser = GrassmannianOptimizer(
                self.core, lr=config.frame_lr, adaptive=config.frame_adaptive, iterations=config.frame_iterations
            )
        self.distributed = distribute_core(self.core, [group for group in groups if group["params"]], config, world)
        self.puzzle_optimiser = SignSGD(self.model.puzzles.parameters(), config.puzzle_lr, config.puzzle_weight_decay)
        self.averages = [tensor.clone() for tensor in self.distributed.tensors()] if config.ema else None
        self.update_averages = get_ema_multi_avg_fn(config.ema)
        parts = len(self.rows) // config.accumulate
        self.carries = [self.model.empty_carry(parts, task.length) for _ in range(config.accumulate)]
        self.step = 0
        if resume is not None and saved is not None and resume.ranks:  # a checkpoint without ranks has weights alone
            self._restore(resume, saved)

    def take_step(
        self, rows: Batch, minimum: Tensor, *, logs: bool = False, stop: bool = False
    ) -> tuple[Sums, dict[str, Tensor]]:
        """Train one step on this process's rows; return sums over all processes, and gradient norms by name.

        Args:
            rows: New rows; each is used only if the current row in its position has halted.
            minimum: Number of supervision steps before which each row may not halt. [rows]
            logs: Whether to return one gradient norm per parameter besides the norm "total".
            stop: Whether this process was asked to stop; the sums tell all processes.
        """
        config, carries, last = self.config, self.carries, len(self.carries) - 1
        size = len(self.rows) // len(carries)
        total = torch.zeros(len(Sums._fields), dtype=torch.float64, device=self.world.device)
        total[-1] = float(stop)
        fetch: Callable[[], list[float]] = list
        before, finite = list(carries), []
        for i, carry in enumerate(carries):
            cut = slice(i * size, (i + 1) * size)
            carry = refill_rows(carry, rows.inputs[cut], rows.labels[cut], rows.identifiers[cut])
            puzzle = self.model.puzzles(carry.identifiers)
            with self.distributed.exchanging_gradients(i == last):
                out: Step = self.distributed.module(
                    puzzle, carry.inputs, carry.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, minimum[cut]
                )
                total += _sum_rows(out)
                finite.append(torch.isfinite(out.language + config.model.halting_weight * out.halting))
                if i == last:
                    fetch = _copy_to_host(self.world.sum(total))
                self.distributed.backward(out.loss / config.batch, i == last)
            before[i] = carry
            carries[i] = carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)
        # The forward pass has ended by the time the backward pass is queued, so reading the loss need not wait.
        sums = Sums(*fetch())
        if not math.isfinite(sums.loss):
            self._save_and_refuse(sums.loss, before, finite)
        rate = config.learning_rate_factor(self.step)
        norms = dict(self.distributed.gradient_norms()) if logs else {}
        norms["total"] = self.distributed.step(rate)
        self.puzzle_optimiser.param_groups[0]["lr"] = rate * config.puzzle_lr
        self.puzzle_optimiser.step()
        self.puzzle_optimiser.zero_grad(set_to_none=True)
        if self.frame_optimiser is not None:
            self.frame_optimiser.param_groups[0]["lr"] = rate * config.frame_lr
            self.frame_optimiser.step()
            self.frame_optimiser.zero_grad(set_to_none=True)
        if self.averages is not None:
            self.update_averages(self.averages, self.distributed.tensors(), None)
        self.step += 1
        return sums, norms

    def _save_and_refuse(self, loss: float, before: list[Carry], finite: list[Tensor]) -> None:
        """Save the state before the failed step, and raise a NonFiniteLoss that names the step, rows and mixer.

        For each part of the batch, `before` has the carry before the step, and `finite` the rows with a finite loss.
        """
        self.carries = before
        path = self.save(self.config.out / "failed")
        bad = [number for carry, good in zip(before, finite) for number in carry.identifiers[~good].tolist()]
        bad = [number for part in self.world.collect(bad) for number in part]
        names = self.task.describe(np.unique(bad))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise NonFiniteLoss(
            f"the loss of step {self.step + 1} with mixer {self.config.model.mixer} is {loss}, on {len(bad)} rows of "
            f"{shown}; the state before this step is in {path}"
        )

    def snapshot(self) -> RecursiveModel:
        """Return an unsharded, uncompiled model with the averaged weights and the current puzzle table.

        Without averages it has the current weights. Every process must call this method.
        """
        task, device = self.task, self.world.device
        with torch.random.fork_rng(devices=[]):  # the state that a checkpoint saves must not depend on evaluations
            model = RecursiveModel(self.config.model, task.vocabulary, task.length, 1).to(device)
        model.puzzles = self.model.puzzles
        tensors = self.distributed.tensors() if self.averages is None else self.averages
        model.core.load_state_dict(self._state_dict_with(tensors))
        return model.eval()

    def save(self, run: Path) -> Path:
        """Write a checkpoint to a run's folder, and return its path; every process must call this method."""
        chief = self.world.rank == 0
        path = checkpoint.unfinished_folder(run, self.step)
        if chief:
            checkpoint.begin_checkpoint(run, self.step)
        weights = self._state_dict_with(self.distributed.tensors())
        average = None if self.averages is None else self._state_dict_with(self.averages)
        self.world.wait()
        if chief:
            task = self.task
            content = {
                "shape": (task.vocabulary, task.length, task.identifier_count),
                "core": weights,
                "average": average,
                "puzzles": self.model.puzzles.state_dict(),
                "frames": None if self.frame_optimiser is None else self.frame_optimiser.state_dict(),
                "dense": None if self.distributed.sharded else self.distributed.optimiser_state(),
            }
            checkpoint.write_part(path, "shared.pt", content)
        carry = {name: torch.cat([getattr(c, name) for c in self.carries]) for name in Carry._fields}
        mine = {
            "carry": carry,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None,
            "dense": self.distributed.optimiser_state() if self.distributed.sharded else None,
        }
        checkpoint.write_part(path, f"rank-{self.world.rank}.pt", mine)
        self.world.wait()
        if chief:
            checkpoint.finish_checkpoint(path, self.config, self.task.fingerprint(), self.world.size)
        self.world.wait()
        return path.with_suffix("")

    def _state_dict_with(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return the core's state dict, with `tensors` in place of its dense parameters."""
        return {**self.core.state_dict(), **self.distributed.gather_whole(tensors)}

    def _restore(self, resume: Checkpoint, saved: Content) -> None:
        device, size = self.world.device, len(self.rows) // len(self.carries)
        same = resume.ranks == self.world.size
        ranks = [self.world.rank] if same else range(resume.ranks)
        files = {resume.path / f"rank-{rank}.pt": resume.rank(rank, device) for rank in ranks}
        for file, content in files.items():
            with explaining_misfit(file, "carry"):
                count = self.config.batch // resume.ranks
                require_like(content["carry"], self.model.empty_carry(count, self.task.length)._asdict())
                if not bool((content["carry"]["identifiers"] < self.task.identifier_count).all()):
                    raise ValueError(f"identifiers must be below {self.task.identifier_count}, as in this task")
        first = 0 if same else self.rows.start
        whole = {name: torch.cat([content["carry"][name] for content in files.values()]) for name in Carry._fields}
        for i in range(len(self.carries)):
            cut = slice(first + i * size, first + (i + 1) * size)
            self.carries[i] = Carry(**{name: tensor[cut].clone() for name, tensor in whole.items()})
        file, mine = next(iter(files.items()))
        if same:
            with explaining_misfit(file, "random"):
                require_like(mine["random"].cpu(), torch.get_rng_state(), "the generator's state")
                torch.set_rng_state(mine["random"].cpu())
            if mine["random_cuda"] is not None and device.type == "cuda":
                with explaining_misfit(file, "random_cuda"):
                    torch.cuda.set_rng_state(mine["random_cuda"].cpu())
        shared = resume.path / "shared.pt"
        with explaining_misfit(file if self.distributed.sharded else shared, "dense"):
            self.distributed.load_optimiser_state((mine if self.distributed.sharded else saved)["dense"])
        if self.frame_optimiser is not None:
            with explaining_misfit(shared, "frames"):
                require_optimiser_state(self.frame_optimiser, saved["frames"]["frames"], GrassmannianOptimizer.STATE)
                self.frame_optimiser.load_state_dict(saved["frames"])
        if self.averages is not None:
            if saved["average"] is None:
                raise ValueError(f"{shared} has no averaged weights: resume it with --ema 0")
            torch._foreach_copy_(self.averages, self.distributed.cut_own(saved["average"]))
        self.step = resume.step


def describe_step(learner: Learner, sums: Sums, norms: dict[str, Tensor]) -> JsonObject:
    """Return the values that the log records about the last step."""
    batch, halted = learner.config.batch, max(sums.halted, 1.0)
    layers: dict[str, float] = {}
    for name, norm in norms.items():
        if name != "total":
            layer = re.sub(r"^(network\..*?\d+)\..*", r"\1", name)
            layers[layer] = layers.get(layer, 0.0) + float(norm) ** 2
    largest = max(layers, key=lambda layer: layers[layer])
    return {
        "loss": sums.loss / batch,
        "lm_loss": sums.language / batch,
        "q_loss": sums.halting / batch,
        "halted": int(sums.halted),
        "exact_accuracy": sums.exact / halted,
        "token_accuracy": sums.correct / halted,
        "supervision_steps": sums.steps / halted,
        "rate": learner.config.learning_rate_factor(learner.step - 1),
        "gradient_norm": float(norms["total"]),
        "largest_layer_gradient_norm": math.sqrt(layers[largest]),
        "largest_layer": largest,
        "layer_gradient_norms": {layer: math.sqrt(square) for layer, square in layers.items()},
    }


def refuse_other_run(config: TrainConfig, world: World, resume: Checkpoint) -> None:
    """Raise a ValueError if the checkpoint `resume` does not fit the configuration or the processes of this run."""
    if refused := [change for change in list_changes(resume.config, config) if change.refused]:
        raise ValueError(f"{resume.path} belongs to another configuration: {', '.join(map(str, refused))}")
    if resume.step > config.last_step:
        option = "--steps" if config.stop_at is None else "--stop-at"
        raise ValueError(
            f"{resume.path} has done more than the {config.last_step} steps asked for: raise {option} to go on, or "
            f"score it with jpmhc evaluate {resume.path}"
        )
    if not resume.ranks:  # an imported checkpoint, which fits every strategy
        return
    fitting = next(group for group in _SAME_OPTIMISER_STATE if resume.config.strategy in group)
    if config.strategy not in fitting:
        raise ValueError(
            f"{resume.path} was written with --strategy {resume.config.strategy}; its optimiser state does not fit "
            f"--strategy {config.strategy}: go on with {' or '.join(fitting)}"
        )
    if config.strategy != "ddp" and resume.ranks != world.size:
        raise ValueError(f"{resume.path} has {resume.ranks} shards and needs as many processes")


def _copy_to_host(tensor: Tensor) -> Callable[[], list[float]]:
    """Begin to copy a tensor; return a function that waits only for this copy, and returns the tensor's numbers."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> list[float]:
        event.synchronize()
        return host.tolist()

    return wait


def _sum_rows(out: Step) -> Tensor:
    """Return the fields of `Sums` for one part of the rows, with 0 for `stop`. [8]"""
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
