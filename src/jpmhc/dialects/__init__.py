"""Models that have hyper-connections already: their weights become our connections and back."""

from jpmhc.dialects import deepseek_v4, deepseek_v41, glm5_next, hy_v4, liger, megatron, qwen4_exp
from jpmhc.dialects.accelerate import accelerate
from jpmhc.dialects.registry import DIALECTS

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
