r"""The matrix Dyson equation of a chain of layers $Y_l = A_l + \sigma_l X_l$, for one network or several of one shape.

$(z - J^\top J)^{-1}$ is the first block of the inverse of a block-tridiagonal matrix, the pencil, over the vectors
$(x_0, y_1, x_1, \ldots, y_L, x_L)$, with $z$ at $x_0$, $-Y_l$ between $x_{l-1}$ and $y_l$, $1$ between $y_l$ and $x_l$,
and $-1$ at $x_L$. In the equation for the mean inverse of the pencil, matrices $\Sigma$, the self-energies, stand for
the noise. They depend on the diagonal blocks M of the mean inverse, the x blocks $M_{x_l}$ and the y blocks $M_{y_l}$.
For isotropic noise, with normalised traces tr,

$$\Sigma_{y_l} = \sigma_l^2\,\mathrm{tr}(M_{x_{l-1}})\,I, \qquad
\Sigma_{x_{l-1}} = \sigma_l^2\,\mathrm{tr}(M_{y_l})\,I,$$

and noise.py has other structures of noise. Given the self-energies, block elimination from the input and from the
output gives all M in O(L n³): with $P_0 = 1/z$ and $N_L = 1$,

$$P_l = \Sigma_{y_l} + A_l (1 - P_{l-1}\Sigma_{x_{l-1}})^{-1} P_{l-1} A_l^\top, \qquad
N_{l-1} = \Sigma_{x_{l-1}} + A_l^\top (1 - N_l \Sigma_{y_l})^{-1} N_l A_l,$$
$$M_{x_l} = P_l (1 - N_l P_l)^{-1}, \qquad M_{y_l} = (1 - N_l P_l)^{-1} N_l, \qquad G(z) = \mathrm{tr}\,M_{x_0}.$$

One evaluation of the equation's g computes the blocks M from the self-energies, and new self-energies from the blocks
M. Derivation: docs/derivations/chain.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.bases import separating_bases
from jpmhc.spectra.chain.derivative import LinearisedChain, gmres
from jpmhc.spectra.chain.noise import (
    Block,
    General,
    Isotropic,
    Paths,
    SelfEnergy,
    Sublayers,
    to_logarithm,
)
from jpmhc.spectra.chain.sweep import one_minus, solve_linear, sweep
from jpmhc.spectra.fixed_point import ContinuedEquation
from jpmhc.spectra.network import Network

# Bytes of memory for one chunk of points.
MEMORY = {"cpu": 2**29, "cuda": 2**33}
# The number of plain steps after which the blocks' entries are known well enough to sort the streams by size.
_ROUGH = 20
_LONGEST = 600
# The angle by which rounding may turn a number on the boundary of the half-plane out of the half-plane.
_ROUNDED_ANGLE = 1e-7
# The relative change of an unknown by rounding. A residual is accepted if it is at most 30 times the change of g(x)
# that this causes, and at most a tenth of the scale.
_ROUNDING = 1e-15
_ABOVE_ROUNDING, _MOST_ROUNDING = 30.0, 0.1
# The most products for one Newton correction, and the correction's relative tolerance.
_PRODUCTS, _INEXACT = 40, 1e-3
# On a CPU, at most this many points with at least this many layers are solved in blocks of layers.
_FEW, _DEEP = 8, 40
# Below this fraction of the mean squared singular value, points need separating bases against rounding errors.
SMALL = 1e-5


class ChainEquation(ContinuedEquation):
    """The chain's equation as a fixed point: rows are points; columns are G and the unknowns of all x and all y blocks.

    The map g does not depend on G; G is a column so that its convergence is checked without an extra sweep. The
    iterated numbers are the coordinates of G and of the unknowns. Scalar unknowns lie in the lower half-plane and have
    logarithms as coordinates: their sizes differ by many orders of magnitude along a deep chain, and the half-plane
    becomes a bound on the imaginary part of the logarithm. The coordinates of matrix unknowns are the factors of their
    triangular decomposition, with logarithms of the pivots.
    """

    def __init__(self, network: Network, z: Tensor, tolerance: float = 1e-9) -> None:
        self.tolerance = tolerance
        self.depth, self.streams = network.depth, network.streams
        self.eye = torch.eye(self.streams, dtype=torch.complex128, device=z.device)
        separated = separating_bases(network.skips) if float(z.abs().min()) < SMALL else None
        bases, skips = (None, network.skips) if separated is None else separated
        self.noise = self_energy(network, bases)
        self.separated = separated is not None and not self.noise.scalar
        # The end moments in the new bases; `trace` is the inverse metric of the first basis, with which G is a trace.
        first, last = network.end_moments()
        self.trace, self.to_streams = self.eye, self.eye
        if bases is not None:
            back = torch.linalg.inv(bases[[0, -1]])
            first, last = bases[0] @ first @ bases[0].mT, back[1].mT @ last @ back[1]
            self.to_streams = back[0].to(torch.complex128)
            self.trace = self.to_streams.mT @ self.to_streams
        self.input, self.output = first.to(torch.complex128), last.to(torch.complex128)
        skips = skips.to(torch.complex128)
        self.skips = torch.stack([skips, skips.mT.flip(0)]).unsqueeze(2)  # forward and backward sweep, [2, L, 1, n, n]
        # Blocks of layers, solved at the same time, are faster if launching small operations takes most of the time.
        few = len(z) <= _FEW and self.depth >= _DEEP
        self.blocks = math.isqrt(self.depth) if few or z.device.type == "cuda" else 1
        if isinstance(self.noise, General):
            self._sort_streams(self.noise, z)

    def _sort_streams(self, noise: General, z: Tensor) -> None:
        """Choose the elimination order of the streams at the middle point and use it for all points."""
        middle = 1j * z.abs().median().view(1)
        index = torch.zeros(1, dtype=torch.int64, device=z.device)
        x = self.start(middle, index)
        for _ in range(_ROUGH):
            x = self.between(x, self.image(x, middle, index), 0.5)
        noise.sort_streams(self.values(x)[0, 1:].unflatten(0, (-1, noise.count)))

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return a start with blocks -i c I. [b, columns]

        From the input to the output, c goes geometrically from 1/|z| (x blocks) or about |z| (y blocks) to about 1.
        """
        layer = torch.arange(self.depth, dtype=torch.float64, device=z.device).view(-1, 1, 1, 1) / self.depth
        size = z.abs().log().view(1, -1, 1, 1)
        x = -1j * torch.exp((layer - 1) * size) * self.eye
        y = -1j * torch.exp((1 - layer - 1 / self.depth) * size) * self.eye
        x, y = (part.repeat_interleave(self.noise.paths, 1) for part in (x, y))
        eye = self.eye.expand_as(x)
        orders = self.noise.order(x, eye, 0), self.noise.order(y, eye, 1)
        unknowns = self.noise.respond(orders, (torch.zeros_like(orders[0]), torch.zeros_like(orders[1])))
        values = torch.cat([-1j / z.abs().unsqueeze(-1), torch.cat(unknowns).transpose(0, 1).flatten(1)], 1)
        return self.coordinates(values)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return the coordinates of g(x), from one evaluation of the equation. [b, columns]"""
        values = self.values(x)
        return self.coordinates(self.from_sweep(values, *self.sweep(z, values)))

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size [b] and Newton's correction of the coordinates [b, columns]."""
        if not self.noise.linear:
            return super().newton_correction(x, z, index)
        near = LinearisedChain(self, x, z)
        residual = near.image - x
        scale = self.scale(x, z, index)
        weight = 1 / (scale if self.noise.scalar else scale + self._rounding(x, z, index, near.image)).expand_as(x)
        correction = gmres(near.product, residual, weight, steps=_PRODUCTS, tolerance=_INEXACT)
        return (residual.abs() * weight).amax(-1), correction

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Interpolate from x towards its image, in logarithms of scalars or in entries of matrices. [b, columns]"""
        if self.noise.scalar:
            return x + share * (image - x)
        return self.coordinates((1 - share) * self.values(x) + share * self.values(image))

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        """Return a mask of the rows in which G and all unknowns lie in the lower half-plane. [b]

        For matrix unknowns M the pivots of i M must lie in the right half-plane.
        """
        logs = self._logarithms(x)
        return (logs.imag.abs() <= torch.pi / 2 + _ROUNDED_ANGLE).all(-1) & (logs.real.abs() < _LONGEST).all(-1)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return the divisors of residuals: one for scalars, typical sizes for matrices. [b, columns] or [1, 1]"""
        if self.noise.scalar:
            return torch.ones(1, 1, dtype=torch.float64, device=x.device)
        blocks = self.noise.scale(x[:, 1:].unflatten(1, (-1, self.noise.coordinates))).flatten(1)
        return torch.cat([torch.ones_like(blocks[:, :1]), blocks], 1)

    def rounding(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor | None:
        return None if self.noise.scalar else self._rounding(x, z, index, self.image(x, z, index))

    def _rounding(self, x: Tensor, z: Tensor, index: Tensor, image: Tensor) -> Tensor:
        """Return numbers to add to `scale` so that residuals from rounding stay below the tolerance. [b, columns]"""
        lost = self.lost_by_rounding(x, z, index, image) * _ABOVE_ROUNDING
        lost = torch.minimum(lost, _MOST_ROUNDING * self.scale(x, z, index)) / self.tolerance
        lost[:, 0] = 0.0
        return lost

    def lost_by_rounding(self, x: Tensor, z: Tensor, index: Tensor, image: Tensor) -> Tensor:
        """Return the change of g(x) that rounding of the unknowns causes. [b, columns]"""
        columns = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device)
        floor = torch.zeros_like(x.real)
        for period in (2, 3):
            moved = x * (1 + _ROUNDING * (columns % period - 0.5).sign())
            floor = torch.maximum(floor, (self.image(moved, z, index) - image).abs().nan_to_num())
        return floor

    def clamp(self, x: Tensor) -> Tensor:
        """Return x with G and the pivots of matrix unknowns moved to their half-plane. [b, columns]

        Complex arguments outside the half-plane are replaced by the nearest ones inside. Scalar unknowns do not change.
        """
        if self.noise.scalar:
            return x
        first, blocks = x[:, :1], x[:, 1:].unflatten(1, (-1, self.noise.coordinates))
        logs, rest = blocks.split([self.streams, self.noise.coordinates - self.streams], -1)
        first, logs = (torch.complex(part.real, part.imag.clamp(-torch.pi / 2, torch.pi / 2)) for part in (first, logs))
        return torch.cat([first, torch.cat([logs, rest], -1).flatten(1)], 1)

    def values(self, x: Tensor) -> Tensor:
        """Return G and the unknowns from their coordinates x. [b, columns]"""
        blocks = self.noise.to_unknowns(x[:, 1:].unflatten(1, (-1, self.noise.coordinates)))
        return torch.cat([torch.exp(x[:, :1]) * -1j, blocks.flatten(1)], 1)

    def hardest_layer(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the number of the layer with the largest residual, counted from one. [b]"""
        index = torch.arange(len(x), device=x.device)
        change = ((self.image(x, z, index) - x).abs() / self.scale(x, z, index)).nan_to_num(nan=torch.inf)[:, 1:]
        layers = change.unflatten(1, (2, self.depth, self.noise.coordinates)).amax((1, 3))
        return layers.argmax(-1) + 1

    def input_block(self, z: Tensor, x: Tensor) -> Tensor:
        r"""Return the mean of $(z - J^\top J)^{-1}$ over features, in the basis of the streams. [b, n, n]"""
        forward, _, resolvent = self.sweep(z, self.values(x))
        block = self.to_streams @ forward[0] @ resolvent[0] @ self.to_streams.mT
        return block.unflatten(0, (-1, self.noise.paths)).mean(1)

    def from_sweep(self, values: Tensor, forward: Tensor, backward: Tensor, resolvent: Tensor) -> Tensor:
        """Return G and new unknowns from the old unknowns and the results of `sweep`. [b, columns]"""
        # M_x = P (1 - N P)^-1 and M_y = (1 - N P)^-1 N
        new_x = self.noise.order(forward[:-1], resolvent[:-1], 0)
        new_y = self.noise.order(resolvent[1:], backward[1:], 1)
        green = ((self.trace @ forward[0]) * resolvent[0].mT).sum((-2, -1)) / self.streams
        green = green.unflatten(0, (-1, self.noise.paths)).mean(-1)
        new = self.noise.respond((new_x, new_y), self.split(values))
        flat = torch.cat(new).transpose(0, 1).flatten(1)
        return torch.cat([green.unsqueeze(-1), flat], 1)

    def sweep(self, z: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return P and N of docs/derivations/chain.md and (1 - N P)^-1 after every layer. [L + 1, b, n, n] each"""
        x, y = self.split(values)  # [L, b, count]
        sigma_y, sigma_x = self.noise.energy(x, 0), self.noise.energy(y, 1)
        # P_0 = 1/z at the input and N_L = 1 at the output, or the model's end moments in place of the ones
        every = z.repeat_interleave(self.noise.paths)
        first = torch.stack([self.input / every[:, None, None], self.output.expand(len(every), -1, -1)])
        add = torch.stack([sigma_y, sigma_x.flip(0)], 1)
        sat = torch.stack([sigma_x, sigma_y.flip(0)], 1)
        states = sweep(first, self.skips, add, sat, self.blocks)  # [L + 1, 2, b, n, n]
        forward, backward = states[:, 0], states[:, 1].flip(0)
        return forward, backward, solve_linear(one_minus(backward @ forward), self.eye)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = values[:, 1:].unflatten(1, (2 * self.depth, self.noise.count)).transpose(0, 1)
        return blocks[: self.depth], blocks[self.depth :]

    def coordinates(self, values: Tensor) -> Tensor:
        """Return the coordinates of G and unknowns, the inverse of `values`. [b, columns]"""
        blocks = self.noise.to_coordinates(values[:, 1:].unflatten(1, (-1, self.noise.count)))
        return torch.cat([to_logarithm(values[:, :1]), blocks.flatten(1)], 1)

    def _logarithms(self, x: Tensor) -> Tensor:
        """Return the coordinates that are logarithms: all coordinates of scalars, or G and the pivots. [b, ...]"""
        if self.noise.scalar:
            return x
        blocks = x[:, 1:].unflatten(1, (-1, self.noise.coordinates))[..., : self.streams]
        return torch.cat([x[:, :1], blocks.flatten(1)], 1)


class SeveralChains(ContinuedEquation):
    """The equations of several networks as one batch, with equally many consecutive rows (points) per network."""

    def __init__(self, parts: Sequence[ChainEquation], points: int) -> None:
        self.parts = parts
        self.owner = torch.arange(len(parts), device=parts[0].eye.device).repeat_interleave(points)
        self.known: tuple[Tensor, ChainEquation] | None = None

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return self._joined(index).start(z, index)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self._joined(index).image(x, z, index)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self.parts[0].admissible(x, z, index)

    def _joined(self, index: Tensor) -> ChainEquation:
        """Return one equation for the rows `index`; its tensors have an entry per row, from the row's network."""
        if self.known is None or not torch.equal(self.known[0], index):
            rows = self.owner[index]
            joined = copy(self.parts[0])
            noises = [part.noise for part in self.parts if isinstance(part.noise, Block)]
            joined.noise = type(noises[0]).for_rows(noises, rows)
            joined.skips = torch.cat([part.skips for part in self.parts], 2)[:, :, rows]
            joined.input = torch.stack([part.input for part in self.parts])[rows]
            joined.output = torch.stack([part.output for part in self.parts])[rows]
            joined.blocks = 1
            self.known = index, joined
        return self.known[1]


def self_energy(network: Network, bases: Tensor | None = None) -> SelfEnergy:
    """Return the structure of a network's noise, in the bases [L + 1, n, n] between the layers if given."""
    if network.slopes is not None or (network.isotropic and bases is not None):
        return Paths(network, bases)
    if network.isotropic:
        return Isotropic(network)
    if bases is not None:
        before = torch.linalg.inv(bases[:-1])
        if network.covariance is not None:
            moved = bases[1:].unsqueeze(1) @ network.covariance @ before.unsqueeze(1)
            network = replace(network, covariance=moved)
        else:
            assert network.read is not None
            assert network.write is not None
            read = (before.mT @ network.read.unsqueeze(-1)).squeeze(-1)
            write = (bases[1:] @ network.write.unsqueeze(-1)).squeeze(-1)
            network = replace(network, read=read, write=write)
    if network.covariance is not None:
        return General(network)
    return Block(network) if network.sublayers is None else Sublayers(network, network.sublayers)
