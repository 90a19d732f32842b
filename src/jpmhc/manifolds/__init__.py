"""Sets of matrices: for each set, functions that project onto it, measure the distance from it and sample it."""

from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation

__all__ = ["birkhoff", "grassmann", "orthogonal", "permutation"]
