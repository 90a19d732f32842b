"""A grid of squared singular values that finds the spectrum by itself, over however many orders of magnitude."""

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra.chain.bases import separating_bases
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, Transform

# The search starts so many orders of magnitude below the mean square, on a grid so dense that its own smoothing
# (eta / x = _WIDE) lets no band slip through.
_DECADES = 30
# Where large and small singular values share a basis, rounding of the large ones hides what lies further below than
# this.
_COMMON_DECADES = 24
# Above the mean square over this share there is less than this share of the mass, whatever the law.
_LOST_ABOVE = 1e-8
# The paper's methods lead every point down from a large height, a long way to there, and lose some points below this.
_PAPER_DECADES = 14
_PER_DECADE = 6
# Methods whose search follows the mass below y, first in so many decades below the mean; a share this small counts as
# none.
_FIRST_DECADES = 5
_NOTHING = 1e-4
_WIDE = 0.3
_ROUNDS = 5
_LAST_ROUNDS = 10
# Where the mass is need not be known to many digits.
_TOLERANCE = 1e-4
# Points that take more iterations than this are left to the density itself; here their neighbours stand for them.
_ITERATIONS = 150
# An interval is halved while it holds more than this mass, or while its ends differ by this mass.
_MASS = 1 / 120
_STEP = 1 / 600
# In the end an interval is also halved while the trapezium rule errs on it by more than this: the long one across a gap
# between bands would count the bands' smoothed flanks as if they reached from one to the other.
_ERROR = 2e-5
# Where the density of log x is below this it is not resolved further.
_FLOOR = 2e-4
# The same for its share of the mean square, whose smoothed tail above the spectrum is a third of relative_eta.
_MOMENT_FLOOR = 2e-3
# An error of the mean square counts as much as one of the mass that is smaller by this.
_MOMENT_WEIGHT = 0.25
_LARGEST = 1200


def upper_bound(network: Network) -> float:
    r"""Bound the squared singular values from above by $\prod_l (\|A_l\| + \|\sigma_l W_l\|)^2$."""
    factors = network.noise_factors()
    rows = torch.linalg.matrix_norm((factors @ factors.mT).sum(1), 2)
    columns = torch.linalg.matrix_norm((factors.mT @ factors).sum(1), 2)
    noise = rows.sqrt() + columns.sqrt()  # of Gaussians, whose largest singular value is two
    if network.sublayers is not None:
        noise = noise * noise.new_tensor([law.norm / 2 for law in network.sublayers])
    if network.slopes is not None:
        noise = noise * network.slopes.amax((0, 2)).sqrt()
    norm = torch.linalg.matrix_norm(network.skips, 2) + noise
    return math.exp(min(2 * float(norm.clamp_min(1e-300).log().sum()), 690.0))


def find_grid(
    network: Network, transform: Transform, eta: float | None, relative_eta: float
) -> tuple[Tensor, Solution]:
    r"""Find squared singular values at which to evaluate a density, ascending, and solve the network roughly there.

    The density of log x is followed from a wide smoothing to the one asked; in each round intervals that hold much
    mass are halved and points that see none are dropped.

    Args:
        eta: A fixed smoothing; None for $\eta$ proportional to x.
    """
    exact = transform is cauchy
    mean = math.exp(min(float(network.gains().clamp_min(1e-300).log().sum()), 690.0))
    top = min(max(upper_bound(network), mean) * 1.5, mean / _LOST_ABOVE)
    decades = _DECADES if exact else _PAPER_DECADES
    if exact and network.tied is None and network.streams > 1 and separating_bases(network.rescaled()[0].skips) is None:
        decades = _COMMON_DECADES
    bottom = mean * 10.0**-decades
    found: Solution | None = None
    if exact:
        t, found = _decades_with_mass(network, transform, mean, bottom, top)
    else:
        count = max(20, int(_PER_DECADE * math.log10(top / bottom)))
        t = torch.linspace(math.log(bottom), math.log(top), count, dtype=torch.float64)
    for round_number in range(_ROUNDS):
        share = round_number / (_ROUNDS - 1)
        more, weight = _solve_roughly(network, t, transform, eta, _WIDE ** (1 - share) * relative_eta**share, found)
        found = more if found is None else Solution.concatenate([found, more])
        kept = _near_mass(weight, t - math.log(mean))
        if round_number == _ROUNDS - 1:
            kept = _drop_few(kept, more.converged.cpu())
        t, weight = t[kept], weight[kept]
        if round_number < _ROUNDS - 1:
            t = torch.cat([t, _middles(t, weight, math.log(mean))]).sort().values
    assert found is not None
    lost = t[:0]
    for _ in range(_LAST_ROUNDS):
        middles = _middles(t, weight, math.log(mean), _ERROR)
        middles = middles[~torch.isin(middles, lost)]
        if not len(middles) or len(t) > _LARGEST:
            break
        more, added = _solve_roughly(network, middles, transform, eta, relative_eta, found)
        found = Solution.concatenate([found, more])
        kept = _drop_few(torch.ones_like(middles, dtype=torch.bool), more.converged.cpu())
        lost = torch.cat([lost, middles[~kept]])
        t, order = torch.cat([t, middles[kept]]).sort()
        weight = torch.cat([weight, added[kept]])[order]
    return t.exp(), found


def _decades_with_mass(
    network: Network, transform: Transform, mean: float, bottom: float, top: float
) -> tuple[Tensor, Solution]:
    r"""Return t = log x, evenly in each decade that holds mass and in its neighbours, and what was solved for that.

    $\mathrm{Re}\,zG$ at $z = iy$ is the mass below y, and easy to solve for; points below the spectrum are not. The
    search goes down from the mean until nothing is left below.
    """
    heights, masses = [], []
    parts: list[Solution] = []
    limit = _limit(network, transform)
    ends = [math.log10(top), math.log10(mean) - _FIRST_DECADES]
    while True:
        count = max(2, math.ceil(ends[0] - ends[1]) + 1)
        tens = torch.linspace(ends[0], ends[1], count, dtype=torch.float64)
        z = 1j * 10.0**tens
        above = Solution.concatenate(parts) if parts else None
        found = transform(network, z.to(network.skips.device), tolerance=_TOLERANCE, maximum=limit, near=above)
        parts.append(found)
        heights.append(tens)
        masses.append(torch.where(found.converged.cpu(), (z * found.G.cpu()).real, torch.nan))
        if masses[-1][-1] < _NOTHING or ends[1] <= math.log10(bottom):
            break
        # What reaches below the first decades mostly reaches far, and many points take little longer than a few.
        ends = [ends[1], math.log10(bottom)]
    tens, mass = torch.cat(heights).flip(0), torch.cat(masses).flip(0)
    width = tens.diff()
    # Where a point did not converge its decade is searched.
    seen = ~(mass.diff() < _NOTHING) & (width > 0)
    near = seen.clone()
    near[1:] |= seen[:-1]
    near[:-1] |= seen[1:]
    step = torch.arange(_PER_DECADE, dtype=torch.float64) / _PER_DECADE
    inside = (tens[:-1][near].unsqueeze(-1) + width[near].unsqueeze(-1) * step).flatten()
    grid = (torch.cat([inside, tens[1:][near][-1:]]) * math.log(10.0)).unique()
    return grid, Solution.concatenate(parts)


def _solve_roughly(
    network: Network, t: Tensor, transform: Transform, eta: float | None, relative: float, near: Solution | None
) -> tuple[Solution, Tensor]:
    """Return the solution at t = log x, and the smoothed density of t, interpolated where a point did not converge."""
    x, limit = t.exp(), _limit(network, transform)
    z = torch.complex(x, torch.maximum(x * relative, torch.full_like(x, eta or 0.0)))
    with warnings.catch_warnings():
        # What a method has to say of its exactness it says when the density is computed.
        warnings.simplefilter("ignore", UserWarning)
        found = transform(network, z.to(network.skips.device), tolerance=_TOLERANCE, maximum=limit, near=near)
    # As the density is read off: z G for a smoothing proportional to x, G itself for a fixed one.
    weighted = (x if eta is not None else z) * found.G.cpu()
    weight, good = -weighted.imag.clamp_max(0) / torch.pi, found.converged.cpu()
    if not bool(good.any()):
        return found, torch.zeros_like(t)
    return found, torch.from_numpy(np.interp(t.numpy(), t[good].numpy(), weight[good].numpy()))


def _limit(network: Network, transform: Transform) -> int | None:
    return _ITERATIONS if transform is cauchy and network.tied is None else None


def _near_mass(weight: Tensor, size: Tensor) -> Tensor:
    """Return which points see mass, with one more on each side of every band; all points if hardly any do.

    Args:
        weight: The density of t = log x. [P]
        size: The logarithm of x over the mean square. [P]
    """
    seen = (weight > _FLOOR) | (_square_shares(weight, size) > _MOMENT_FLOOR)
    near = seen.clone()
    near[1:] |= seen[:-1]
    near[:-1] |= seen[1:]
    return near if int(near.sum()) >= 4 else torch.ones_like(near)


def _drop_few(kept: Tensor, converged: Tensor) -> Tensor:
    """Return which points are kept without those that did not converge: what was interpolated hides a gap."""
    return kept & converged if bool((kept & converged).any()) else kept


def _square_shares(weight: Tensor, size: Tensor) -> Tensor:
    """Return the density of the mean square's share in t; none where the density is not known to that many digits."""
    return torch.where(weight > _TOLERANCE, weight * size.exp(), 0.0)


def _middles(t: Tensor, weight: Tensor, mean: float, tolerance: float = math.inf) -> Tensor:
    """Return the middles of intervals that hold too much of all mass or of the mean square, or hold it unevenly.

    Args:
        t: The grid, log x. [P]
        weight: The density of t. [P]
        mean: The logarithm of the mean square.
        tolerance: Of the trapezium rule's error on one interval, as the bend of the curve at its ends tells it.
    """
    width, halved = t.diff(), torch.zeros(len(t) - 1, dtype=torch.bool)
    for share in (weight, _MOMENT_WEIGHT * _square_shares(weight, t - mean)):
        mass = width * torch.maximum(share[1:], share[:-1])
        step = width * share.diff().abs()
        bend = 2 * (share.diff() / width).diff().abs() / (width[1:] + width[:-1])  # second derivative at inner points
        bend = torch.nn.functional.pad(bend, (1, 1))
        error = width**3 / 12 * torch.maximum(bend[1:], bend[:-1])
        halved |= (mass > _MASS) | (step > _STEP) | (error > tolerance)
    return ((t[1:] + t[:-1]) / 2)[halved]
