"""Strategies for training one core on several processes: replicas (DDP), or shards (DeepSpeed's ZeRO stages).

The core is the recursive model without its table of puzzle vectors. With every strategy, each process works on a
contiguous range of every batch's rows, gradients are summed over the rows of all processes, and every process makes the
same updates of puzzle vectors and Grassmann frames (the Grassmann mixer's parameters with orthonormal columns). Dense
parameters are the core's other parameters.
"""

import contextlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.contents import Content, require_optimiser_state, require_parameter_state
from jpmhc.experiments.training.processes import World
from jpmhc.optim import AdamAtan2
from jpmhc.optim.base import ParameterGroup
from jpmhc.optim.grassmannian import grassmann_frames


class Replicas:
    """A core with a copy on every process (DDP, or a single process), and the optimiser of its dense parameters."""

    sharded = False
    """Whether each process has only a shard of the optimiser's state."""
    module: nn.Module  # module to call for a forward pass

    def __init__(self, world: World, core: nn.Module, groups: list[ParameterGroup], config: TrainConfig) -> None:
        self.world, self.clip = world, config.clip
        self.named = dict(dense_parameters(core))
        self.optimiser = AdamAtan2(groups, config.lr, config.betas)
        self.base = config.lr
        if config.compile:
            core.compile()
        self.module = core
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            # Buffers never change in training, so they are not sent. Newer releases of PyTorch renamed the option.
            names = inspect.signature(DistributedDataParallel).parameters
            sending: dict[str, Any] = {
                "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
            }
            self.module = DistributedDataParallel(core, device_ids=devices, gradient_as_bucket_view=True, **sending)

    def exchanging_gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one part of the batch.

        Processes exchange gradients only in the last part.
        """
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of `loss`, the losses' sum over a part of the batch, divided by the batch size.

        `last` says whether this is the last part of the batch.
        """
        # DDP averages over processes, so the loss is multiplied by their number, which is exact for 2, 4, 8, ….
        (loss * self.world.size).backward()

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the norm of each parameter's gradient over all rows; every process must call this method."""
        gradients = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        return dict(zip(gradients, torch._foreach_norm(list(gradients.values()))))

    def step(self, rate: float) -> Tensor:
        """Clip the gradients, update the dense parameters at `rate` times the learning rate, and clear the gradients.

        Returns the gradient's norm before clipping.
        """
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
        """Return the dense parameters or, with ZeRO stage 3, this process's shards of the dense parameters."""
        return [p.data for p in self.named.values()]

    def gather_whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return whole parameters by name from tensors shaped like `tensors()`; every process must call this method."""
        return dict(zip(self.named, tensors, strict=True))

    def cut_own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        """Return this process's part of whole parameters (by name), shaped like `tensors()`; inverts `gather_whole`."""
        return [whole[name] for name in self.named]

    def optimiser_state(self) -> Content:
        """Return the optimiser's state or, if it is sharded, this process's shard of the state."""
        return self.optimiser.state_dict()

    def load_optimiser_state(self, saved: Content) -> None:
        """Restore a state that `optimiser_state` returned."""
        require_optimiser_state(self.optimiser, saved, AdamAtan2.STATE)
        self.optimiser.load_state_dict(saved)


class Zero(Replicas):
    """A core whose optimiser state (stage 1), gradients (2) and parameters (3) are sharded by DeepSpeed.

    Sharding flattens parameters, but Grassmann frames must stay matrices. So frames are turned into buffers, which
    DeepSpeed does not shard, and this class averages their gradients.
    """

    sharded = True

    def __init__(
        self, world: World, core: nn.Module, groups: list[ParameterGroup], config: TrainConfig, stage: int
    ) -> None:
        import deepspeed

        # On CPUs DeepSpeed would compile a shared-memory all-reduce at first use; gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.world, self.stage, self.accumulate = world, stage, config.accumulate
        self.base = config.lr
        self.named: dict[str, Any] = dict(dense_parameters(core))  # stage 3 adds attributes such as `ds_tensor`
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
        self.module = self.engine
        # DeepSpeed's set-up may make a trial step that creates states; the first real step must begin without.
        self.optimiser.state.clear()

    def backward(self, loss: Tensor, last: bool) -> None:
        # DeepSpeed averages over processes and over accumulated parts.
        self.engine.backward(loss * (self.world.size * self.accumulate))
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
        return [p.ds_tensor.data for p in self.named.values()] if self.stage == 3 else super().tensors()

    def gather_whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        if self.stage < 3:
            return super().gather_whole(tensors)
        parameters = {}
        for (name, p), shard in zip(self.named.items(), tensors, strict=True):
            shards = [torch.empty_like(shard) for _ in range(self.world.size)]
            dist.all_gather(shards, shard.contiguous())
            parameters[name] = torch.cat(shards)[: p.ds_numel].view(p.ds_shape)
        return parameters

    def cut_own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        if self.stage < 3:
            return super().cut_own(whole)
        own = []
        for name, p in self.named.items():
            size = p.ds_tensor.numel()
            padded = nn.functional.pad(whole[name].flatten(), (0, self.world.size * size - p.ds_numel))
            own.append(padded[self.world.rank * size : (self.world.rank + 1) * size])
        return own

    def optimiser_state(self) -> Content:
        return {"shards": [dict(self.optimiser.state[shard]) for shard in self._shards()]}

    def load_optimiser_state(self, saved: Content) -> None:
        for shard, values in zip(self._shards(), saved["shards"], strict=True):
            require_parameter_state(values, shard, AdamAtan2.STATE, "a shard")
            self.optimiser.state[shard] = values

    def _shards(self) -> list[Tensor]:
        """Return the flat float32 tensors that this process's optimiser updates."""
        sharded = self.engine.optimizer
        return sharded.fp32_partitioned_groups_flat if self.stage == 3 else sharded.single_partition_of_fp32_groups


def refuse_strategy(config: TrainConfig, world: World) -> None:
    """Raise a ValueError if the processes cannot use the strategy, or cannot divide the batch evenly."""
    world.rows(config.batch, config.accumulate)
    if config.strategy == "ddp":
        return
    if world.size == 1:
        raise ValueError("ZeRO shards over several processes: start them with torchrun, or use --strategy ddp")
    if config.compile and config.strategy == "zero3":
        raise ValueError("ZeRO stage 3 gathers parameters in hooks that do not compile: use --no-compile with it")
    if find_spec("deepspeed") is None:
        raise ValueError(
            f"--strategy {config.strategy} needs DeepSpeed, which is not installed: pip install 'jpmhc[deepspeed]'"
        )


def distribute_core(core: nn.Module, groups: list[ParameterGroup], config: TrainConfig, world: World) -> Replicas:
    """Return the core and an optimiser of the parameter `groups`, distributed over processes by `config.strategy`."""
    if config.strategy == "ddp":
        return Replicas(world, core, groups, config)
    return Zero(world, core, groups, config, int(config.strategy.removeprefix("zero")))


def dense_parameters(core: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that AdamAtan2 updates: all parameters except Grassmann frames."""
    frames = grassmann_frames(core)
    for name, p in core.named_parameters():
        if name not in frames:
            yield name, p


def hide_frames(core: nn.Module) -> dict[str, Tensor]:
    """Turn a core's Grassmann frames into buffers, which are not sharded, and return the frames by name."""
    frames = grassmann_frames(core)
    for name, frame in frames.items():
        path, _, leaf = name.rpartition(".")
        owner = core.get_submodule(path)
        if leaf in owner._parameters:
            del owner._parameters[leaf]
            owner.register_buffer(leaf, frame)
    return frames
