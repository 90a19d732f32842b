r"""The exact method for any depth: the matrix Dyson equation of the whole chain of layers (docs/derivations/chain.md).

The unknowns are what the self-energies depend on (selfenergy.py): two scalars per layer for isotropic noise and for the
hyper-connection block. One evaluation of the equation is two sweeps over the layers, O(L n³) per point.

Note:
    The paper composes layers through scalar or twisted S-transforms. The former is exact for multiples of orthogonal
    skips only and the latter for two layers; this equation is exact, in the limit of many features, for every network
    whose layers have weights of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import KnownPoints, Solution
from jpmhc.spectra.solvers.bases import separating_bases
from jpmhc.spectra.solvers.couplings import find_couplings
from jpmhc.spectra.solvers.fixed_point import Anderson, AndersonNewton, Scheme
from jpmhc.spectra.solvers.fixed_point.continuation import AtPoints, Equation, lead_down
from jpmhc.spectra.solvers.fixed_point.contract import FixedPoints
from jpmhc.spectra.solvers.selfenergy import Block, General, self_energy, to_logarithm
from jpmhc.spectra.solvers.sweep import one_minus, solve_linear, sweep

# Working memory of one chunk of points, and how many arrays of all layers' states and of all unknowns are alive in it.
_MEMORY = {"cpu": 2**29, "cuda": 2**33}
_ALIVE = 12
_HISTORY = 60
_DERIVATIVES = 5
_SCHEME = Anderson()
# Newton's method ends the iteration where its matrix, a row and a column for each unknown, has no more rows than this;
# beyond the smaller number only for points that take many iterations.
_NEWTON_SMALL, _NEWTON_LARGEST = 128, 256
_LATE = (60,)
# After so many plain steps the blocks' sizes are known well enough to sort their streams.
_ROUGH = 20
_LONGEST = 600
# By how much rounding may turn a number that lies on the edge of the half-plane out of it.
_ROUNDED_ANGLE = 1e-7
# A relative change of the unknowns by rounding, and how far above what it causes a residual may be: never above the
# last number.
_ROUNDING = 1e-15
_ABOVE_ROUNDING = 10.0
_MOST_ROUNDING = 1e-3
# On a CPU so few points through so many layers are solved in blocks of layers.
_FEW, _DEEP = 8, 40
# Below this fraction of the mean squared singular value the rounding of large singular values would be felt.
_SMALL = 1e-5


def solve(
    network: Network,
    z: Tensor,
    *,
    tolerance: float = 1e-9,
    maximum: int = 500,
    scheme: Scheme | None = None,
    known: KnownPoints | None = None,
    matrix: bool = False,
) -> Solution:
    r"""Solve the Dyson equation of the whole chain of layers at the points z [B].

    Args:
        network: Any network whose layers have weights of their own.
        z: Points of the upper half plane. [B]
        tolerance: A point has converged when no unknown changes by more than this fraction of itself.
        maximum: The most iterations per point and height.
        scheme: How to iterate; by default Anderson mixing, ended by Newton's method where that is cheap.
        known: Points at which the network has been solved before; each point starts from the nearest of them.
        matrix: Whether to compute the matrix-valued transform too.
    """
    if network.tied is not None:
        raise ValueError("method 'chain' needs layers with weights of their own; for tied weights use method 'pencil'")
    if network.is_zero:
        blocks = torch.eye(network.streams, device=z.device) / z[:, None, None] if matrix else None
        nothing = torch.zeros_like(z.real)
        return Solution(1 / z, nothing == 0, nothing, nothing.long(), method="chain", matrix=blocks)
    if network.streams == 1 and network.covariance is not None:  # noise of one stream has one variance
        variance = network.variance * network.covariance.square().sum((1, 2, 3))
        network = replace(network, variance=variance, covariance=None)
    network, gain = network.rescaled()
    points = z / gain
    equation = _Equation(network, points)
    columns = 1 + 2 * network.depth * equation.noise.coordinates
    if scheme is None:
        scheme = AndersonNewton() if columns <= _NEWTON_SMALL else AndersonNewton(turns=_LATE)
        if equation.noise.vectors is None or columns > _NEWTON_LARGEST:
            scheme = _SCHEME
    blocks_size = (network.depth + 1) * network.streams**2 * 2 * _ALIVE * equation.noise.paths
    per_point = 16 * (blocks_size + columns * _HISTORY)
    chunk = max(1, _MEMORY[z.device.type] // per_point)
    # The unknowns of a general covariance depend on the bases of the call.
    if known is not None and known.separated != equation.separated:
        known = None
    if known is not None:
        known = replace(known, unknowns=equation._coordinates(known.unknowns))
    parts = []
    for part in points.split(chunk):
        start = equation.start(part, torch.arange(len(part), device=z.device))
        start = start if known is None else known.start_near(part * gain, start, equation.inside)
        parts.append(_solve_points(equation, part, start, scheme, tolerance, maximum))
    found = FixedPoints.concatenate(parts)
    good = found.converged
    known = KnownPoints(z[good], equation.values(found.x[good]), equation.separated) if bool(good.any()) else None
    green = equation.values(found.x)[:, 0] / gain
    blocks = None
    if matrix:
        rows = zip(points.split(chunk), found.x.split(chunk))
        blocks = torch.cat([equation.input_block(part, x) for part, x in rows]) / gain
    layers = torch.zeros_like(found.iterations)
    if len(left := found.unconverged()):
        layers[left] = torch.cat(
            [equation.hardest_layer(x, part) for x, part in zip(found.x[left].split(chunk), points[left].split(chunk))]
        )
    return Solution(
        green,
        found.converged,
        found.residual,
        found.iterations,
        method="chain",
        matrix=blocks,
        known=known,
        hardest_layer=layers,
    )


def solve_together(networks: Sequence[Network], z: Tensor, *, tolerance: float = 1e-9) -> Tensor:
    r"""Solve several networks at the same points z [B] and return G [K, B]: operations on all of them are fewer.

    A network whose points resist the first try, or need bases of their own, is solved by itself.

    Args:
        networks: Networks of the block's noise, with as many layers and streams and the same kinds of sublayers.
        z: Points of the upper half plane.
        tolerance: As in `solve`.
    """
    scaled = [network.rescaled() for network in networks]
    gains = torch.tensor([gain for _, gain in scaled], dtype=torch.float64, device=z.device)
    points = z / gains.unsqueeze(-1)  # [K, B]
    green = torch.full_like(points, torch.nan)
    own_bases = points.abs().amin(-1) < _SMALL
    joint = [k for k in range(len(networks)) if not own_bases[k] and not networks[k].is_zero]
    per_network = 16 * len(z) * ((networks[0].depth + 1) * (networks[0].streams ** 2 * 2 * _ALIVE + 2 * _HISTORY))
    chunk = max(1, _MEMORY[z.device.type] // per_network)
    for begin in range(0, len(joint), chunk):
        part = joint[begin : begin + chunk]
        equation = _Several([_Equation(scaled[k][0], points[k]) for k in part], len(z))
        here = points[part].flatten()
        rows = torch.arange(len(here), device=z.device)
        start = equation.start(here, rows)
        found = _SCHEME.solve(AtPoints(equation, here, rows), start, tolerance, _SCHEME.first_try)
        values = equation.parts[0].values(found.x)[:, 0]
        values = torch.where(found.converged, values, torch.nan).unflatten(0, (len(part), -1))
        green[part] = values / gains[part].unsqueeze(-1)
    for k in (~torch.isfinite(green).all(-1)).nonzero().flatten().tolist():
        green[k] = solve(networks[k], z, tolerance=tolerance).G
    return green


def _solve_points(
    equation: _Equation, z: Tensor, start: Tensor, scheme: Scheme, tolerance: float, maximum: int
) -> FixedPoints:
    """Solve the equation at all points at once; those that resist are started from others or led down from above."""
    rows = torch.arange(len(z), device=z.device)
    first_try = min(maximum, scheme.first_try)
    found = scheme.solve(AtPoints(equation, z, rows), start, tolerance, first_try)
    left = _left_above_rounding(equation, z, found, tolerance)
    hard = scheme.for_hard_rows()
    left = _start_from_neighbours(equation, z, found, left, hard, tolerance, first_try)
    if maximum > first_try and len(left):
        # At eta = |z| the equation contracts strongly.
        led = lead_down(equation, z[left], hard, top=z[left].abs(), tolerance=tolerance, maximum=maximum)
        found.merge_pass(left, led)
        left = _left_above_rounding(equation, z, found, tolerance)
        _start_from_neighbours(equation, z, found, left, hard, tolerance, maximum)
    return found


def _start_from_neighbours(
    equation: _Equation, z: Tensor, found: FixedPoints, left: Tensor, scheme: Scheme, tolerance: float, maximum: int
) -> Tensor:
    """Solve rows that are left from the nearest points that have been solved, as long as that finds more of them."""
    before = len(left) + 1
    while 0 < len(left) < min(before, len(z)):
        before = len(left)
        solved = KnownPoints(z[found.converged], found.x[found.converged])
        start = solved.start_near(z[left], found.x[left], equation.inside)
        found.merge_pass(left, scheme.solve(AtPoints(equation, z[left], left), start, tolerance, maximum))
        left = _left_above_rounding(equation, z, found, tolerance)
    return left


def _left_above_rounding(equation: _Equation, z: Tensor, found: FixedPoints, tolerance: float) -> Tensor:
    """Mark rows as converged that only rounding keeps above the tolerance; return the places of those still left.

    Where unknowns differ by many orders of magnitude the smallest are known to few digits, which G does not feel: its
    own change must be within the tolerance.
    """
    left = found.unconverged()
    if len(left):
        x, points = found.x[left], z[left]
        image, scale = equation.image(x, points, left), equation.scale(x, points, left)
        places = torch.arange(x.shape[-1], dtype=torch.float64, device=z.device)
        floor = torch.zeros_like(x.real)
        for period in (2, 3):
            moved = x * (1 + _ROUNDING * (places % period - 0.5).sign())
            floor = torch.maximum(floor, (equation.image(moved, points, left) - image).abs() / scale)
        change = (image - x).abs() / scale
        level = floor.amax(-1)
        rounded = (change.amax(-1) <= _ABOVE_ROUNDING * level) & (level <= _MOST_ROUNDING)
        rounded &= (torch.maximum(change, floor)[:, 0] <= tolerance) & equation.admissible(x, points, left)
        found.converged[left[rounded]] = True
        left = left[~rounded]
    return left


class _Equation(Equation):
    """The chain's equation as a fixed point: rows are points, columns G and the unknowns of all x and all y blocks.

    G itself takes no part in the equation; as a column its convergence is watched, and it needs no sweep of its own.
    Scalars of the lower half-plane are iterated as logarithms: their sizes differ by many orders of magnitude along a
    deep chain, and the guard that keeps Im G < 0 becomes a bound on the argument. Matrices are iterated as the factors
    of their triangular decomposition, with the pivots' logarithms.
    """

    def __init__(self, network: Network, z: Tensor) -> None:
        self.depth, self.streams = network.depth, network.streams
        self.eye = torch.eye(self.streams, dtype=torch.complex128, device=z.device)
        separated = separating_bases(network.skips) if float(z.abs().min()) < _SMALL else None
        bases, skips = (None, network.skips) if separated is None else separated
        self.noise = self_energy(network, bases)
        self.separated = separated is not None and not self.noise.scalar
        # What is asked at both ends as the bases see it, and the inverse metric of the first, with which G is a trace.
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
        # Where launching small operations is what takes the time, blocks of layers side by side are faster.
        few = len(z) <= _FEW and self.depth >= _DEEP
        self.blocks = math.isqrt(self.depth) if few or z.device.type == "cuda" else 1
        if isinstance(self.noise, General):
            self._sort_streams(self.noise, z)

    def _sort_streams(self, noise: General, z: Tensor) -> None:
        """Let matrices be decomposed in the order that fits them in the middle of the points."""
        middle = 1j * z.abs().median().view(1)
        index = torch.zeros(1, dtype=torch.int64, device=z.device)
        x = self.start(middle, index)
        for _ in range(_ROUGH):
            x = self.between(x, self.image(x, middle, index), 0.5)
        noise.sort_streams(self.values(x)[0, 1:].unflatten(0, (-1, noise.count)))

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        """Return -i times what interpolates geometrically between 1/|z| at the input and 1 at the output."""
        layer = torch.arange(self.depth, dtype=torch.float64, device=z.device).view(-1, 1, 1, 1) / self.depth
        size = z.abs().log().view(1, -1, 1, 1)
        x = -1j * torch.exp((layer - 1) * size) * self.eye
        y = -1j * torch.exp((1 - layer - 1 / self.depth) * size) * self.eye
        x, y = (part.repeat_interleave(self.noise.paths, 1) for part in (x, y))
        eye = self.eye.expand_as(x)
        orders = self.noise.order(x, eye, 0), self.noise.order(y, eye, 1)
        unknowns = self.noise.respond(orders, (torch.zeros_like(orders[0]), torch.zeros_like(orders[1])))
        values = torch.cat([-1j / z.abs().unsqueeze(-1), torch.cat(unknowns).transpose(0, 1).flatten(1)], 1)
        return self._coordinates(values)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return the unknowns that the self-energies of the given unknowns lead to. [b, columns]"""
        return self._coordinates(self._evaluate(z, self.values(x)))

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual's size [b] and what Newton adds to the coordinates [b, columns]."""
        if self.noise.vectors is None:
            return super().newton_correction(x, z, index)
        rows = max(1, _MEMORY["cpu"] // (16 * _DERIVATIVES * x.shape[-1] ** 2))
        parts = [self._newton_part(*part) for part in zip(x.split(rows), z.split(rows))]
        return torch.cat([size for size, _ in parts]), torch.cat([correction for _, correction in parts])

    def _newton_part(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        assert self.noise.vectors is not None
        values = self.values(x)
        swept = self._sweep(z, values)
        image = self._coordinates(self._from_sweep(values, *swept))
        sigma_x = self.noise.energy(self._split(values)[1], 1)
        couplings, first = find_couplings(
            *swept, sigma_x, self.skips[0], self.noise.vectors, self.to_streams, self.noise.wants_squares
        )
        blocks = [part[:, 1:].unflatten(1, (-1, self.noise.coordinates)) for part in (x, image)]
        derivative, green = self.noise.differentiate(couplings, first, *blocks)
        residual = image - x
        correction, _ = torch.linalg.solve_ex(one_minus(derivative), residual[:, 1:])
        # d log(i G) = dG / G, and the logarithm is that of the column.
        green = green * torch.exp(-image[:, :1]) * 1j / self.streams
        change = residual[:, :1] + (green * correction).sum(-1, keepdim=True)
        size = (residual.abs() / self.scale(x, z, z)).amax(-1)
        return size, torch.cat([change, correction], -1)

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        """Return a point between x and its image: among logarithms of scalars, or among the matrices themselves."""
        if self.noise.scalar:
            return x + share * (image - x)
        return self._coordinates((1 - share) * self.values(x) + share * self.values(image))

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        """Return whether G and all unknowns, or the pivots of matrices, lie in the lower half-plane. [b]"""
        logs = self._logarithms(x)
        return (logs.imag.abs() <= torch.pi / 2 + _ROUNDED_ANGLE).all(-1) & (logs.real.abs() < _LONGEST).all(-1)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        """Return one for logarithms, which are relative already, and the size that is usual for other coordinates."""
        if self.noise.scalar:
            return torch.ones(1, 1, dtype=torch.float64, device=x.device)
        blocks = self.noise.scale(x[:, 1:].unflatten(1, (-1, self.noise.coordinates))).flatten(1)
        return torch.cat([torch.ones_like(blocks[:, :1]), blocks], 1)

    def values(self, x: Tensor) -> Tensor:
        """Return G and the unknowns of coordinates. [b, columns]"""
        blocks = self.noise.to_unknowns(x[:, 1:].unflatten(1, (-1, self.noise.coordinates)))
        return torch.cat([torch.exp(x[:, :1]) * -1j, blocks.flatten(1)], 1)

    def hardest_layer(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the number of the layer, from one, whose unknowns are farthest from solving their equations. [b]"""
        index = torch.arange(len(x), device=x.device)
        change = ((self.image(x, z, index) - x).abs() / self.scale(x, z, index)).nan_to_num(nan=torch.inf)[:, 1:]
        layers = change.unflatten(1, (2, self.depth, self.noise.coordinates)).amax((1, 3))
        return layers.argmax(-1) + 1

    def input_block(self, z: Tensor, x: Tensor) -> Tensor:
        """Return the block of the resolvent that belongs to the input, in the streams' own basis. [b, n, n]"""
        forward, _, resolvent = self._sweep(z, self.values(x))
        block = self.to_streams @ forward[0] @ resolvent[0] @ self.to_streams.mT
        return block.unflatten(0, (-1, self.noise.paths)).mean(1)

    def _evaluate(self, z: Tensor, values: Tensor) -> Tensor:
        """Sweep over the layers once: from the self-energies of the unknowns to G and new unknowns. [b, columns]"""
        return self._from_sweep(values, *self._sweep(z, values))

    def _from_sweep(self, values: Tensor, forward: Tensor, backward: Tensor, resolvent: Tensor) -> Tensor:
        """Return G and new unknowns from the ends of a sweep. [b, columns]"""
        # M_x = P (1 - N P)^-1 and M_y = (1 - N P)^-1 N
        new_x = self.noise.order(forward[:-1], resolvent[:-1], 0)
        new_y = self.noise.order(resolvent[1:], backward[1:], 1)
        green = ((self.trace @ forward[0]) * resolvent[0].mT).sum((-2, -1)) / self.streams
        green = green.unflatten(0, (-1, self.noise.paths)).mean(-1)
        new = self.noise.respond((new_x, new_y), self._split(values))
        flat = torch.cat(new).transpose(0, 1).flatten(1)
        return torch.cat([green.unsqueeze(-1), flat], 1)

    def _sweep(self, z: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return P and N of docs/derivations/chain.md and (1 - N P)^-1 after every layer. [L + 1, b, n, n] each"""
        x, y = self._split(values)  # [L, b, count]
        sigma_y, sigma_x = self.noise.energy(x, 0), self.noise.energy(y, 1)
        # P_0 = 1/z and N_L = 1, or the ends of the model: forward from the input, backward from the output
        every = z.repeat_interleave(self.noise.paths)
        first = torch.stack([self.input / every[:, None, None], self.output.expand(len(every), -1, -1)])
        add = torch.stack([sigma_y, sigma_x.flip(0)], 1)
        sat = torch.stack([sigma_x, sigma_y.flip(0)], 1)
        states = sweep(first, self.skips, add, sat, self.blocks)  # [L + 1, 2, b, n, n]
        forward, backward = states[:, 0], states[:, 1].flip(0)
        return forward, backward, solve_linear(one_minus(backward @ forward), self.eye)

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = values[:, 1:].unflatten(1, (2 * self.depth, self.noise.count)).transpose(0, 1)
        return blocks[: self.depth], blocks[self.depth :]

    def _coordinates(self, values: Tensor) -> Tensor:
        """Return the coordinates of G and the unknowns. [b, columns]"""
        blocks = self.noise.to_coordinates(values[:, 1:].unflatten(1, (-1, self.noise.count)))
        return torch.cat([to_logarithm(values[:, :1]), blocks.flatten(1)], 1)

    def _logarithms(self, x: Tensor) -> Tensor:
        """Return those of the coordinates that are logarithms. [b, ...]"""
        if self.noise.scalar:
            return x
        blocks = x[:, 1:].unflatten(1, (-1, self.noise.coordinates))[..., : self.streams]
        return torch.cat([x[:, :1], blocks.flatten(1)], 1)


class _Several(Equation):
    """The equations of several networks at equally many points each, as one: the rows of one follow another's."""

    def __init__(self, parts: Sequence[_Equation], points: int) -> None:
        self.parts = parts
        self.owner = torch.arange(len(parts), device=parts[0].eye.device).repeat_interleave(points)
        self.known: tuple[Tensor, _Equation] | None = None

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return self._joined(index).start(z, index)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self._joined(index).image(x, z, index)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self.parts[0].admissible(x, z, index)

    def _joined(self, index: Tensor) -> _Equation:
        """Return the equation of these rows: every row has the tensors of its network."""
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
