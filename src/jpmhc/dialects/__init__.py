"""Convert the weights of published models to this package's connections, and back to the models' names."""

from jpmhc.dialects import deepseek_v4, deepseek_v41, glm5_next, hy_v4, liger, megatron, qwen4_exp
from jpmhc.dialects.accelerate import DIALECTS, accelerate

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
