"""Orthogonal mixing (JPmHC): the Cayley transform of a skew-symmetric matrix."""

import torch
from torch import Tensor

from jpmhc import checks, precision
from jpmhc.manifolds import orthogonal
from jpmhc.mixers.base import Mixer, TritonForm, make_form


class Cayley(Mixer):
    """Orthogonal matrices H: every product of them has singular values of one.

    Args:
        streams: n. The logits are the upper triangle of a skew matrix.
        scale: The paper's step size α, a factor of the logits.
        iterations: The number of the paper's fixed-point iterations (2 in the paper); None: the exact transform.
    """

    name = "cayley"
    ensemble = "orthogonal"

    def __init__(self, streams: int, *, scale: float = 0.1, iterations: int | None = None) -> None:
        super().__init__(streams, streams * (streams - 1) // 2)
        checks.optional_whole_number(iterations, "iterations")
        checks.positive_number(scale, "scale")
        self.scale, self.iterations = scale, iterations

    def start(self) -> Tensor:
        return torch.zeros(self.logits)

    def forward(self, logits: Tensor) -> Tensor:
        logits = self.widen(logits)
        if self.streams == 1:
            return torch.ones_like(logits.sum(-1))[..., None, None]
        with precision.without_autocast(logits):
            # With more than four streams, large logits make the transform inexact in float32.
            wide = logits.double() if self.streams > 4 else logits
            matrix = orthogonal.cayley_of_entries(wide * (self.scale / 2), self.streams, self.iterations)
            return matrix.to(logits.dtype)

    def violation(self, matrix: Tensor) -> Tensor:
        return orthogonal.violation(matrix)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw Haar-distributed orthogonal matrices. [*shape, n, n]"""
        return orthogonal.sample(streams, shape, generator=generator)

    def triton_form(self) -> TritonForm | str:
        n = self.streams
        constants = {"order": n, "scale": float(self.scale), "iterations": self.iterations}
        return make_form("cayley", n, self.logits, n, n, **constants)
