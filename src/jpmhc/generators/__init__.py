"""Generating sets of the symmetric group: which few permutations mix streams fastest."""

from jpmhc.generators.generating_sets import best_generating_set
from jpmhc.generators.walk_spectrum import spectral_gap, stream_gap

__all__ = ["best_generating_set", "spectral_gap", "stream_gap"]
