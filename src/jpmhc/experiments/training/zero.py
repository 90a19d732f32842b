"""Training with DeepSpeed's ZeRO: optimiser state, gradients and parameters are cut into one shard per process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.contents import require_parameter_state
from jpmhc.experiments.training.distributed import DistributedCore, dense_parameters
from jpmhc.experiments.training.processes import World
from jpmhc.optim import AdamAtan2
from jpmhc.optim.grassmannian import grassmann_frames


class Zero(DistributedCore):
    """A core whose optimiser state (stage 1), gradients (2) and parameters (3) are sharded by DeepSpeed.

    Sharding flattens parameters, so Grassmann frames, which are matrices on a manifold, are hidden from it (kept as
    buffers with a gradient) and reduced here.
    """

    sharded = True

    def __init__(
        self, world: World, core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, stage: int
    ) -> None:
        import deepspeed

        # On CPUs DeepSpeed would compile a shared-memory all-reduce at first use; gloo needs no compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.world, self.stage, self.accumulate = world, stage, config.accumulate
        self.base = config.lr
        self.named: dict[str, Any] = dict(dense_parameters(core))  # stage 3 gives parameters attributes of its own
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
        # Setting up may take a trial step to create the states: the first real step must find none.
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
        return [p.ds_tensor.data if self.stage == 3 else p.data for p in self.named.values()]

    def gather_whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        if self.stage < 3:
            return dict(zip(self.named, tensors, strict=True))
        found = {}
        for (name, p), shard in zip(self.named.items(), tensors, strict=True):
            shards = [torch.empty_like(shard) for _ in range(self.world.size)]
            dist.all_gather(shards, shard.contiguous())
            found[name] = torch.cat(shards)[: p.ds_numel].view(p.ds_shape)
        return found

    def cut_own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        if self.stage < 3:
            return [whole[name] for name in self.named]
        found = []
        for name, p in self.named.items():
            size = p.ds_tensor.numel()
            padded = nn.functional.pad(whole[name].flatten(), (0, self.world.size * size - p.ds_numel))
            found.append(padded[self.world.rank * size : (self.world.rank + 1) * size])
        return found

    def optimiser_state(self) -> dict[str, Any]:
        return {"shards": [dict(self.optimiser.state[shard]) for shard in self._shards()]}

    def load_optimiser_state(self, saved: dict[str, Any]) -> None:
        for shard, values in zip(self._shards(), saved["shards"], strict=True):
            require_parameter_state(values, shard, AdamAtan2.STATE, "a shard")
            self.optimiser.state[shard] = values

    def _shards(self) -> list[Tensor]:
        """Return the flat float32 tensors that the optimiser steps on this process."""
        sharded = self.engine.optimizer
        return sharded.fp32_partitioned_groups_flat if self.stage == 3 else sharded.single_partition_of_fp32_groups


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
