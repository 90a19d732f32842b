"""Self-energies of general noise, whose unknowns are matrices (docs/derivations/chain.md)."""

import torch
from torch import Tensor

from jpmhc.spectra.chain.noise import TINY, SelfEnergy
from jpmhc.spectra.network import Network

# The allowed error of a pivot is the tolerance times the sum of the pivot and this fraction of its diagonal entry.
_DROWNED = 1e-5


class General(SelfEnergy):
    r"""General noise: $\Sigma_{y_l} = \sum_k B_{lk} M_{x_{l-1}} B_{lk}^\top$ and its mirror image for $\Sigma_x$.

    The mirror image is $\Sigma_{x_{l-1}} = \sum_k B_{lk}^\top M_{y_l} B_{lk}$. The unknowns are the matrices $M$. Their
    coordinates are $\log D$ and the entries of $R$ below its diagonal, for $i M = R D R^\top$ with $D$ diagonal and $R$
    unit lower triangular. The real part of $i M$ is positive, so that every pivot in $D$ has a positive real part.
    Directions of very different sizes, as in a deep chain, then each keep their own relative precision. Between bands
    $M$ is nearly real and indefinite, and a pivot may come close to zero; in each block the largest streams are
    therefore eliminated first.
    """

    scalar = False

    def __init__(self, network: Network) -> None:
        factors = network.noise_factors().to(torch.complex128)  # [L, K, n, n]
        self.factors = [factors.unsqueeze(1), factors.mT.unsqueeze(1)]  # [L, 1, K, n, n]
        self.streams = network.streams
        self.count = self.streams**2
        self.below = torch.tril_indices(self.streams, self.streams, -1, device=factors.device)
        self.coordinates = self.streams + self.below.shape[1]
        self.sorted = self.places = torch.arange(self.streams, device=factors.device).expand(2 * network.depth, -1)

    def to_coordinates(self, unknowns: Tensor) -> Tensor:
        rest = self._sort(unknowns.unflatten(-1, (self.streams, self.streams))) * 1j
        pivots, columns = [], []
        for step in range(self.streams):
            pivot = rest[..., step, step]
            pivot = torch.where(pivot == 0, TINY, pivot)
            column = rest[..., step] / pivot.unsqueeze(-1)
            rest = rest - column.unsqueeze(-1) * rest[..., step, :].unsqueeze(-2)
            pivots.append(pivot)
            columns.append(column)
        triangle = torch.stack(columns, -1)[..., self.below[0], self.below[1]]
        return torch.cat([torch.stack(pivots, -1).log(), triangle], -1)

    def to_unknowns(self, coordinates: Tensor) -> Tensor:
        triangle, scaled = self.factorise(coordinates)
        return self._unsort(scaled @ triangle.mT * -1j).flatten(-2)

    def factorise(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return R and R D. [..., n, n] each"""
        triangle = self._triangle(coordinates)
        return triangle, triangle * coordinates[..., : self.streams].exp().unsqueeze(-2)

    def sort_streams(self, unknowns: Tensor) -> None:
        """Choose the elimination order of each block's streams: largest diagonal entry first.

        Args:
            unknowns: Typical matrices of the blocks, x blocks first. [2 L, count]
        """
        sizes = unknowns.unflatten(-1, (self.streams, self.streams)).diagonal(dim1=-2, dim2=-1).abs()
        self.sorted = sizes.argsort(-1, descending=True)
        self.places = self.sorted.argsort(-1)

    def _sort(self, blocks: Tensor) -> Tensor:
        """Return blocks [b, 2 L, n, n] with rows and columns in the order of elimination."""
        return _permute(blocks, self.sorted)

    def _unsort(self, blocks: Tensor) -> Tensor:
        """Return blocks [b, 2 L, n, n] with rows and columns back in the original order of the streams."""
        return _permute(blocks, self.places)

    def scale(self, coordinates: Tensor) -> Tensor:
        # Entry (j, k) of R is at most of the order of the square root of entry (j, j) of the matrix over pivot k.
        sizes = coordinates[..., : self.streams].real.exp()
        diagonal = (self._triangle(coordinates).abs().square() * sizes.unsqueeze(-2)).sum(-1)
        usual = (diagonal[..., self.below[0]] / sizes[..., self.below[1]]).sqrt()
        return torch.cat([1 + _DROWNED * diagonal / sizes, usual], -1)

    def _triangle(self, coordinates: Tensor) -> Tensor:
        """Return R from the coordinates. [..., n, n]"""
        triangle = torch.eye(self.streams, dtype=coordinates.dtype, device=coordinates.device)
        triangle = triangle.repeat(*coordinates.shape[:-1], 1, 1)
        triangle[..., self.below[0], self.below[1]] = coordinates[..., self.streams :]
        return triangle

    def change_of_unknowns(self, factors: tuple[Tensor, Tensor], change: Tensor) -> Tensor:
        """Return the change of M [b, 2 L, n, n], whose R and R D are given, caused by a change of its coordinates."""
        triangle, scaled = factors
        below = torch.zeros_like(triangle)
        below[..., self.below[0], self.below[1]] = change[..., self.streams :]
        half = below @ scaled.mT
        pivots = (scaled * change[..., : self.streams].unsqueeze(-2)) @ triangle.mT
        return self._unsort(pivots + half + half.mT) * -1j

    def change_of_coordinates(self, factors: tuple[Tensor, Tensor], change: Tensor) -> Tensor:
        """Return the change of the coordinates of M, whose R and R D are given, caused by a change of M."""
        # With i M = R D R^T and S = R^-1 d(iM) R^-T D^-1: d log D is the diagonal of S, and dR is R times the strictly
        # lower triangle of S.
        triangle, scaled = factors
        inner = torch.linalg.solve_triangular(triangle, self._sort(change) * 1j, upper=False, unitriangular=True)
        inner = torch.linalg.solve_triangular(triangle, inner.mT, upper=False, unitriangular=True).mT
        inner = inner / scaled.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        below = (triangle @ inner.tril(-1))[..., self.below[0], self.below[1]]
        return torch.cat([inner.diagonal(dim1=-2, dim2=-1), below], -1)

    def energy(self, order: Tensor, side: int) -> Tensor:
        factors = self.factors[side]
        block = order.unflatten(-1, (1, self.streams, self.streams))
        return (factors @ block @ factors.mT).sum(2)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return (left @ right).flatten(-2)


def _permute(blocks: Tensor, order: Tensor) -> Tensor:
    """Return blocks [b, N, n, n] whose rows and columns are permuted, by one order of `order` [N, n] per block."""
    rows = order.unsqueeze(0).unsqueeze(-1).expand_as(blocks)
    return blocks.gather(-2, rows).gather(-1, rows.mT)
