"""Manifold-constrained hyper-connections (mHC): doubly stochastic matrices, by Sinkhorn–Knopp."""

import math

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.manifolds import birkhoff
from jpmhc.mixers.base import START_MASS, Mixer, TritonForm


class Sinkhorn(Mixer):
    """Doubly stochastic as far as the iterations converge.

    Args:
        streams: n.
        iterations: Row-then-column normalisations, T = 20 in the paper.
        tolerance: Freeze each matrix once its row sums are within this of one; None never does.
        gradient: "direct" (exact, of the limit), "gauss_seidel" (the paper's) or "unrolled" (of the T iterations).
    """

    name = "sinkhorn"
    ensemble = "bistochastic"

    def __init__(
        self, streams: int, *, iterations: int = 20, tolerance: float | None = None, gradient: str = "direct"
    ) -> None:
        super().__init__(streams, streams**2)
        checks.at_least_one(iterations, "iterations")
        checks.positive(tolerance, "tolerance")
        checks.choice(gradient, birkhoff.GRADIENTS, "gradient")
        self.iterations, self.tolerance, self.gradient = iterations, tolerance, gradient

    def start(self) -> Tensor:
        if self.streams == 1:
            return torch.zeros(1)
        diagonal = math.log((1 - START_MASS) * (self.streams - 1) / START_MASS)
        return (diagonal * torch.eye(self.streams, dtype=torch.float64)).flatten()

    def forward(self, logits: Tensor) -> Tensor:
        matrix = logits.unflatten(-1, (self.streams, self.streams))
        return birkhoff.project(matrix, self.iterations, self.tolerance, self.gradient)

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw converged Sinkhorn projections of normal logits. [*shape, n, n]"""
        return birkhoff.sample(streams, shape, generator=generator)

    def triton_form(self) -> TritonForm | str:
        if self.tolerance is not None or self.gradient != "direct":
            return "the kernels run Sinkhorn without a tolerance and with the direct gradient"
        from jpmhc.mixers.sinkhorn.triton_form import make_form

        return make_form(self.streams, self.iterations)
