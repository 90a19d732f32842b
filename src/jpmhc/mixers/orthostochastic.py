"""go-mHC (arXiv 2604.02309): doubly stochastic matrices from the squared entries of orthogonal matrices."""

import torch
from torch import Tensor

from jpmhc import checks, precision
from jpmhc.manifolds import birkhoff, orthogonal
from jpmhc.mixers.base import START_MASS, Mixer, TritonForm, make_form

MOST_ROWS = 8  # a larger skew matrix does not fit into the registers of the threads that share it


class Orthostochastic(Mixer):
    r"""$H_{ij} = \frac1s \sum Q^2$ over the s × s block (i, j) of an orthogonal ns × ns matrix Q.

    Rows and columns of squares sum to one, so H is exactly doubly stochastic.

    Args:
        streams: n.
        blocks: s. With s = 1 H is orthostochastic; a larger s reaches more of the doubly stochastic matrices.
        scale: Factor of the logits. The scaled logits are the upper triangle of a skew matrix, whose Cayley transform
            is Q.

    Note:
        At Q = I every derivative of H vanishes, so Q starts as a small rotation that gives H 1 % off-diagonal mass.
    """

    name = "orthostochastic"

    def __init__(self, streams: int, blocks: int = 1, *, scale: float = 1.0) -> None:
        checks.whole_number(blocks, "blocks")
        checks.positive_number(scale, "scale")
        order = streams * blocks
        super().__init__(streams, order * (order - 1) // 2)
        self.blocks, self.scale = blocks, scale

    def start(self) -> Tensor:
        # Q ≈ I + scale · skew, so a row of H has off-diagonal mass (n - 1) s (scale · logit)².
        others = max(1, (self.streams - 1) * self.blocks)
        return torch.full((self.logits,), (START_MASS / others) ** 0.5 / self.scale, dtype=torch.float64)

    def forward(self, logits: Tensor) -> Tensor:
        logits = self.widen(logits)
        if not self.logits:
            return torch.ones_like(logits.sum(-1))[..., None, None]
        with precision.without_autocast(logits):
            skew = orthogonal.skew(logits * (self.scale / 2), self.streams * self.blocks)
            return self._squares(orthogonal.cayley(skew))

    def _squares(self, matrix: Tensor) -> Tensor:
        """Return H: the sum of the squared entries of each block, divided by s. [..., ns, ns] → [..., n, n]"""
        squares = matrix.square().unflatten(-1, (-1, self.blocks)).unflatten(-3, (-1, self.blocks))
        return squares.sum((-1, -3)) / self.blocks

    def violation(self, matrix: Tensor) -> Tensor:
        return birkhoff.violation(matrix)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw Haar-distributed orthogonal matrices and square their entries (s = 1). [*shape, n, n]"""
        return orthogonal.sample(streams, shape, generator=generator).square()

    def triton_form(self) -> TritonForm | str:
        order = self.streams * self.blocks
        if order > MOST_ROWS or order & (order - 1):
            return f"the kernels take an orthostochastic n·s that is a power of two up to {MOST_ROWS}, not {order}"
        constants = {"order": order, "blocks": self.blocks, "scale": float(self.scale)}
        return make_form("orthostochastic", self.streams, self.logits, order, order, **constants)
