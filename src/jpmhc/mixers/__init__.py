"""Residual mixers: NAME.py defines a mixer for PyTorch, NAME_triton.py computes it inside the fused kernels."""

from jpmhc.mixers.base import Mixer, SettingsModule, TritonForm
from jpmhc.mixers.cayley import Cayley
from jpmhc.mixers.circulant import Circulant
from jpmhc.mixers.grassmann import Grassmann
from jpmhc.mixers.identity import Identity
from jpmhc.mixers.kronecker import Kronecker
from jpmhc.mixers.mhc_lite import MHCLite
from jpmhc.mixers.orthostochastic import Orthostochastic
from jpmhc.mixers.permutation import Permutation
from jpmhc.mixers.registry import ENSEMBLES, MIXERS, get_mixer, make_mixer, sample_skips
from jpmhc.mixers.rotation import Rotation
from jpmhc.mixers.sinkhorn import Sinkhorn
from jpmhc.mixers.unconstrained import Unconstrained

__all__ = [
    "ENSEMBLES",
    "MIXERS",
    "Cayley",
    "Circulant",
    "Grassmann",
    "Identity",
    "Kronecker",
    "MHCLite",
    "Mixer",
    "Orthostochastic",
    "Permutation",
    "Rotation",
    "SettingsModule",
    "Sinkhorn",
    "TritonForm",
    "Unconstrained",
    "get_mixer",
    "make_mixer",
    "sample_skips",
]
