"""Every dialect by its name. A new one is a file beside this one and an entry here."""

from types import ModuleType

from jpmhc.dialects import deepseek_v4, deepseek_v41, glm5_next, hy_v4, liger, megatron, qwen4_exp

DIALECTS: dict[str, ModuleType] = {
    "deepseek_v4": deepseek_v4,
    "deepseek_v41": deepseek_v41,
    "glm5_next": glm5_next,
    "hy_v4": hy_v4,
    "liger": liger,
    "megatron": megatron,
    "qwen4_exp": qwen4_exp,
}
