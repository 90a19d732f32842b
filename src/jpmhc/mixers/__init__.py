"""Residual mixers: NAME.py defines a mixer for PyTorch, NAME_triton.py computes it inside the fused kernels.

A new mixer needs a file in this folder, and here an import, its name in `__all__` and an entry in `MIXERS`. The default
mixer is the default of the argument `mixer` of `HyperConnection`, `wrap` and `torchtitan.add_hyper_connections`.
"""

import torch
from torch import Generator, Tensor

from jpmhc import checks
from jpmhc.mixers.base import Mixer, SettingsModule, TritonForm, check_stream_count
from jpmhc.mixers.cayley import Cayley
from jpmhc.mixers.circulant import Circulant
from jpmhc.mixers.grassmann import Grassmann
from jpmhc.mixers.identity import Identity
from jpmhc.mixers.kronecker import Kronecker
from jpmhc.mixers.mhc_lite import MHCLite
from jpmhc.mixers.orthostochastic import Orthostochastic
from jpmhc.mixers.permutation import Permutation
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

MIXERS: dict[str, type[Mixer]] = {
    mixer.name: mixer
    for mixer in (
        Identity,
        Unconstrained,
        Sinkhorn,
        Cayley,
        Rotation,
        Grassmann,
        Permutation,
        MHCLite,
        Kronecker,
        Orthostochastic,
        Circulant,
    )
}
ENSEMBLES: dict[str, type[Mixer]] = {mixer.ensemble: mixer for mixer in MIXERS.values() if mixer.ensemble is not None}


def get_mixer(name: str) -> type[Mixer]:
    """Return a mixer's class by its name in `MIXERS`, or by MODULE:CLASS for a class of your own.

    >>> get_mixer("cayley").__name__, get_mixer("jpmhc.mixers:Rotation").__name__
    ('Cayley', 'Rotation')
    """
    if not isinstance(name, str) or ":" not in name:
        checks.choice(name, MIXERS, "mixer")
        return MIXERS[name]
    mixer = checks.named_object(name)
    if not isinstance(mixer, type) or not issubclass(mixer, Mixer):
        raise ValueError(f"{name} is not a class derived from jpmhc.mixers.Mixer")
    return mixer


def make_mixer(mixer: str | Mixer, streams: int, dynamic: bool = True) -> Mixer:
    """Return a new mixer by its name (see `get_mixer`), or the given mixer if it is for this number of streams.

    `dynamic` says whether the logits depend on the token.
    """
    if isinstance(mixer, str):
        kind = get_mixer(mixer)
        check_stream_count(kind, streams)
        mixer = kind.by_default(streams, dynamic)
    if not isinstance(mixer, Mixer):
        hint = f": give an object, {mixer.__name__}(…)" if isinstance(mixer, type) and issubclass(mixer, Mixer) else ""
        raise ValueError(f"mixer must be a name ({', '.join(MIXERS)}) or a Mixer, got {checks.quote(mixer)}{hint}")
    if mixer.streams != streams:
        raise ValueError(f"the mixer is for {mixer.streams} streams, the connection has {streams}")
    if type(mixer) not in MIXERS.values():
        _check_own(mixer)
    return mixer


@torch.no_grad()
def _check_own(mixer: Mixer) -> None:
    """Raise a ValueError if `start` or `forward` of a user's own mixer returns a tensor of the wrong shape or type."""
    kind, logits, n = type(mixer).__name__, mixer.logits, mixer.streams
    tensors = [*mixer.parameters(), *mixer.buffers()]
    with torch.device(tensors[0].device if tensors else "cpu"):  # a model that is being loaded is on the meta device
        start = mixer.start()
        if tuple(start.shape) != (logits,):
            raise ValueError(f"{kind}.start must return {logits} logits, got the shape {list(start.shape)}")
        dtype = torch.float64 if torch.float64 in (start.dtype, *(one.dtype for one in tensors)) else torch.float32
        matrices = mixer(start.to(dtype).expand(2, -1))
    if list(matrices.shape) != [2, n, n]:
        given = list(matrices.shape)
        raise ValueError(f"{kind} must turn logits [2, {logits}] into matrices [2, {n}, {n}], got {given}")
    if matrices.dtype != dtype:
        raise ValueError(f"{kind} must return matrices of its logits' type {dtype}, got {matrices.dtype}")


def sample_skips(
    name: str | type[Mixer], streams: int, shape: tuple[int, ...] = (), *, generator: Generator | None = None
) -> Tensor:
    """Draw random skip matrices H. [*shape, n, n]

    `name` is a mixer ("sinkhorn"), the theory's word for random matrices ("bistochastic"), or a class of mixers.
    """
    if isinstance(name, Mixer):
        raise ValueError(f"random skips are drawn by a mixer's class: give {type(name).__name__}, not an object of it")
    if isinstance(name, type) and issubclass(name, Mixer):
        mixer = name
    elif isinstance(name, str) and ":" in name:
        mixer = get_mixer(name)
    else:
        checks.choice(name, [*MIXERS, *ENSEMBLES, "MODULE:CLASS"], "random skip")
        mixer = ENSEMBLES.get(name) or MIXERS[name]
    check_stream_count(mixer, streams)
    skips = mixer.sample(streams, shape, generator=generator)
    if mixer not in MIXERS.values() and skips.shape != (*shape, streams, streams):
        given, needed = list(skips.shape), [*shape, streams, streams]
        raise ValueError(f"{mixer.__name__} must draw matrices {needed} for {streams} streams, got {given}")
    return skips
