r"""The exact method for any depth: the matrix Dyson equation of the whole chain of layers (docs/derivations/chain.md).

The unknowns are what the self-energies depend on (selfenergy.py): two scalars per layer for isotropic noise and for the
hyper-connection block. One evaluation of the equation is two sweeps over the layers, O(L n³) per point.

Note:
    The paper composes layers through scalar or twisted S-transforms. The former is exact for multiples of orthogonal
    skips only and the latter for two layers; this equation is exact, in the limit of many features, for every network
    whose layers have weights of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.spectra.chain.equation import MEMORY, SMALL, ChainEquation, SeveralChains
from jpmhc.spectra.chain.fixed_point import Anderson, AndersonNewton, Newton, Scheme
from jpmhc.spectra.chain.fixed_point.continuation import AtPoints, lead_along, lead_down
from jpmhc.spectra.chain.fixed_point.contract import FixedPoints
from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import KnownPoints, Solution

# How many arrays of all layers' states and of all unknowns are alive in the memory of one chunk of points.
_ALIVE = 12
_HISTORY = 60
_SCHEME = Anderson()
# How points between bands are solved, where mixing stands still.
_STUBBORN = Newton(lengths=(1.0, 0.3), first_try=12, stage_iterations=8, stubborn=True)
# Newton's method ends the iteration where its matrix, a row and a column for each unknown, has no more rows than this;
# beyond the smaller number only for points that take many iterations.
_NEWTON_SMALL, _NEWTON_LARGEST = 128, 256
_LATE = (60,)
# Points no farther apart than this, in the logarithm of z, are led from one to the other at once; edges of bands lie
# along the axis, where distances count so many times.
_NEAR, _ALONG = 2.0, 3.0
# A point is accepted above the tolerance where its residual is at most so many times what rounding causes, and that is
# at most the second number.
_ACCEPTED_ABOVE_ROUNDING = 10.0
_ACCEPTED_ROUNDING = 1e-2


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
        scheme: How to iterate; by default Anderson mixing, ended by Newton's method where that is cheap. Whatever it
            is, points of general noise that it leaves unsolved are led from solved ones by Newton's method.
        known: Points at which the network has been solved before; each point starts from the nearest of them.
        matrix: Whether to compute the matrix-valued transform too.
    """
    if network.tied is not None:
        raise ValueError("the matrix-valued transform needs layers with weights of their own, and these are tied")
    if network.is_zero:
        return _solve_zero(network, z, matrix)
    if network.streams == 1 and network.covariance is not None:  # noise of one stream has one variance
        variance = network.variance * network.covariance.square().sum((1, 2, 3))
        network = replace(network, variance=variance, covariance=None)
    network, gain = network.rescaled()
    points = z / gain
    equation = ChainEquation(network, points, tolerance)
    columns = 1 + 2 * network.depth * equation.noise.coordinates
    scheme = _choose_scheme(equation, columns) if scheme is None else scheme
    blocks_size = (network.depth + 1) * network.streams**2 * 2 * _ALIVE * equation.noise.paths
    per_point = 16 * (blocks_size + columns * _HISTORY)
    chunk = max(1, MEMORY[z.device.type] // per_point)
    # The unknowns of a general covariance depend on the bases of the call.
    if known is not None and known.separated != equation.separated:
        known = None
    if known is not None:
        known = replace(known, z=known.z / gain, unknowns=equation.coordinates(known.unknowns))
    parts = []
    for part in points.split(chunk):
        start = equation.start(part, torch.arange(len(part), device=z.device))
        start = start if known is None else known.start_near(part, start, equation.inside)
        parts.append(_solve_points(equation, part, start, known, scheme, tolerance, maximum))
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


def _solve_zero(network: Network, z: Tensor, matrix: bool) -> Solution:
    """Return the solution of a network that maps everything to zero, G = 1/z."""
    blocks = torch.eye(network.streams, device=z.device) / z[:, None, None] if matrix else None
    nothing = torch.zeros_like(z.real)
    return Solution(1 / z, nothing == 0, nothing, nothing.long(), method="chain", matrix=blocks)


def _choose_scheme(equation: ChainEquation, columns: int) -> Scheme:
    """Return Anderson mixing, ended by Newton's method where its matrix is known and has few columns."""
    if equation.noise.vectors is None or columns > _NEWTON_LARGEST:
        return _SCHEME
    return AndersonNewton(newton=_STUBBORN) if columns <= _NEWTON_SMALL else AndersonNewton(turns=_LATE)


def solve_together(networks: Sequence[Network], z: Tensor, *, tolerance: float = 1e-9) -> Tensor:
    r"""Solve several networks at the same points z [B] and return G [K, B]: operations on all of them are fewer.

    They are solved by Anderson mixing. A network whose points resist the first try, or need bases of their own, is
    solved by itself.

    Args:
        networks: Networks of the block's noise, with as many layers and streams and the same kinds of sublayers.
        z: Points of the upper half plane.
        tolerance: As in `solve`.
    """
    scaled = [network.rescaled() for network in networks]
    gains = torch.tensor([gain for _, gain in scaled], dtype=torch.float64, device=z.device)
    points = z / gains.unsqueeze(-1)  # [K, B]
    green = torch.full_like(points, torch.nan)
    own_bases = points.abs().amin(-1) < SMALL
    joint = [k for k in range(len(networks)) if not own_bases[k] and not networks[k].is_zero]
    per_network = 16 * len(z) * ((networks[0].depth + 1) * (networks[0].streams ** 2 * 2 * _ALIVE + 2 * _HISTORY))
    chunk = max(1, MEMORY[z.device.type] // per_network)
    for begin in range(0, len(joint), chunk):
        part = joint[begin : begin + chunk]
        equation = SeveralChains([ChainEquation(scaled[k][0], points[k]) for k in part], len(z))
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
    equation: ChainEquation,
    z: Tensor,
    start: Tensor,
    known: KnownPoints | None,
    scheme: Scheme,
    tolerance: float,
    maximum: int,
) -> FixedPoints:
    """Solve the equation at all points at once; those that resist are led there from others or from above."""
    rows = torch.arange(len(z), device=z.device)
    first_try = min(maximum, scheme.first_try)
    found = scheme.solve(AtPoints(equation, z, rows), start, tolerance, first_try)
    left = _left_above_rounding(equation, z, found)
    hard = scheme.for_hard_rows()
    left = _solve_from_others(equation, z, found, left, known, hard, tolerance, first_try)
    if maximum > first_try and len(left):
        # At eta = |z| the equation contracts strongly.
        led = lead_down(equation, z[left], hard, top=z[left].abs(), tolerance=tolerance, maximum=maximum)
        found.merge_pass(left, led)
        left = _left_above_rounding(equation, z, found)
        _solve_from_others(equation, z, found, left, known, hard, tolerance, maximum)
    return found


def _solve_from_others(
    equation: ChainEquation,
    z: Tensor,
    found: FixedPoints,
    left: Tensor,
    known: KnownPoints | None,
    scheme: Scheme,
    tolerance: float,
    maximum: int,
) -> Tensor:
    """Solve rows that are left from points that have been solved: matrices are led along, scalars start there."""
    if not equation.noise.scalar:
        return _lead_from_known(equation, z, found, left, known, tolerance)
    before = len(left) + 1
    while 0 < len(left) < min(before, len(z)):
        before = len(left)
        solved = KnownPoints(z[found.converged], found.x[found.converged])
        start = solved.start_near(z[left], found.x[left], equation.inside)
        found.merge_pass(left, scheme.solve(AtPoints(equation, z[left], left), start, tolerance, maximum))
        left = _left_above_rounding(equation, z, found)
    return left


def _lead_from_known(
    equation: ChainEquation, z: Tensor, found: FixedPoints, left: Tensor, known: KnownPoints | None, tolerance: float
) -> Tensor:
    """Solve rows that are left from the nearest points that have been solved; rows far from all wait for others."""
    waiting = torch.ones_like(found.converged)
    while len(left):
        solved = KnownPoints(z[found.converged], found.x[found.converged])
        if known is not None:
            solved = KnownPoints(torch.cat([solved.z, known.z]), torch.cat([solved.unknowns, known.unknowns]))
        rows = left[waiting[left]]
        if len(rows) == 0 or len(solved.z) == 0:
            break
        apart = z[rows].log().unsqueeze(-1) - solved.z.log()
        distance, nearest = (apart.imag.abs() + _ALONG * apart.real.abs()).min(-1)
        near = distance <= max(_NEAR, float(distance.min()))
        rows, nearest = rows[near], nearest[near]
        waiting[rows] = False
        start = solved.z[nearest], solved.unknowns[nearest]
        led = lead_along(equation, *start, z[rows], rows, _STUBBORN, tolerance)
        found.merge_pass(rows, led)
        left = _left_above_rounding(equation, z, found)
        if float(distance.min()) > _NEAR and not bool(led.converged.any()):
            break  # the rest is farther still
    return left


def _left_above_rounding(equation: ChainEquation, z: Tensor, found: FixedPoints) -> Tensor:
    """Mark rows as converged that only rounding keeps above the tolerance; return the places of those still left.

    Where unknowns differ by many orders of magnitude the smallest are known to few digits. So is G itself at points
    far below the largest singular values: nothing would make it better, and its residual says how good it is.
    """
    left = found.unconverged()
    if len(left):
        x, points = found.x[left], z[left]
        image, scale = equation.image(x, points, left), equation.scale(x, points, left)
        floor = equation.lost_by_rounding(x, points, left, image) / scale
        change = (image - x).abs() / scale
        level = floor.amax(-1)
        rounded = (change.amax(-1) <= _ACCEPTED_ABOVE_ROUNDING * level) & (level <= _ACCEPTED_ROUNDING)
        rounded &= equation.admissible(x, points, left)
        found.converged[left[rounded]] = True
        left = left[~rounded]
    return left
