"""Circulant mixing: weighted cyclic shifts of the streams."""

import torch
from torch import Tensor

from jpmhc.manifolds import birkhoff
from jpmhc.mixers.base import Mixer, TritonForm, make_form, start_logit


class Circulant(Mixer):
    r"""Mixtures $\sum_k \mathrm{softmax}(z)_k C^k$ of the cyclic shifts by k streams, with n logits z.

    The mixtures are doubly stochastic and commute.
    """

    name = "circulant"

    def __init__(self, streams: int) -> None:
        super().__init__(streams, streams)

    def start(self) -> Tensor:
        return torch.tensor([start_logit(self.streams), *[0.0] * (self.streams - 1)], dtype=torch.float64)

    def forward(self, logits: Tensor) -> Tensor:
        n = self.streams
        weights = self.widen(logits).softmax(-1).unbind(-1)
        return torch.stack([weights[(i - j) % n] for i in range(n) for j in range(n)], -1).unflatten(-1, (n, n))

    def violation(self, matrix: Tensor) -> Tensor:
        shifted = matrix.roll((1, 1), (-2, -1))
        return torch.maximum(birkhoff.violation(matrix), (matrix - shifted).abs().amax((-2, -1)))

    def triton_form(self) -> TritonForm | str:
        return make_form("circulant", self.streams, self.logits, 1, self.logits)
