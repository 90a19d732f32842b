"""Prepare models with hyper-connections for many processes: full sharding (FSDP2) and tensor parallelism."""

import sys
from typing import TYPE_CHECKING, Any

from torch import nn

from jpmhc import checks
from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.connections.ends import StreamExpansion, StreamHead
from jpmhc.connections.hyper import HyperConnection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_connections(model: nn.Module, *, sublayers: bool = True, **options: Any) -> None:
    """Shard every connection's sublayer and coefficients with `torch.distributed.fsdp.fully_shard`.

    Call it before `fully_shard(model, **options)`, which shards the rest of the model. The coefficients of all
    connections form one group without a mixed-precision policy: they stay float32 and are gathered once per step. So
    the fused kernels run as on one device; FSDP's hooks around a whole connection would separate its write from the
    next read. For connections without a sublayer, as in a wrapped model, the layer around them is sharded.

    Args:
        model: Any module with `HyperConnection`s inside.
        sublayers: Whether to shard sublayers and layers. False: only the coefficients are sharded, and you call
            `fully_shard` for the layers.
        options: Options of `fully_shard` for the sublayers and layers: `mesh`, `mp_policy`, `reshard_after_forward`, …

    Example:
        >>> import jpmhc, torch, torch.distributed as dist
        >>> from torch import nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = nn.Sequential(*(jpmhc.HyperConnection(nn.Linear(8, 8), 8, index=k) for k in range(2)))
        >>> jpmhc.shard_connections(model)
        >>> _ = fully_shard(model)
        >>> model(torch.randn(3, 4, 8)).shape
        torch.Size([3, 4, 8])
        >>> dist.destroy_process_group()
    """
    maps: list[nn.Module] = [*_find_maps(model)]
    checks.switch(sublayers, "sublayers")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is in FullyShardedDataParallel, which shards connections itself: "
                "shard_connections is for fully_shard"
            )
        if fsdp is not None and isinstance(module, fsdp.FSDPModule) and any(one in maps for one in module.modules()):
            raise ValueError(
                f"fully_shard was already applied to {name or 'the model'}, which has connections inside: call "
                "shard_connections first, and fully_shard for the layers around them after it"
            )
    from torch.distributed.fsdp import fully_shard

    fully_shard(maps, mesh=options.get("mesh"), reshard_after_forward=False)
    for module in _find_sharded(model) if sublayers else ():
        fully_shard(module, **options)


def parallelize_connections(model: nn.Module, mesh: "DeviceMesh", *, sequence_parallel: bool = False) -> None:
    """Prepare the connections for tensor parallelism: their weights become DTensors, equal on all processes of a mesh.

    Call `torch.distributed.tensor.parallel.parallelize_module` for the sublayers, and `shard_connections` and
    `fully_shard` afterwards. Streams may be plain tensors or DTensors.

    Args:
        model: Any module with `HyperConnection`s inside.
        mesh: The processes that share the sublayers' weights.
        sequence_parallel: Whether each process has the streams of other tokens, so that the gradients of the weights
            are sums over the processes. False: each process has the streams of all tokens.

    Example:
        >>> import jpmhc, torch, torch.distributed as dist
        >>> from torch import nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = nn.Sequential(jpmhc.HyperConnection(nn.Linear(8, 8), 8, index=1))
        >>> jpmhc.parallelize_connections(model, mesh, sequence_parallel=True)
        >>> type(model[0].map.bias).__name__, model(torch.randn(3, 4, 8)).shape
        ('DTensor', torch.Size([3, 4, 8]))
        >>> dist.destroy_process_group()
    """
    _find_maps(model)
    checks.switch(sequence_parallel, "sequence_parallel")
    from torch.distributed.tensor import distribute_tensor

    for name, module in model.named_modules():
        if isinstance(module, HyperConnection):
            if list(module.mixer.parameters()):
                raise ValueError(
                    f"{name}: the mixer {type(module.mixer).__name__} has parameters of its own, which tensor "
                    "parallelism does not support: choose dynamic=True"
                )
            parts: list[Any] = [module.map, *([] if module.layer_norm is None else [module.layer_norm])]
        elif isinstance(module, StreamHead | StreamExpansion):
            parts = [module]
        else:
            continue
        for part in parts:
            part.tokens_apart = sequence_parallel
            for key, parameter in part.named_parameters(recurse=False):
                equal = distribute_tensor(parameter.detach(), mesh)
                setattr(part, key, nn.Parameter(equal, requires_grad=parameter.requires_grad))


def _find_maps(model: nn.Module) -> list[CoefficientMap]:
    """Return the `CoefficientMap` of every connection. Raise an error if the model has no connections."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a module with hyper-connections, got {type(model).__name__}")
    maps = [module for module in model.modules() if isinstance(module, CoefficientMap)]
    if not maps:
        raise ValueError(f"{type(model).__name__} has no hyper-connections")
    return maps


def _find_sharded(model: nn.Module) -> list[nn.Module]:
    """Return the sublayers of all connections and, for connections without a sublayer, the layers around them.

    A connection's layer is the innermost module around it that has parameters outside connections. The model
    as a whole is never returned.
    """
    modules = dict(model.named_modules())
    connections = {name: module for name, module in modules.items() if isinstance(module, HyperConnection)}
    own = {parameter for module in connections.values() for parameter in module.parameters()}
    sharded: list[nn.Module] = []
    for name, connection in connections.items():
        if isinstance(connection.sublayer, nn.Module):
            if any(True for _ in connection.sublayer.parameters()):
                sharded.append(connection.sublayer)
        elif connection.sublayer is None:
            while name and own.issuperset(modules[name].parameters()):
                name = name.rpartition(".")[0]
            if name and modules[name] not in sharded:
                sharded.append(modules[name])
    return sharded
