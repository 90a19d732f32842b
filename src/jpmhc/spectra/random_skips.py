"""Random skips of a kind."""

import torch
from torch import Tensor

from jpmhc import mixers
from jpmhc.checks import choice, fits_memory, to_whole_number
from jpmhc.manifolds import grassmann

SKIPS = (*mixers.MIXERS, *mixers.ENSEMBLES)
_ALIVE = 12  # arrays of all skips that are alive at the same time when a network is solved


def sample_skips(mixer: str, count: int, streams: int, seed: int, rank: int | None = None) -> Tensor:
    """Draw random skips of one kind. [count, n, n]

    Args:
        mixer: A mixer's name, or that of its random matrices: one of `SKIPS`.
        count: How many skips to draw.
        streams: How many streams n each of them mixes.
        seed: The same seed gives the same skips.
        rank: The dimension of the subspace of "grassmann" skips; half the streams if None.
    """
    choice(mixer, SKIPS, "random skip")
    if rank is not None and mixer != "grassmann":
        raise ValueError(f"rank is the dimension of a grassmann skip's subspace; a {mixer} skip has none")
    fits_memory(_ALIVE * 8 * count * streams**2, f"a network of {count} layers and {streams} streams")
    generator = torch.Generator().manual_seed(seed)
    if rank is not None:
        return grassmann.sample(streams, to_whole_number(rank, "rank"), (count,), generator=generator)
    return mixers.sample_skips(mixer, streams, (count,), generator=generator)
