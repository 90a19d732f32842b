"""Residual mixers, one folder each: the PyTorch form, the Triton form, the start, the set, how the theory draws it."""

from jpmhc.mixers.base import Mixer, SettingsModule, TritonForm  # noqa: F401
from jpmhc.mixers.registry import *  # noqa: F403
