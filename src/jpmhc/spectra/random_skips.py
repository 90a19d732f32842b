"""Skips that mixers make: random ones of a kind, and those of given logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from jpmhc import mixers
from jpmhc.checks import fits_memory, require_choice, to_real_tensor, to_whole_number
from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation

SKIPS = (*mixers.MIXERS, *mixers.ENSEMBLES)
_ALIVE = 12  # arrays of all skips that are alive at the same time when a network is solved
_FROM_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "unconstrained": lambda logits: logits,
    "sinkhorn": birkhoff.project,
    "cayley": orthogonal.project,
    "grassmann": grassmann.project,
}


def sample_skips(mixer: str, count: int, streams: int, seed: int, rank: int | None = None) -> Tensor:
    """Draw random skips of one kind. [count, n, n]

    Args:
        mixer: A mixer's name, or that of its random matrices: "bistochastic", "orthogonal", "gaussian".
        count: How many skips to draw.
        streams: How many streams n each of them mixes.
        seed: The same seed gives the same skips.
        rank: The dimension of the subspace of "grassmann" skips; half the streams if None.
    """
    require_choice(mixer, "random skip", SKIPS)
    if rank is not None and mixer != "grassmann":
        raise ValueError(f"rank is the dimension of a grassmann skip's subspace; a {mixer} skip has none")
    fits_memory(_ALIVE * 8 * count * streams**2, f"a network of {count} layers and {streams} streams")
    generator = torch.Generator().manual_seed(seed)
    if rank is not None:
        return grassmann.sample(streams, to_whole_number(rank, "rank"), (count,), generator=generator)
    return mixers.sample_skips(mixer, streams, (count,), generator=generator)


def skips_from_logits(mixer: str, logits: Tensor, basis: Tensor | None = None) -> Tensor:
    """Compute the skips that a mixer makes of its logits. [L, n, n]

    Args:
        mixer: A name in `_FROM_LOGITS`, or "permutation".
        logits: One set per layer: matrices [L, n, n], frames [L, n, p] or weights [L, K].
        basis: The permutations [K, n] that "permutation" mixes.
    """
    logits = to_real_tensor(logits, "logits")
    if (basis is None) == (mixer == "permutation"):
        raise ValueError("the mixer 'permutation' needs the basis [K, n] it mixes, and no other mixer takes one")
    if basis is not None:
        return permutation.mix(logits, basis)
    require_choice(mixer, "mixer from logits", _FROM_LOGITS)
    return _FROM_LOGITS[mixer](logits)
