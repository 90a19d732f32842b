"""Hyper-connections without a constraint (HC): the logits are the entries of H."""

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.mixers.base import Mixer, TritonForm, make_form


class Unconstrained(Mixer):
    """All n × n matrices. Products over many layers may explode or vanish."""

    name = "unconstrained"
    ensemble = "gaussian"

    def __init__(self, streams: int) -> None:
        super().__init__(streams, streams**2)

    def start(self) -> Tensor:
        return torch.eye(self.streams).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        return self.widen(logits).unflatten(-1, (self.streams, self.streams))

    def violation(self, matrix: Tensor) -> Tensor:
        return torch.zeros_like(matrix[..., 0, 0])

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw independent normal entries of variance 1/n. [*shape, n, n]"""
        shape = (*checks.sizes(shape, "shape"), streams, streams)
        return torch.randn(shape, dtype=torch.float64, generator=generator) / streams**0.5

    def triton_form(self) -> TritonForm | str:
        n = self.streams
        return make_form("unconstrained", n, self.logits, n, n)
