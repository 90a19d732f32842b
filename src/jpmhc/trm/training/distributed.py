"""How several processes share a training run: replicas (DDP), or shards (DeepSpeed's ZeRO stages).

Either way rank r works on a contiguous part of every batch's rows, gradients are summed over all rows of all ranks, and
Grassmann frames and puzzle vectors are stepped identically on every rank.
"""

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jpmhc.optim import AdamAtan2
from jpmhc.optim.grassmannian import grassmann_frames
from jpmhc.trm.training.config import TrainConfig


@dataclass(frozen=True)
class World:
    """Which process this is, among how many, and its device."""

    rank: int
    size: int
    device: torch.device

    def rows(self, batch: int, accumulate: int) -> range:
        """This rank's part of the rows of a batch."""
        if batch % (self.size * accumulate):
            raise ValueError(
                f"batch ({batch}) must be a multiple of processes × accumulate ({self.size} × {accumulate})"
            )
        share = batch // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def collect(self, value: Any) -> list[Any]:
        """Every rank's object, in rank order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Enter the group of processes that torchrun started, or a world of one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda was asked for, but PyTorch sees no CUDA device")
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(where)
    if size == 1:
        yield World(0, 1, where)
        return
    dist.init_process_group("nccl" if cuda else "gloo", device_id=where if cuda else None)
    try:
        yield World(rank, size, where)
    finally:
        dist.destroy_process_group()


class Replicas:
    """Every process holds the whole model; gradients are averaged by DDP. One process alone is the same without DDP."""

    sharded = False

    def __init__(self, world: World, core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        self.world, self.clip = world, config.clip
        self.named = dict(_dense(core))
        self.optimiser = AdamAtan2(groups, config.lr, config.betas)
        self.base = config.lr
        if config.compile:
            core.compile()
        self.module: nn.Module = core
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            # No buffer changes in training, so none is sent; newer releases of PyTorch call the option otherwise.
            names = inspect.signature(DistributedDataParallel).parameters
            sending: dict[str, Any] = {
                "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
            }
            self.module = DistributedDataParallel(core, device_ids=devices, gradient_as_bucket_view=True, **sending)

    def parts(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward of one part of a rank's rows: gradients are exchanged after the last part."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of one part; `loss` is its sum over rows divided by the size of the whole batch."""
        # DDP averages over ranks, so each rank's loss is scaled up first; both factors are exact for 2, 4, 8 … ranks.
        (loss * self.world.size).backward()

    def gradient_norms(self) -> dict[str, Tensor]:
        """Norms of the whole gradient by parameter; every rank must ask."""
        found = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        return dict(zip(found, torch._foreach_norm(list(found.values()))))

    def step(self, rate: float) -> Tensor:
        """Clip, update the dense parameters, clear their gradients; returns the gradient's norm before clipping."""
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if self.clip is not None:
            torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimiser.param_groups:
            group["lr"] = rate * self.base
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> list[Tensor]:
        """The dense parameters, or this rank's shards of them."""
        return [p.data for p in self.named.values()]

    def whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Whole parameters by name from tensors shaped like `tensors()`; every rank must ask."""
        return dict(zip(self.named, tensors, strict=True))

    def own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        """The inverse of `whole`: this rank's tensors."""
        return [whole[name] for name in self.named]

    def state(self) -> dict[str, Any]:
        """The optimiser's state, or this rank's part of it where `sharded`."""
        return self.optimiser.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.optimiser.load_state_dict(state)


class Zero:
    """DeepSpeed ZeRO: optimiser state (1), gradients (2) and parameters (3) are cut into one shard per process.

    Sharding flattens parameters, so Grassmann frames, which are matrices on a manifold, are hidden from it (held as
    buffers with a gradient) and reduced here.
    """

    sharded = True

    def __init__(
        self, world: World, core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, stage: int
    ) -> None:
        import deepspeed

        # On CPUs DeepSpeed would compile a shared-memory all-reduce at first use; gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.world, self.stage, self.parts_of_batch = world, stage, config.accumulate
        self.base = config.lr
        self.named: dict[str, Any] = dict(_dense(core))  # stage 3 gives parameters attributes of its own
        self.frames = list(hide_frames(core).values())
        if config.compile:
            core.compile()
        self.optimiser = AdamAtan2(groups, config.lr, config.betas)
        self.engine, *_ = deepspeed.initialize(
            model=core,
            optimizer=self.optimiser,
            config={
                "train_batch_size": config.batch,
                "train_micro_batch_size_per_gpu": config.batch // (world.size * config.accumulate),
                "gradient_accumulation_steps": config.accumulate,
                "gradient_clipping": config.clip or 0.0,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 2**31,
            },
        )
        self.module: nn.Module = self.engine
        # Setting up may take a trial step to create the states: the first real step must find none.
        self.optimiser.state.clear()

    def parts(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        # DeepSpeed averages over ranks and over accumulated parts.
        self.engine.backward(loss * (self.world.size * self.parts_of_batch))
        if not last:
            self.engine.step()
        else:
            for frame in self.frames:
                if frame.grad is not None:
                    dist.all_reduce(frame.grad)
                    frame.grad /= self.world.size

    def gradient_norms(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(p).norm() for name, p in self.named.items()}

    def step(self, rate: float) -> Tensor:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate * self.base
        self.engine.step()
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.world.device)

    def tensors(self) -> list[Tensor]:
        return [p.ds_tensor.data if self.stage == 3 else p.data for p in self.named.values()]

    def whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        if self.stage < 3:
            return dict(zip(self.named, tensors, strict=True))
        found = {}
        for (name, p), shard in zip(self.named.items(), tensors, strict=True):
            shards = [torch.empty_like(shard) for _ in range(self.world.size)]
            dist.all_gather(shards, shard.contiguous())
            found[name] = torch.cat(shards)[: p.ds_numel].view(p.ds_shape)
        return found

    def own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        if self.stage < 3:
            return [whole[name] for name in self.named]
        found = []
        for name, p in self.named.items():
            size = p.ds_tensor.numel()
            padded = nn.functional.pad(whole[name].flatten(), (0, self.world.size * size - p.ds_numel))
            found.append(padded[self.world.rank * size : (self.world.rank + 1) * size])
        return found

    def state(self) -> dict[str, Any]:
        return {"shards": [dict(self.optimiser.state[shard]) for shard in self._shards()]}

    def load_state(self, state: dict[str, Any]) -> None:
        for shard, saved in zip(self._shards(), state["shards"], strict=True):
            self.optimiser.state[shard] = saved

    def _shards(self) -> list[Tensor]:
        """The flat float32 tensors that the optimiser steps on this rank."""
        sharded = self.engine.optimizer
        return sharded.fp32_partitioned_groups_flat if self.stage == 3 else sharded.single_partition_of_fp32_groups


def refuse_sharing(world: World, config: TrainConfig) -> None:
    """Refuse a strategy that these processes cannot follow, and a batch that does not divide among them."""
    world.rows(config.batch, config.accumulate)
    if config.strategy == "ddp":
        return
    if world.size == 1:
        raise ValueError("ZeRO shards over several processes: start them with torchrun, or use --strategy ddp")
    if config.compile and config.strategy == "zero3":
        raise ValueError("ZeRO stage 3 gathers parameters in hooks that do not compile: use --no-compile with it")
    if find_spec("deepspeed") is None:
        raise ValueError(
            f"--strategy {config.strategy} needs DeepSpeed, which is not there: pip install 'jpmhc[deepspeed]'"
        )


def share(world: World, core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig) -> Replicas | Zero:
    """The core under the configured strategy, with its optimiser over `groups`."""
    if config.strategy == "ddp":
        return Replicas(world, core, groups, config)
    return Zero(world, core, groups, config, int(config.strategy.removeprefix("zero")))


def hide_frames(core: nn.Module) -> dict[str, Tensor]:
    """Turn frames from parameters into buffers of the same names: still in the state dict, no longer sharded."""
    frames = grassmann_frames(core)
    for name, frame in frames.items():
        path, _, leaf = name.rpartition(".")
        owner = core.get_submodule(path)
        if leaf in owner._parameters:
            del owner._parameters[leaf]
            owner.register_buffer(leaf, frame)
    return frames


def _dense(core: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that AdamAtan2 steps: all but the frames."""
    frames = grassmann_frames(core)
    for name, p in core.named_parameters():
        if name not in frames:
            yield name, p
