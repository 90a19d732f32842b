"""Generating sets of the symmetric group: which few permutations mix streams fastest.

`search.py` answers a `Question` by `exhaustive_search.py` or by `local_search.py`. `subset_orbits.py`, `pruning.py` and
`exact_radius.py` make the exhaustive search fast and its answer exact; `random_walk.py` has the spectral gap itself,
`symmetric_group.py` and `representations.py` have the group.
"""

from jpmhc.paper.generators.random_walk import spectral_gap, stream_gap
from jpmhc.paper.generators.search import best_generating_set

__all__ = ["best_generating_set", "spectral_gap", "stream_gap"]
