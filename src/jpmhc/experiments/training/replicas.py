"""Training with replicas: every process holds the whole model, and DDP averages their gradients."""

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.contents import require_optimiser_state
from jpmhc.experiments.training.distributed import DistributedCore, dense_parameters
from jpmhc.experiments.training.processes import World
from jpmhc.optim import AdamAtan2


class Replicas(DistributedCore):
    """A core of which every process holds a copy; a single process does the same without DDP."""

    sharded = False

    def __init__(self, world: World, core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        self.world, self.clip = world, config.clip
        self.named = dict(dense_parameters(core))
        self.optimiser = AdamAtan2(groups, config.lr, config.betas)
        self.base = config.lr
        if config.compile:
            core.compile()
        self.module = core
        if world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            # No buffer changes in training, so none is sent; newer releases of PyTorch call the option otherwise.
            names = inspect.signature(DistributedDataParallel).parameters
            sending: dict[str, Any] = {
                "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
            }
            self.module = DistributedDataParallel(core, device_ids=devices, gradient_as_bucket_view=True, **sending)

    def exchanging_gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        # DDP averages over processes, so each one's loss is scaled up first; both factors are exact for 2, 4, 8 ….
        (loss * self.world.size).backward()

    def gradient_norms(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        return dict(zip(found, torch._foreach_norm(list(found.values()))))

    def step(self, rate: float) -> Tensor:
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
        return [p.data for p in self.named.values()]

    def gather_whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.named, tensors, strict=True))

    def cut_own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        return [whole[name] for name in self.named]

    def optimiser_state(self) -> dict[str, Any]:
        return self.optimiser.state_dict()

    def load_optimiser_state(self, saved: dict[str, Any]) -> None:
        require_optimiser_state(self.optimiser, saved, AdamAtan2.STATE)
        self.optimiser.load_state_dict(saved)
