"""Self-energies of general noise, whose unknowns are matrices (docs/derivations/chain.md)."""

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solvers.selfenergy import TINY, Differentiable

# A pivot is known to the tolerance, or to the tolerance times this fraction of the entry it is what is left of.
_DROWNED = 1e-5


class General(Differentiable):
    r"""$\Sigma_{y_l} = \sum_k B_{lk} M_{x_{l-1}} B_{lk}^\top$ and, mirrored, $\sum_k B_{lk}^\top M_{y_l} B_{lk}$.

    The unknowns are the matrices $M$. Their coordinates are those of $i M = R D R^\top$ with $D$ diagonal and $R$ unit
    lower triangular: $\log D$ and the entries of $R$ below its diagonal. The real part of $i M$ is positive, so that
    every pivot exists and has a positive real part; sizes that differ by orders of magnitude between directions, as
    they do in a deep chain, are then all known to their own relative precision. Between bands $M$ is nearly real and
    indefinite, and a pivot may come close to zero: streams are eliminated in the order of their size, in each block.
    """

    scalar = False

    def __init__(self, network: Network) -> None:
        factors = network.noise_factors().to(torch.complex128)  # [L, K, n, n]
        self.factors = [factors.unsqueeze(1), factors.mT.unsqueeze(1)]  # [L, 1, K, n, n]
        self.streams = network.streams
        self.count = self.streams**2
        self.below = torch.tril_indices(self.streams, self.streams, -1, device=factors.device)
        self.coordinates = self.streams + self.below.shape[1]
        eye = torch.eye(self.streams, dtype=torch.complex128, device=factors.device)
        self.vectors = [eye.expand(network.depth, 1, -1, -1)] * 2
        self.sorted = torch.arange(self.streams, device=factors.device).expand(2 * network.depth, -1)

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
        triangle = self._triangle(coordinates)
        scaled = triangle * coordinates[..., : self.streams].exp().unsqueeze(-2)
        return self._unsort(scaled @ triangle.mT * -1j).flatten(-2)

    def sort_streams(self, unknowns: Tensor) -> None:
        """Choose the order in which each block's streams are eliminated: the largest of its diagonal first.

        Args:
            unknowns: Matrices that are typical of the blocks, x blocks first. [2 L, count]
        """
        sizes = unknowns.unflatten(-1, (self.streams, self.streams)).diagonal(dim1=-2, dim2=-1).abs()
        self.sorted = sizes.argsort(-1, descending=True)

    def _sort(self, blocks: Tensor, *, columns: bool = True) -> Tensor:
        """Return blocks [b, 2 L, ..., n, n] with rows, and columns if wanted, in the order of elimination."""
        return _permute(blocks, self.sorted, columns)

    def _unsort(self, blocks: Tensor) -> Tensor:
        """Return sorted blocks [b, 2 L, ..., n, n] with their streams in place."""
        return _permute(blocks, self.sorted.argsort(-1), True)

    def scale(self, coordinates: Tensor) -> Tensor:
        # Entry (j, k) of R is at most of the order of the square root of entry (j, j) of the matrix over pivot k.
        sizes = coordinates[..., : self.streams].real.exp()
        diagonal = (self._triangle(coordinates).abs().square() * sizes.unsqueeze(-2)).sum(-1)
        usual = (diagonal[..., self.below[0]] / sizes[..., self.below[1]]).sqrt()
        return torch.cat([1 + _DROWNED * diagonal / sizes, usual], -1)

    def _triangle(self, coordinates: Tensor) -> Tensor:
        """Return R. [..., n, n]"""
        triangle = torch.eye(self.streams, dtype=coordinates.dtype, device=coordinates.device)
        triangle = triangle.repeat(*coordinates.shape[:-1], 1, 1)
        triangle[..., self.below[0], self.below[1]] = coordinates[..., self.streams :]
        return triangle

    def differentiate(
        self, couplings: Tensor, first: Tensor, coordinates: Tensor, image: Tensor
    ) -> tuple[Tensor, Tensor]:
        depth, size = couplings.shape[1] // 2, self.coordinates
        tangents = self._unsort(self._tangents(coordinates)).transpose(0, 1).flatten(1, 2).flatten(-2)  # [2 L, b c, n²]
        caused = torch.cat([self.energy(part, side) for side, part in enumerate(tangents.split(depth))])
        caused = caused.unflatten(1, (-1, size)).transpose(0, 1)  # [b, 2 L, c, n, n]
        # With i M = R D R^T and S = R^-1 d(iM) R^-T D^-1: d log D is the diagonal of S, dR is R times what is below it.
        triangle = self._triangle(image).unsqueeze(2)
        coupled = self._sort(couplings.roll(depth, 2), columns=False)
        inner = torch.linalg.solve_triangular(triangle, coupled, upper=False, unitriangular=True)
        inner = inner.unsqueeze(3)  # [b, 2 L, 2 L, 1, n, n]
        weight = 1j * torch.exp(-image[:, :, None, None, None, : self.streams])
        change = inner @ caused.unsqueeze(1) @ inner.mT * weight
        rest = (triangle.unsqueeze(3) @ change.tril(-1))[..., self.below[0], self.below[1]]
        rows = torch.cat([change.diagonal(dim1=-2, dim2=-1), rest], -1)  # [b, 2 L, 2 L, c, c]: image, unknown, by, of
        derivative = rows.permute(0, 1, 4, 2, 3).flatten(3, 4).flatten(1, 2)
        ends = first.roll(depth, 1).unsqueeze(2)  # [b, 2 L, 1, n, n]
        return derivative, (ends @ caused * ends).sum((-2, -1)).flatten(1)

    def _tangents(self, coordinates: Tensor) -> Tensor:
        """Return the change of M with each of its coordinates. [b, 2 L, coordinates, n, n]"""
        triangle = self._triangle(coordinates)
        scaled = triangle * coordinates[..., : self.streams].exp().unsqueeze(-2)
        pivots = scaled.mT.unsqueeze(-1) * triangle.mT.unsqueeze(-2)
        rows, columns = self.below
        below = pivots.new_zeros(*coordinates.shape[:-1], len(rows), self.streams, self.streams)
        below[..., torch.arange(len(rows), device=rows.device), rows, :] = scaled.mT[..., columns, :]
        return -1j * torch.cat([pivots, below + below.mT], -3)

    def energy(self, order: Tensor, side: int) -> Tensor:
        factors = self.factors[side]
        block = order.unflatten(-1, (1, self.streams, self.streams))
        return (factors @ block @ factors.mT).sum(2)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return (left @ right).flatten(-2)


def _permute(blocks: Tensor, order: Tensor, columns: bool) -> Tensor:
    """Return blocks [b, N, ..., n, n] with rows, and columns if wanted, in an order [N, n] for each of the N."""
    index = order.view(1, len(order), *[1] * (blocks.ndim - 4), -1)
    blocks = blocks.gather(-2, index.unsqueeze(-1).expand_as(blocks))
    return blocks.gather(-1, index.unsqueeze(-2).expand_as(blocks)) if columns else blocks
