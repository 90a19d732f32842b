"""Sets of matrices as pure functions: project onto them, say how far from them, sample them."""

from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation

__all__ = ["birkhoff", "grassmann", "orthogonal", "permutation"]
