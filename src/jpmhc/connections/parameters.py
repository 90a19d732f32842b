"""Which parameters weight decay may touch."""

from typing import Any

from torch import nn

from jpmhc.connections.coefficients import CoefficientMap


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimiser groups: matrices with weight decay; mixing logits, frames, norms and biases without.

    Decay would pull mixing logits to zero over a long run: to equal reads, and for mixtures to the uniform skip. The
    projection behind dynamic coefficients does decay: towards the static coefficients.
    """
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must not be negative, infinite or NaN, got {weight_decay}")
    mixing = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, CoefficientMap)
        for parameter in module.parameters()
        if parameter is not module.weight
    }
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (kept if parameter.ndim < 2 or id(parameter) in mixing else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
