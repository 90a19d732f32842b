"""Choosing how several processes train one core: replicas (DDP), or shards (DeepSpeed's ZeRO stages)."""

from importlib.util import find_spec
from typing import Any

from torch import nn

from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.distributed import DistributedCore
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.replicas import Replicas
from jpmhc.experiments.training.zero import Zero


def refuse_strategy(config: TrainConfig, world: World) -> None:
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


def distribute_core(
    core: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, world: World
) -> DistributedCore:
    """Spread a core over the processes by the configured strategy, with an optimiser over the parameter `groups`."""
    if config.strategy == "ddp":
        return Replicas(world, core, groups, config)
    return Zero(world, core, groups, config, int(config.strategy.removeprefix("zero")))
