"""mHC-lite (arXiv 2601.05732): mixtures of all n! permutations, which are doubly stochastic without iterating."""

import itertools

import torch

from jpmhc import modes
from jpmhc.mixers.permutation import Permutation

MOST_PERMUTED = 5  # 120 permutations; six streams would need 720 logits


class MHCLite(Permutation):
    """Softmax mixtures of all n! permutation matrices; they come close to every doubly stochastic matrix (Birkhoff)."""

    name = "mhc_lite"

    def __init__(self, streams: int) -> None:
        with modes.with_real_numbers():
            basis = torch.tensor(list(itertools.permutations(range(streams))), device="cpu")
        super().__init__(streams, basis=basis)

    @classmethod
    def why_not(cls, streams: int) -> str | None:
        if streams > MOST_PERMUTED:
            return (
                f"the mhc_lite mixer keeps all n! permutations and takes at most {MOST_PERMUTED} streams, got {streams}"
            )
        return super().why_not(streams)
