"""accelerate: a model that has hyper-connections runs them on our kernels."""

from typing import Any

from torch import nn

from jpmhc.dialects.layers import link_layers
from jpmhc.dialects.registry import DIALECTS


def accelerate(model: nn.Module, kernels: str = "auto") -> nn.Module:
    """Let a `transformers` model of a known dialect run its hyper-connections on the fused kernels, in place.

    The model keeps its parameters and their names; its logits stay equal up to rounding. On a GPU the fused kernels run
    where they cover the case (for Qwen3.8-Flash-Next compiled functions do), elsewhere the PyTorch reference does.

    Args:
        model: A model with the decoder layers of one of `jpmhc.dialects.DIALECTS`.
        kernels: As in `HyperConnection`: `"auto"`, `"fused"` or `"reference"`.

    Returns:
        The same model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    runners: dict[str, Any] = {}
    for dialect in DIALECTS.values():
        runners |= getattr(dialect, "RUNNERS", {})
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in runners]
    if not found:
        known = ", ".join(sorted(name for name in runners if "Layer" in name))
        raise ValueError(f"{type(model).__name__} has no layers of a known dialect; the known ones are {known}")
    for name, module in found:
        if "forward" in vars(module):
            raise ValueError(f"{name or 'the model'} is accelerated already, or has another forward than its class's")
    made = [runners[type(module).__name__](module, name, kernels) for name, module in found]
    link_layers([(name, runner) for (name, _), runner in zip(found, made, strict=True)])
    for (_, module), runner in zip(found, made, strict=True):
        module.forward = runner.forward  # a bound method: a copy of the model is bound to the copy's modules
    return model
