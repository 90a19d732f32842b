r"""Rotations of the stream differences: orthogonal matrices whose rows sum to one.

$H = 11^\top/n + U O U^\top$ with $O$ orthogonal of order n - 1 and U an orthonormal basis of the vectors that sum to
zero. H keeps all lengths, and leaves the mean over the streams unchanged, as in a plain residual network.
"""

import math

import torch
from torch import Tensor

from jpmhc import checks, precision
from jpmhc.manifolds import orthogonal
from jpmhc.mixers.base import Mixer, TritonForm, make_form


class Rotation(Mixer):
    r"""Orthogonal matrices with row and column sums of one.

    H is the Cayley transform of $U K U^\top$, which equals $U\,\mathrm{cayley}(K)\,U^\top + 11^\top/n$. K is the skew
    matrix of the scaled logits, and U is an orthonormal basis of the vectors that sum to zero.

    Args:
        streams: n. The logits are the upper triangle of a skew matrix of order n - 1.
        scale: A factor of the logits, as in `Cayley`.
    """

    name = "rotation"

    def __init__(self, streams: int, *, scale: float = 0.1) -> None:
        super().__init__(streams, (streams - 1) * (streams - 2) // 2)
        checks.positive_number(scale, "scale")
        self.scale = scale

    def start(self) -> Tensor:
        return torch.zeros(self.logits)

    def forward(self, logits: Tensor) -> Tensor:
        logits = self.widen(logits)
        n = self.streams
        if not self.logits:  # one or two streams: nothing to turn
            return torch.eye(n, dtype=logits.dtype, device=logits.device).expand(*logits.shape[:-1], n, n)
        with precision.without_autocast(logits):
            # In double precision, because rounding errors of a large K would change the mean stream.
            basis = complement_of_ones(n, torch.float64, logits.device)
            skew = orthogonal.skew(logits.double() * (self.scale / 2), n - 1)
            return orthogonal.cayley(basis @ skew @ basis.mT).to(logits.dtype)

    def violation(self, matrix: Tensor) -> Tensor:
        rows = (matrix.sum(-1) - 1).abs().amax(-1)
        return torch.maximum(orthogonal.violation(matrix), rows)

    @classmethod
    def sample(cls, streams: int, shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
        """Draw matrices that keep the mean stream and rotate the differences by a Haar-distributed O. [*shape, n, n]"""
        mean = torch.full((streams, streams), 1 / streams, dtype=torch.float64)
        if streams == 1:
            return mean.expand(*checks.sizes(shape, "shape"), 1, 1)
        basis = complement_of_ones(streams, torch.float64, torch.device("cpu"))
        return mean + basis @ orthogonal.sample(streams - 1, shape, generator=generator) @ basis.mT

    def triton_form(self) -> TritonForm | str:
        size = self.streams if self.logits else 1
        constants = {"order": self.streams - 1, "scale": float(self.scale)}
        return make_form("rotation", self.streams, self.logits, size, size, **constants)


def complement_of_ones(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an orthonormal basis, made of cosines, of the vectors whose entries sum to zero. [n, n - 1]"""
    position = torch.arange(n, dtype=dtype, device=device) + 0.5
    wave = torch.arange(1, n, dtype=dtype, device=device) * (math.pi / n)
    return (position[:, None] * wave).cos() * (2 / n) ** 0.5
