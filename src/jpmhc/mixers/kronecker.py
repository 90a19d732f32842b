"""KromHC: Kronecker products of small doubly stochastic matrices."""

import torch
from torch import Tensor

from jpmhc.manifolds import birkhoff
from jpmhc.mixers.base import START_MASS, Mixer, TritonForm, check_stream_count, make_form


class Kronecker(Mixer):
    """Kronecker products of k doubly stochastic 2 × 2 matrices, for n = 2^k streams: exactly doubly stochastic."""

    name = "kronecker"

    def __init__(self, streams: int) -> None:
        check_stream_count(type(self), streams)
        super().__init__(streams, streams.bit_length() - 1)

    @classmethod
    def why_not(cls, streams: int) -> str | None:
        if streams >= 2 and streams & (streams - 1) == 0:
            return None
        return f"the kronecker mixer needs a number of streams that is a power of two, at least 2, got {streams}"

    def start(self) -> Tensor:
        stay = torch.tensor((1 - START_MASS) ** (1 / self.logits), dtype=torch.float64)
        return stay.logit().repeat(self.logits)

    def forward(self, logits: Tensor) -> Tensor:
        stay = self.widen(logits).sigmoid()
        pair = torch.stack([stay, 1 - stay], -1)
        factors = torch.stack([pair, pair.flip(-1)], -2)  # [..., k, 2, 2]
        product = factors[..., 0, :, :]
        for k in range(1, self.logits):
            right = factors[..., k, :, :]
            product = (product[..., :, None, :, None] * right[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
        return product

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    def triton_form(self) -> TritonForm | str:
        return make_form("kronecker", self.streams, self.logits, 1, self.logits)
