"""Which parameters weight decay may touch."""

import sys
from typing import Any

from torch import nn

from jpmhc import checks
from jpmhc.connections.coefficients import CoefficientMap


def parameter_groups(model: nn.Module, weight_decay: float, *, projections_apart: bool = False) -> list[dict[str, Any]]:
    """Two optimiser groups: matrices with weight decay; mixing logits, frames, norms and biases without.

    Decay would pull mixing logits to zero over a long run: to equal reads, and for mixtures to the uniform skip. The
    projection behind dynamic coefficients does decay: towards the static coefficients.

    Args:
        model: Any module with hyper-connections inside.
        weight_decay: Of the matrices.
        projections_apart: Return three groups, the second of them the coefficients' projections, with weight decay. An
            optimiser for hidden matrices such as Muon wants the first group; the other two are for AdamW.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"parameter_groups takes the model itself, got {type(model).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'the model'} is in FullyShardedDataParallel already, which flattens matrices, so that they "
                "cannot be told from biases: call parameter_groups before it (with use_orig_params=True), or take "
                "fully_shard"
            )
    checks.switch(projections_apart, "projections_apart")
    checks.non_negative_number(weight_decay, "weight_decay")
    maps = [module for module in model.modules() if isinstance(module, CoefficientMap)]
    mixing = {id(parameter) for one in maps for parameter in one.parameters() if parameter is not one.weight}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (kept if parameter.ndim < 2 or id(parameter) in mixing else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    if projections_apart:
        projections = {id(one.weight) for one in maps if one.weight is not None}
        groups[0]["params"] = [parameter for parameter in decayed if id(parameter) not in projections]
        apart = [parameter for parameter in decayed if id(parameter) in projections]
        groups.insert(1, {"params": apart, "weight_decay": weight_decay})
    return groups
