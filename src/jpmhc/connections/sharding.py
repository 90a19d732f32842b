"""Fully sharded training (FSDP2) of models with hyper-connections."""

from typing import Any

from torch import nn

from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.connections.hyper import HyperConnection


def shard_connections(model: nn.Module, **options: Any) -> None:
    """Shard every connection's sublayer and coefficients with `torch.distributed.fsdp.fully_shard`.

    Call it before `fully_shard(model, **options)`, which takes care of the rest of the model. The coefficients of all
    connections form one group of their own that no mixed-precision policy reaches: they stay float32, are gathered
    once a step, and the fused kernels run as on one device. To shard a connection as a whole would put FSDP's hooks
    between neighbours that are fused, and the policy would round the coefficients.

    Args:
        model: Any module with `HyperConnection`s inside.
        options: For `fully_shard` of the sublayers: `mesh`, `mp_policy`, `reshard_after_forward`, …
    """
    from torch.distributed.fsdp import fully_shard

    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a module with hyper-connections, got {type(model).__name__}")
    maps: list[nn.Module] = [module for module in model.modules() if isinstance(module, CoefficientMap)]
    if not maps:
        raise ValueError(f"{type(model).__name__} has no hyper-connections to shard")
    fully_shard(maps, mesh=options.get("mesh"), reshard_after_forward=False)
    for module in list(model.modules()):
        sublayer = module.sublayer if isinstance(module, HyperConnection) else None
        if isinstance(sublayer, nn.Module) and any(True for _ in sublayer.parameters()):
            fully_shard(sublayer, **options)
