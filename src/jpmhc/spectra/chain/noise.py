r"""Structures of noise in the chain's Dyson equation: how blocks of the resolvent determine the self-energies.

The symbols are those of equation.py, and tr is the normalised trace. Side 0 stands for the blocks $M_{x_{l-1}}$, which
determine $\Sigma_{y_l}$; side 1 for the blocks $M_{y_l}$, which determine $\Sigma_{x_{l-1}}$. The self-energies depend
on a block only through a few numbers, its order parameters, which are the equation's unknowns.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.sublayers import HiddenLayer, Sublayer

# This number replaces an unknown that is zero, whose logarithm would not be finite.
TINY = 1e-250
# The allowed error of a pivot is the tolerance times the sum of the pivot and this fraction of its diagonal entry.
_DROWNED = 1e-5


class SelfEnergy(ABC):
    """A structure of noise: how blocks of the resolvent determine the self-energies.

    Attributes:
        count: The number of a block's unknowns, which are its order parameters or, for `Sublayers`, functions of these.
        scalar: Whether the unknowns are scalars in the lower half-plane; otherwise they are the entries of a matrix.
        coordinates: The number of coordinates of a block, which are the iterated numbers; logarithms come first.
        paths: The number of draws of the slopes (paths) over which a block is averaged. A batch of B points has B times
            this number of blocks; the paths of one point follow each other.
        linear: Whether the self-energies and the new unknowns are linear functions of the unknowns and of the blocks.
    """

    count: int = 1
    scalar: bool = True
    coordinates: int = 1
    paths: int = 1
    linear: bool = True

    @abstractmethod
    def energy(self, unknowns: Tensor, side: int) -> Tensor:
        """Compute self-energies [L, B, n, n], or [L, B, 1, 1] for multiples of I, from unknowns [L, B, count].

        Side 0 computes the self-energies of y from the unknowns of the x blocks, side 1 the reverse.
        """

    @abstractmethod
    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        """Compute the order parameters [L, B, count] of blocks M = left @ right [L, B, n, n]; side 0 is x, side 1 y."""

    def respond(self, orders: tuple[Tensor, Tensor], unknowns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute new unknowns from the order parameters of the x and the y blocks and from the old unknowns."""
        return orders

    def to_coordinates(self, unknowns: Tensor) -> Tensor:
        """Return the coordinates [..., coordinates] of unknowns [..., count]."""
        return to_logarithm(unknowns)

    def to_unknowns(self, coordinates: Tensor) -> Tensor:
        """Return the unknowns [..., count] from their coordinates [..., coordinates]."""
        return torch.exp(coordinates) * -1j

    def factorise(self, coordinates: Tensor) -> tuple[Tensor, ...]:
        """Return the argument `factors` of `change_of_unknowns` and `change_of_coordinates` at these coordinates."""
        return (self.to_unknowns(coordinates),)

    def change_of_unknowns(self, factors: tuple[Tensor, ...], change: Tensor) -> Tensor:
        """Return the change of the unknowns [b, 2 L, count] that a change of their coordinates causes."""
        return factors[0] * change

    def change_of_coordinates(self, factors: tuple[Tensor, ...], change: Tensor) -> Tensor:
        """Return the change of the coordinates [b, 2 L, coordinates] that a change of the unknowns causes."""
        return change / factors[0]

    def scale(self, coordinates: Tensor) -> Tensor:
        """Return the numbers by which changes of the coordinates are divided. [..., coordinates]"""
        return torch.ones_like(coordinates.real)


def to_logarithm(values: Tensor) -> Tensor:
    """Return log(i v) of numbers v in the lower half-plane; the branch cut lies in the upper half-plane."""
    # A read vector of zeros makes an unknown zero: TINY replaces it.
    return torch.log(torch.where(values == 0, -1j * TINY, values) * 1j)


class Isotropic(SelfEnergy):
    r"""Isotropic noise: each self-energy of a layer is $\sigma_l^2\,\mathrm{tr}(M)\,I$ of the layer's other block M."""

    def __init__(self, network: Network) -> None:
        self.variance = network.variance.view(-1, 1, 1, 1)

    def energy(self, order: Tensor, side: int) -> Tensor:
        return self.variance * order.unsqueeze(-1)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        return (left * right.mT).sum((-2, -1)).unsqueeze(-1) / left.shape[-1]


class Block(SelfEnergy):
    r"""The hyper-connection block with read vector r and write vector w of each layer.

    $\Sigma_{y_l} = \sigma_l^2 (r^\top M_{x_{l-1}} r)\, w w^\top$ and
    $\Sigma_{x_{l-1}} = \sigma_l^2 (w^\top M_{y_l} w)\, r r^\top$.
    """

    def __init__(self, network: Network) -> None:
        assert network.read is not None
        assert network.write is not None
        self.ends = [vector.to(torch.complex128)[:, None, :, None] for vector in (network.read, network.write)]
        variance = network.variance.view(-1, 1, 1, 1)
        self.outer = [variance * (vector @ vector.mT) for vector in reversed(self.ends)]

    @classmethod
    def for_rows(cls, noises: Sequence[Self], rows: Tensor) -> Self:
        """Return one noise for a batch of points of several networks.

        `rows` [B] has, for each point, the index in `noises` of the point's network.
        """
        joined = copy(noises[0])
        for name in ("ends", "outer"):
            sides = zip(*(getattr(noise, name) for noise in noises))
            setattr(joined, name, [torch.cat(side, 1)[:, rows] for side in sides])
        return joined

    def energy(self, order: Tensor, side: int) -> Tensor:
        return self.outer[side] * order.unsqueeze(-1)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        vector = self.ends[side]
        return ((vector.mT @ left) @ (right @ vector)).squeeze(-1)


class Sublayers(Block):
    r"""The hyper-connection block with sublayers that are not Gaussian matrices.

    Let $C_l$ be the determining series of the sublayer's Jacobian (sublayers.py), scaled by $\sigma_l^2$. With $a =
    r^\top M_{x_{l-1}} r$ and $b = w^\top M_{y_l} w$, $\Sigma_{y_l} = (C_l(ab)/b)\, w w^\top$ and $\Sigma_{x_{l-1}} =
    (C_l(ab)/a)\, r r^\top$. The unknowns are the factors $C_l(ab)/b$ and $C_l(ab)/a$. For a `HiddenLayer` the factors
    are functions of a and b. For `Rotated` singular values they are functions of $1/u$ and $1/v$, the values of a and b
    in the chain without this sublayer, with $u = 1/a + C_l(ab)/a$ and $v = 1/b + C_l(ab)/b$. This keeps a and b in
    their half-planes (docs/derivations/real_networks.md).
    """

    linear = False

    def __init__(self, network: Network, sublayers: tuple[Sublayer, ...]) -> None:
        super().__init__(replace(network, variance=torch.ones_like(network.variance), sublayers=None))
        device, most = network.skips.device, max(len(law.squares) for law in sublayers)

        def pad(part: Tensor) -> Tensor:
            return part if len(part) == most else torch.nn.functional.pad(part, (0, most - len(part)))

        self.squares = torch.stack([pad(law.squares) for law in sublayers]).to(device).unsqueeze(1)  # [L, 1, K]
        self.squares = self.squares * network.variance.view(-1, 1, 1)
        self.weights = torch.stack([pad(law.weights) for law in sublayers]).to(device).unsqueeze(1)
        hidden = torch.tensor([isinstance(law, HiddenLayer) for law in sublayers], device=device)
        self.hidden, self.rotated = hidden.nonzero().squeeze(-1), (~hidden).nonzero().squeeze(-1)
        ratios = [law.ratio for law in sublayers if isinstance(law, HiddenLayer)]
        self.ratio = torch.tensor(ratios, dtype=torch.float64, device=device).view(-1, 1, 1)

    @classmethod
    def for_rows(cls, noises: Sequence[Self], rows: Tensor) -> Self:
        joined = super().for_rows(noises, rows)
        most = max(noise.squares.shape[-1] for noise in noises)
        for name in ("squares", "weights"):
            parts = [getattr(noise, name) for noise in noises]
            parts = [torch.nn.functional.pad(part, (0, most - part.shape[-1])) for part in parts]
            setattr(joined, name, torch.cat(parts, 1)[:, rows])
        joined.ratio = torch.cat([noise.ratio for noise in noises], 1)[:, rows]
        return joined

    def respond(self, orders: tuple[Tensor, Tensor], unknowns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        read, written = orders  # a and b, [L, B, 1]
        new = torch.empty_like(read), torch.empty_like(written)
        if len(here := self.hidden):
            a, b = read[here], written[here]
            squares, weights = self.squares[here], self.weights[here]
            factor = (weights * squares / (1 - squares / self.ratio * (a * b))).sum(-1, keepdim=True)
            new[0][here], new[1][here] = a * factor, b * factor
        if len(here := self.rotated):
            # 1/u and 1/v: a and b of the chain without this sublayer
            a = read[here] / (1 + unknowns[1][here] * read[here])
            b = written[here] / (1 + unknowns[0][here] * written[here])
            squares, share = self.squares[here], self.weights[here] / (1 - self.squares[here] * (a * b))
            factor = (squares * share).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
            new[0][here], new[1][here] = a * factor, b * factor
        return new


class Paths(SelfEnergy):
    r"""Noise with slopes that differ between features: the chain is averaged over draws of all layers' slopes.

    With one draw's slopes on the diagonal of $D_l$ and the mean $E_D$ over draws, $\Sigma_{y_l} = \sigma_l^2 a_l D_l^2$
    with $a_l = E_D\,\mathrm{tr} M_{x_{l-1}}$, and $\Sigma_{x_{l-1}} = \sigma_l^2 b_l I$ with $b_l = E_D\,\mathrm{tr}
    D_l^2 M_{y_l}$. For the block with one slope $d_l$ per draw, $d_l^2\, w w^\top$ replaces $D_l^2$, and $r r^\top$
    replaces $I$. Isotropic noise in separating bases (bases.py) is the case of one draw of equal slopes.
    """

    def __init__(self, network: Network, bases: Tensor | None) -> None:
        slopes = torch.ones_like(network.skips[None, :, 0]) if network.slopes is None else network.slopes
        self.paths = len(slopes)
        slopes = slopes.transpose(0, 1)  # [L, K, n], or [L, K, 1] for the block
        if network.read is None or network.write is None:
            eye = torch.eye(network.streams, dtype=torch.float64, device=slopes.device)
            inputs, outputs, share = eye.expand(network.depth, 1, -1, -1), torch.diag_embed(slopes), network.streams
        else:
            inputs = (network.read.unsqueeze(-1) * network.read.unsqueeze(-2)).unsqueeze(1)
            outputs = (network.write.unsqueeze(-1) * network.write.unsqueeze(-2)).unsqueeze(1) * slopes.unsqueeze(-1)
            share = 1
        if bases is not None:
            before, after = torch.linalg.inv(bases[:-1]).unsqueeze(1), bases[1:].unsqueeze(1)
            inputs, outputs = before.mT @ inputs @ before, after @ outputs @ after.mT
        variance = network.variance.view(-1, 1, 1, 1, 1)
        self.traced = [(part / share).to(torch.complex128).unsqueeze(1) for part in (inputs, outputs)]
        self.caused = [(variance * share * part).to(torch.complex128) for part in reversed(self.traced)]

    def energy(self, unknowns: Tensor, side: int) -> Tensor:
        energies = self.caused[side] * unknowns[..., None, None]  # [L, B, K or 1, n, n]
        return energies.expand(-1, -1, self.paths, -1, -1).flatten(1, 2)

    def order(self, left: Tensor, right: Tensor, side: int) -> Tensor:
        left, right = (part.unflatten(1, (-1, self.paths)) for part in (left, right))
        return ((self.traced[side] @ left) * right.mT).sum((-2, -1)).mean(2).unsqueeze(-1)


class General(SelfEnergy):
    r"""General noise, given by matrices $B_{lk}$ that include $\sigma_l$; the unknowns are the blocks M themselves.

    $\Sigma_{y_l} = \sum_k B_{lk} M_{x_{l-1}} B_{lk}^\top$ and $\Sigma_{x_{l-1}} = \sum_k B_{lk}^\top M_{y_l} B_{lk}$.
    The coordinates of M are $\log D$ and the entries of $R$ below its diagonal, for $i M = R D R^\top$ with diagonal
    $D$ and unit lower triangular $R$. The real part of $i M$ is positive, so every pivot in $D$ has a positive real
    part too. Directions of very different sizes, as in a deep chain, then each keep their own relative precision.
    Between bands $M$ is nearly real and indefinite, and a pivot may come close to zero; in each block the streams with
    the largest diagonal entries are therefore eliminated first.
    """

    scalar = False

    def __init__(self, network: Network) -> None:
        factors = network.noise_factors().to(torch.complex128)  # [L, K, n, n]
        self.factors = [factors.unsqueeze(1), factors.mT.unsqueeze(1)]  # [L, 1, K, n, n]
        self.streams = network.streams
        self.count = self.streams**2
        self.below = torch.tril_indices(self.streams, self.streams, -1, device=factors.device)
        self.coordinates = self.streams + self.below.shape[1]
        self.elimination_order = self.original_order = torch.arange(self.streams, device=factors.device).expand(
            2 * network.depth, -1
        )

    def to_coordinates(self, unknowns: Tensor) -> Tensor:
        rest = _permute(unknowns.unflatten(-1, (self.streams, self.streams)), self.elimination_order) * 1j
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
        return _permute(scaled @ triangle.mT * -1j, self.original_order).flatten(-2)

    def factorise(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the factors R and R D of $i M = R D R^\top$ from M's coordinates. [..., n, n] each"""
        triangle = self._triangle(coordinates)
        return triangle, triangle * coordinates[..., : self.streams].exp().unsqueeze(-2)

    def sort_streams(self, unknowns: Tensor) -> None:
        """Choose the elimination order of each block's streams: largest diagonal entry first.

        Args:
            unknowns: Typical matrices of the blocks, x blocks first. [2 L, count]
        """
        sizes = unknowns.unflatten(-1, (self.streams, self.streams)).diagonal(dim1=-2, dim2=-1).abs()
        self.elimination_order = sizes.argsort(-1, descending=True)
        self.original_order = self.elimination_order.argsort(-1)

    def scale(self, coordinates: Tensor) -> Tensor:
        # Entry (j, k) of R is at most of the order of the square root of entry (j, j) of the matrix over pivot k.
        sizes = coordinates[..., : self.streams].real.exp()
        diagonal = (self._triangle(coordinates).abs().square() * sizes.unsqueeze(-2)).sum(-1)
        usual = (diagonal[..., self.below[0]] / sizes[..., self.below[1]]).sqrt()
        return torch.cat([1 + _DROWNED * diagonal / sizes, usual], -1)

    def _triangle(self, coordinates: Tensor) -> Tensor:
        r"""Return the unit lower triangular R of $i M = R D R^\top$ from M's coordinates. [..., n, n]"""
        triangle = torch.eye(self.streams, dtype=coordinates.dtype, device=coordinates.device)
        triangle = triangle.repeat(*coordinates.shape[:-1], 1, 1)
        triangle[..., self.below[0], self.below[1]] = coordinates[..., self.streams :]
        return triangle

    def change_of_unknowns(self, factors: tuple[Tensor, ...], change: Tensor) -> Tensor:
        triangle, scaled = factors
        below = torch.zeros_like(triangle)
        below[..., self.below[0], self.below[1]] = change[..., self.streams :]
        half = below @ scaled.mT
        pivots = (scaled * change[..., : self.streams].unsqueeze(-2)) @ triangle.mT
        return _permute(pivots + half + half.mT, self.original_order).flatten(-2) * -1j

    def change_of_coordinates(self, factors: tuple[Tensor, ...], change: Tensor) -> Tensor:
        # With i M = R D R^T and S = R^-1 d(iM) R^-T D^-1: d log D is the diagonal of S, and dR is R times the strictly
        # lower triangle of S.
        triangle, scaled = factors
        change = _permute(change.unflatten(-1, (self.streams, self.streams)), self.elimination_order) * 1j
        inner = torch.linalg.solve_triangular(triangle, change, upper=False, unitriangular=True)
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
    """Return blocks [b, N, n, n] with rows and columns permuted; row i of `order` [N, n] permutes the i-th block."""
    rows = order.unsqueeze(0).unsqueeze(-1).expand_as(blocks)
    return blocks.gather(-2, rows).gather(-1, rows.mT)
