"""Search for the sets of a few permutations that mix streams fastest, as generating sets of the symmetric group.

A rank is a permutation's row number in `symmetric_group.elements`. λ₂ is the second largest eigenvalue, in absolute
value, of the random walk that multiplies by a random permutation of the set; the gap is 1 − |λ₂|. Two sets are in one
class if a symmetry of the group maps one to the other.

`search.py` answers a `Question` by `exhaustive_search.py` or by `local_search.py`. `subset_orbits.py`, `pruning.py` and
`exact_radius.py` make the exhaustive search fast and its answer exact. `random_walk.py` computes spectral gaps.
`symmetric_group.py` and `representations.py` implement the group and its representations.
"""

from jpmhc.paper.generators.random_walk import spectral_gap, stream_gap
from jpmhc.paper.generators.search import best_generating_set

__all__ = ["best_generating_set", "spectral_gap", "stream_gap"]
