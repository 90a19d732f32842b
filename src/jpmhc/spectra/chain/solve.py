r"""The exact method for any depth: the Cauchy transform by the matrix Dyson equation of the whole chain of layers.

`ChainEquation` is the equation, and `fixed_point` iterates the equation. This file decides in which order points are
solved and from where each point starts.

Note:
    The paper composes layers through scalar or twisted S-transforms. Scalar S-transforms are exact only for multiples
    of orthogonal skips, and twisted S-transforms for two layers. The chain's equation is exact for every network, in
    the limit of many features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.spectra.chain import tied
from jpmhc.spectra.chain.equation import MEMORY, SMALL, ChainEquation, SeveralChains
from jpmhc.spectra.fixed_point import FixedPoints, Options, Scheme, lead_along, lead_down
from jpmhc.spectra.fixed_point import solve as solve_equation
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.schemes import Anderson, AndersonNewton, Newton
from jpmhc.spectra.solution import KnownPoints, Solution, solve_points, to_options

# The numbers of arrays [layers, n, n] and of arrays [unknowns] per point that are in memory at the same time.
_ALIVE = 12
_HISTORY = 60
_DEFAULTS = Options(Anderson(), tolerance=1e-9, maximum=500)
# Points between bands, where Anderson mixing makes no progress, are solved by this scheme.
_STUBBORN = Newton(lengths=(1.0, 0.3), first_try=12, stage_iterations=8, stubborn=True)
# With at most _FEW unknowns, Newton's method follows after so many iterations of Anderson mixing.
_FEW, _LATE = 256, (100,)
# Points no farther apart than _NEAR, in the logarithm of z, are solved by continuation from one to the other. Distances
# along the real axis, on which band edges lie, count _ALONG times.
_NEAR, _ALONG = 2.0, 3.0
# If there are at least 200 points, every 20th is solved first, and the others start from these: this saves a third to a
# half of the evaluations.
_SWEPT, _SEED_EVERY = 200, 20
# A point above the tolerance is accepted if its residual is at most the first number times the change caused by
# rounding, and if this change is at most the second number.
_ACCEPTED_ABOVE_ROUNDING = 10.0
_ACCEPTED_ROUNDING = 1e-2


def cauchy(
    network: Network,
    z: Tensor,
    *,
    tolerance: float | None = None,
    maximum: int | None = None,
    scheme: str | Scheme | None = None,
    near: Solution | None = None,
    matrix: bool = False,
) -> Solution:
    r"""Compute the Cauchy transform $G(z)$ of $J^\top J$ at points of the upper half-plane.

    The result marks the points that did not converge.

    >>> solution = cauchy(Network.repeated(torch.eye(2), 0.1, 3), torch.tensor(1.0 + 0.1j))
    >>> bool(solution.converged), bool(solution.G.imag < 0)
    (True, True)

    Args:
        z: The points, of any shape.
        tolerance: A point has converged when no unknown changes by more than this fraction of itself; 1e-9 if None.
        maximum: The largest number of iterations per point; 500 if None.
        scheme: The way to iterate: a name in `SCHEMES`, or an object such as `Anderson(history=10)`. None stands for
            Anderson mixing, followed by Newton's method if there are few unknowns. For general noise, points that the
            scheme does not solve are solved by Newton's method with continuation from solved points.
        near: An earlier solution of the same network; each point starts from the nearest point of this solution.
        matrix: Whether to compute the matrix-valued transform too, which is not defined for tied weights.
    """
    require_network(network)
    if network.tied is not None:
        if matrix:
            raise ValueError("the matrix-valued transform needs layers with weights of their own, and these are tied")
        options = to_options(tied.DEFAULTS, tolerance, maximum, scheme)
        known = near.known if near is not None and near.method == "pencil" else None
        return solve_points(lambda points: tied.solve_row(network, points, options, known), network, z)
    options = to_options(_DEFAULTS, tolerance, maximum, scheme)
    known = near.known if near is not None and near.method == "chain" else None
    return solve_points(lambda points: _solve_row(network, points, options, known, matrix), network, z)


def _solve_row(network: Network, z: Tensor, options: Options, known: KnownPoints | None, matrix: bool) -> Solution:
    """Solve the Dyson equation of the whole chain of layers at points z [B]; start from `known` points if given."""
    if network.is_zero:
        return _solve_zero(network, z, matrix)
    if network.streams == 1 and network.covariance is not None:  # noise of one stream has one variance
        variance = network.variance * network.covariance.square().sum((1, 2, 3))
        network = replace(network, variance=variance, covariance=None)
    network, gain = network.rescaled()
    points = z / gain
    equation = ChainEquation(network, points, options.tolerance)
    columns = 1 + 2 * network.depth * equation.noise.coordinates
    noise = equation.noise
    few = columns <= _FEW and noise.scalar and noise.linear and noise.paths == 1
    if few and options.scheme is _DEFAULTS.scheme:
        options = replace(options, scheme=AndersonNewton(newton=_STUBBORN, turns=_LATE))
    blocks_size = (network.depth + 1) * network.streams**2 * 2 * _ALIVE * equation.noise.paths
    chunk = max(1, MEMORY[z.device.type] // (16 * (blocks_size + columns * _HISTORY)))
    # With a general covariance, unknowns in separating bases cannot start an equation without them, nor the reverse.
    if known is not None and known.separated != equation.separated:
        known = None
    if known is not None:
        known = replace(known, z=known.z / gain, unknowns=equation.coordinates(known.unknowns))
    row = _solve_in_chunks(equation, points, known, options, chunk)
    good, unsolved = row.converged, row.unconverged()
    values = equation.values(row.x)
    blocks = None
    if matrix:
        parts = zip(points.split(chunk), row.x.split(chunk))
        blocks = torch.cat([equation.input_block(part, x) for part, x in parts]) / gain
    layers = torch.zeros_like(row.iterations)
    if len(unsolved):
        parts = zip(points[unsolved].split(chunk), row.x[unsolved].split(chunk))
        layers[unsolved] = torch.cat([equation.hardest_layer(x, part) for part, x in parts])
    return Solution(
        values[:, 0] / gain,
        row.converged,
        row.residual,
        row.iterations,
        method="chain",
        matrix=blocks,
        known=KnownPoints(z[good], values[good], equation.separated) if bool(good.any()) else None,
        hardest_layer=layers,
    )


def _solve_in_chunks(
    equation: ChainEquation, z: Tensor, known: KnownPoints | None, options: Options, chunk: int
) -> FixedPoints:
    """Solve at points z [B] in chunks of at most `chunk` points.

    If there are many points, a few are solved first, and the others start from these solutions (the pre-sweep of the
    appendix "OV pipeline").
    """
    if known is None and len(z) >= _SWEPT:
        order = z.abs().argsort()
        seeds, others = order[::_SEED_EVERY], order[torch.arange(len(z), device=z.device) % _SEED_EVERY != 0]
        first = _solve_in_chunks(equation, z[seeds], None, options, chunk)
        if bool(first.converged.any()):
            known = KnownPoints(z[seeds][first.converged], first.x[first.converged])
            rest = _solve_in_chunks(equation, z[others], known, options, chunk)
            back = torch.cat([seeds, others]).argsort()
            both = FixedPoints.concatenate([first, rest])
            return FixedPoints(both.x[back], both.converged[back], both.residual[back], both.iterations[back])
    return FixedPoints.concatenate([_solve_chunk(equation, part, known, options) for part in z.split(chunk)])


def _solve_zero(network: Network, z: Tensor, matrix: bool) -> Solution:
    """Return the solution of a network that maps everything to zero, G = 1/z."""
    blocks = torch.eye(network.streams, device=z.device) / z[:, None, None] if matrix else None
    nothing = torch.zeros_like(z.real)
    return Solution(1 / z, nothing == 0, nothing, nothing.long(), method="chain", matrix=blocks)


def solve_together(networks: Sequence[Network], z: Tensor, *, tolerance: float = 1e-9) -> Tensor:
    r"""Solve several networks at the same points z [B] in one batch and return G [K, B].

    The batch is solved by Anderson mixing. A network is solved alone if one of its points does not converge at the
    first try, or if it needs separating bases (bases.py).

    Args:
        networks: Networks with read and write vectors, equally many layers and streams, and equal kinds of sublayers.
        z: Points of the upper half plane.
    """
    scaled = [network.rescaled() for network in networks]
    gains = torch.tensor([gain for _, gain in scaled], dtype=torch.float64, device=z.device)
    points = z / gains.unsqueeze(-1)  # [K, B]
    green = torch.full_like(points, torch.nan)
    own_bases = points.abs().amin(-1) < SMALL
    joint = [k for k in range(len(networks)) if not own_bases[k] and not networks[k].is_zero]
    per_network = 16 * len(z) * ((networks[0].depth + 1) * (networks[0].streams ** 2 * 2 * _ALIVE + 2 * _HISTORY))
    chunk = max(1, MEMORY[z.device.type] // per_network)
    options = Options(_DEFAULTS.scheme, tolerance, _DEFAULTS.scheme.first_try)
    for begin in range(0, len(joint), chunk):
        part = joint[begin : begin + chunk]
        equation = SeveralChains([ChainEquation(scaled[k][0], points[k]) for k in part], len(z))
        here = points[part].flatten()
        start = equation.start(here, torch.arange(len(here), device=z.device))
        row = solve_equation(equation, here, start, options)
        values = equation.parts[0].values(row.x)[:, 0]
        values = torch.where(row.converged, values, torch.nan).unflatten(0, (len(part), -1))
        green[part] = values / gains[part].unsqueeze(-1)
    for k in (~torch.isfinite(green).all(-1)).nonzero().flatten().tolist():
        green[k] = cauchy(networks[k], z, tolerance=tolerance).G
    return green


def _solve_chunk(equation: ChainEquation, z: Tensor, known: KnownPoints | None, options: Options) -> FixedPoints:
    """Solve the equation at all points at once; then solve unconverged points from solved ones or by continuation."""
    start = equation.start(z, torch.arange(len(z), device=z.device))
    start = start if known is None else known.start_near(z, start, equation.inside)
    first = replace(options, maximum=min(options.maximum, options.scheme.first_try))
    result = solve_equation(equation, z, start, first)
    unsolved = _unsolved_above_rounding(equation, z, result)
    hard = replace(first, scheme=options.scheme.for_hard_rows())
    unsolved = _solve_from_others(equation, z, result, unsolved, known, hard)
    if options.maximum > first.maximum and len(unsolved):
        hard = replace(hard, maximum=options.maximum)
        # At eta = |z| the equation contracts strongly.
        result.merge_pass(unsolved, lead_down(equation, z[unsolved], hard, top=z[unsolved].abs()))
        unsolved = _unsolved_above_rounding(equation, z, result)
        _solve_from_others(equation, z, result, unsolved, known, hard)
    return result


def _solve_from_others(
    equation: ChainEquation,
    z: Tensor,
    result: FixedPoints,
    unsolved: Tensor,
    known: KnownPoints | None,
    options: Options,
) -> Tensor:
    """Solve the rows `unsolved` from solved points, update `result`, and return the rows that are still unsolved.

    For matrix unknowns the solution is continued from a solved point; for scalar unknowns the iteration starts there.
    """
    if not equation.noise.scalar:
        return _lead_from_known(equation, z, result, unsolved, known, options.tolerance)
    before = len(unsolved) + 1
    while 0 < len(unsolved) < min(before, len(z)):
        before = len(unsolved)
        solved = KnownPoints(z[result.converged], result.x[result.converged])
        start = solved.start_near(z[unsolved], result.x[unsolved], equation.inside)
        result.merge_pass(unsolved, solve_equation(equation, z[unsolved], start, options, unsolved))
        unsolved = _unsolved_above_rounding(equation, z, result)
    return unsolved


def _lead_from_known(
    equation: ChainEquation,
    z: Tensor,
    result: FixedPoints,
    unsolved: Tensor,
    known: KnownPoints | None,
    tolerance: float,
) -> Tensor:
    """Solve the rows `unsolved` by continuation from the nearest solved points, nearest rows first.

    The function updates `result` and returns the rows that are still unsolved.
    """
    waiting = torch.ones_like(result.converged)
    while len(unsolved):
        solved = KnownPoints(z[result.converged], result.x[result.converged])
        if known is not None:
            solved = KnownPoints(torch.cat([solved.z, known.z]), torch.cat([solved.unknowns, known.unknowns]))
        rows = unsolved[waiting[unsolved]]
        if len(rows) == 0 or len(solved.z) == 0:
            break
        apart = z[rows].log().unsqueeze(-1) - solved.z.log()
        distance, nearest = (apart.imag.abs() + _ALONG * apart.real.abs()).min(-1)
        near = distance <= max(_NEAR, float(distance.min()))
        rows, nearest = rows[near], nearest[near]
        waiting[rows] = False
        options = Options(_STUBBORN, tolerance, _STUBBORN.first_try)
        led = lead_along(equation, solved.z[nearest], solved.unknowns[nearest], z[rows], rows, options)
        result.merge_pass(rows, led)
        unsolved = _unsolved_above_rounding(equation, z, result)
        if float(distance.min()) > _NEAR and not bool(led.converged.any()):
            break  # all other rows are farther away
    return unsolved


def _unsolved_above_rounding(equation: ChainEquation, z: Tensor, result: FixedPoints) -> Tensor:
    """Mark rows as converged if only rounding keeps them above the tolerance, and return the rows still unsolved.

    If unknowns differ by many orders of magnitude, rounding leaves few digits in the smallest unknowns. At points far
    below the largest singular values, rounding also leaves few digits in G. More iterations would not help such rows;
    their residual shows their precision.
    """
    unsolved = result.unconverged()
    if len(unsolved):
        x, points = result.x[unsolved], z[unsolved]
        image, scale = equation.image(x, points, unsolved), equation.scale(x, points, unsolved)
        floor = equation.lost_by_rounding(x, points, unsolved, image) / scale
        change = (image - x).abs() / scale
        level = floor.amax(-1)
        rounded = (change.amax(-1) <= _ACCEPTED_ABOVE_ROUNDING * level) & (level <= _ACCEPTED_ROUNDING)
        rounded &= equation.admissible(x, points, unsolved)
        result.converged[unsolved[rounded]] = True
        unsolved = unsolved[~rounded]
    return unsolved
