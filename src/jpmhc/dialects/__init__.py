"""Convert the weights of published models to this package's connections, and back to the models' names.

A dialect is a family of models whose connections have the same formulas, and tensors with the same names. A site is the
place of a connection or a head in a model, such as "layers.0.attn" or "head". A new dialect needs a file in this
folder, and here an import, its name in `__all__` and an entry in `DIALECTS`.
"""

from types import ModuleType

from torch import nn

from jpmhc.dialects import deepseek_v4, deepseek_v41, glm5_next, hy_v4, liger, megatron, qwen4_exp
from jpmhc.dialects.layers import Runners, link_layers

__all__ = [
    "DIALECTS",
    "accelerate",
    "deepseek_v4",
    "deepseek_v41",
    "glm5_next",
    "hy_v4",
    "liger",
    "megatron",
    "qwen4_exp",
]

DIALECTS: dict[str, ModuleType] = {
    dialect.__name__.rpartition(".")[2]: dialect
    for dialect in (deepseek_v4, deepseek_v41, glm5_next, hy_v4, liger, megatron, qwen4_exp)
}


def accelerate(model: nn.Module, kernels: str = "auto") -> nn.Module:
    """Run the hyper-connections of a `transformers` model of a known dialect on the fused kernels, in place.

    The model keeps its parameters and their names, and its logits stay equal up to rounding. On a GPU the fused kernels
    run if they cover the model (for Qwen3.8-Flash-Next compiled functions run), otherwise the PyTorch reference runs.

    Args:
        model: A model with the decoder layers of one of `jpmhc.dialects.DIALECTS`.
        kernels: As in `HyperConnection`: `"auto"`, `"fused"` or `"reference"`.

    Returns:
        The same model.

    Example:
        >>> import jpmhc
        >>> from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
        >>> sizes = {"vocab_size": 32, "hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
        >>> heads = {"num_attention_heads": 2, "head_dim": 16, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8}
        >>> experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
        >>> model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, **heads, **experts))
        >>> jpmhc.accelerate(model) is model
        True
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    runners: Runners = {}
    for dialect in DIALECTS.values():
        runners |= getattr(dialect, "RUNNERS", {})
    modules = [(name, module) for name, module in model.named_modules() if type(module).__name__ in runners]
    if not modules:
        known = ", ".join(sorted(name for name in runners if "Layer" in name))
        raise ValueError(f"{type(model).__name__} has no layers of a known dialect; the known ones are {known}")
    for name, module in modules:
        if "forward" in vars(module):
            raise ValueError(f"{name or 'the model'} is accelerated already, or has another forward than its class's")
    replacements = [(name, runners[type(module).__name__](module, name, kernels)) for name, module in modules]
    link_layers(replacements)
    for (_, module), (_, runner) in zip(modules, replacements, strict=True):
        module.forward = runner.forward  # a bound method: a copy of the model is bound to the copy's modules
    return model
