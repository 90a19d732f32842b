"""Everything that changes from one training step to the next, and how it goes into a checkpoint and comes back."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jpmhc.connections import parameter_groups
from jpmhc.experiments.models import Carry, RecursiveCore, RecursiveModel
from jpmhc.experiments.tasks.task import Task
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.changes import list_changes
from jpmhc.experiments.training.checkpoint import Checkpoint
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.contents import (
    explaining_misfit,
    load_weights,
    require_like,
    require_optimiser_state,
    require_shape,
)
from jpmhc.experiments.training.ema import WeightAverage
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.strategies import distribute_core
from jpmhc.optim import GrassmannianOptimizer, SignSGD, grassmann_frames

# Stages 1 and 2 cut each parameter group's flat tensor into shards, stage 3 every parameter by itself.
_SAME_OPTIMISER_STATE = (("ddp",), ("zero1", "zero2"), ("zero3",))


def refuse_other_run(config: TrainConfig, world: World, resume: Checkpoint) -> None:
    """Refuse a checkpoint that does not fit a configuration, before any work is done with it."""
    if refused := [change for change in list_changes(resume.config, config) if change.refused]:
        named = "; ".join(f"{change.name} ({change.there} there, {change.here} here)" for change in refused)
        raise ValueError(f"{resume.path} belongs to another configuration: {named}")
    if resume.step > config.steps:
        raise ValueError(
            f"{resume.path} has done more than the {config.steps} steps asked for: raise --steps to go on, or score it "
            f"with jpmhc evaluate {resume.path}"
        )
    if not resume.ranks:  # weights alone, which fit every strategy
        return
    fitting = next(group for group in _SAME_OPTIMISER_STATE if resume.config.strategy in group)
    if config.strategy not in fitting:
        raise ValueError(
            f"{resume.path} was written with --strategy {resume.config.strategy}; its optimiser state does not fit "
            f"--strategy {config.strategy}: go on with {' or '.join(fitting)}"
        )
    if config.strategy != "ddp" and resume.ranks != world.size:
        raise ValueError(f"{resume.path} has {resume.ranks} shards and needs as many processes")


class Learner:
    """The model, its optimisers and averages, the rows in flight, and the number of steps done.

    Args:
        config: The run.
        world: The processes that train it.
        task: What it learns.
        resume: Verified checkpoint to resume.
    """

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
        self.average = WeightAverage(self.distributed.tensors(), config.ema) if config.ema else None
        parts = len(self.rows) // config.accumulate
        self.carries = [self.model.empty_carry(parts, task.length) for _ in range(config.accumulate)]
        self.step = 0
        if resume is not None and saved is not None and resume.ranks:  # without ranks it is of weights alone
            self._restore(resume, saved)

    def snapshot(self) -> RecursiveModel:
        """Copy the averaged weights into a whole, uncompiled model with the present puzzle table.

        Every process must call this.
        """
        task, device = self.task, self.world.device
        with torch.random.fork_rng(devices=[]):  # the state that a checkpoint saves must not depend on evaluations
            model = RecursiveModel(self.config.model, task.vocabulary, task.length, 1).to(device)
        model.puzzles = self.model.puzzles
        tensors = self.distributed.tensors() if self.average is None else self.average.averages
        model.core.load_state_dict(self._state_dict_with(tensors))
        return model.eval()

    def save(self, run: Path) -> Path:
        """Write a checkpoint of the present step under a run's folder; every process must call this."""
        chief = self.world.rank == 0
        path = checkpoint.unfinished_folder(run, self.step)
        if chief:
            checkpoint.begin_checkpoint(run, self.step)
        weights = self._state_dict_with(self.distributed.tensors())
        average = None if self.average is None else self._state_dict_with(self.average.averages)
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
        """Return the core's state dict with these tensors as its dense parameters."""
        return {**self.core.state_dict(), **self.distributed.gather_whole(tensors)}

    def _restore(self, resume: Checkpoint, saved: dict[str, Any]) -> None:
        device, size = self.world.device, len(self.rows) // len(self.carries)
        same = resume.ranks == self.world.size
        ranks = [self.world.rank] if same else range(resume.ranks)
        files = {resume.path / f"rank-{rank}.pt": resume.rank(rank, device) for rank in ranks}
        for file, content in files.items():
            with explaining_misfit(file, "carry"):
                count = self.config.batch // resume.ranks
                require_like(content["carry"], self.model.empty_carry(count, self.task.length)._asdict())
                if not bool((content["carry"]["identifiers"] < self.task.identifier_count).all()):
                    raise ValueError(f"identifiers has a number beyond the {self.task.identifier_count} of the task")
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
        if self.average is not None:
            if saved["average"] is None:
                raise ValueError(f"{shared} has no averaged weights: resume it with --ema 0")
            self.average.load(self.distributed.cut_own(saved["average"]))
        self.step = resume.step
