"""Mixtures of a few fixed permutations of the streams."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from jpmhc import modes
from jpmhc.manifolds import permutation
from jpmhc.mixers.base import Mixer, TritonForm, make_form, start_logit


class Permutation(Mixer):
    """Softmax mixtures of K permutation matrices, which are doubly stochastic.

    Args:
        streams: n.
        size: K, the size of the paper's basis; n + 2 (at most n!) by default.
        basis: Permutations to use instead of the paper's basis, each as the images of 0..n-1. [K, n]
    """

    name = "permutation"
    basis: Tensor

    def __init__(self, streams: int, size: int | None = None, *, basis: Tensor | None = None) -> None:
        with modes.with_real_numbers():
            if basis is None:
                basis = permutation.basis(streams, min(streams + 2, math.factorial(streams)) if size is None else size)
            elif basis.ndim != 2 or basis.shape[-1] != streams:
                raise ValueError(
                    f"the basis of {streams} streams must have shape [K, {streams}], got {list(basis.shape)}"
                )
            permutation.check_rows(basis)
            perms = tuple(map(tuple, basis.tolist()))
        super().__init__(streams, len(perms))
        self.perms = perms
        if len(set(self.perms)) < len(self.perms):
            raise ValueError("the basis must hold each permutation once")
        self.register_buffer("basis", torch.empty(basis.shape, dtype=torch.long))
        self.reset_parameters()

    @classmethod
    def why_not(cls, streams: int) -> str | None:
        return None if streams > 1 else f"the {cls.name} mixer needs at least two streams, got {streams}"

    def reset_parameters(self) -> None:
        self.basis.copy_(torch.tensor(self.perms, device="cpu"))

    def start(self) -> Tensor:
        """Return logits that give the identity most of the weight, or equal logits if the basis lacks the identity."""
        identity = tuple(range(self.streams))
        stay = start_logit(self.logits)
        return torch.tensor([stay if perm == identity else 0.0 for perm in self.perms], dtype=torch.float64)

    def forward(self, logits: Tensor) -> Tensor:
        return permutation.mix(self.widen(logits), permutation.indicator(self.basis))

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: object) -> None:
        loaded = state_dict.get(prefix + "basis")
        if loaded is not None and tuple(map(tuple, loaded.tolist())) != self.perms:
            raise ValueError("the checkpoint has another permutation basis: make the mixer with that basis")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def violation(self, matrix: Tensor) -> Tensor:
        return permutation.violation(matrix)

    def triton_form(self) -> TritonForm | str:
        # Three bits per image of a permutation.
        codes = tuple(sum(image << (3 * j) for j, image in enumerate(perm)) for perm in self.perms)
        return make_form("permutation", self.streams, self.logits, 1, self.logits, codes=codes)
