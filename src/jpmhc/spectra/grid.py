r"""Choose a density's grid so that it covers the whole spectrum, over any number of orders of magnitude.

The search works in t = log x for squared singular values x, on the curve $-\mathrm{Im}\,zG/\pi$ at $z = x + i\eta$ with
the smoothing $\eta$ and the Cauchy transform G. The curve is the density of t. The first step finds the decades that
hold mass. The next steps refine the grid in these decades while the smoothing falls from a wide one, which shows every
band, to the wanted one.
"""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, Transform

# The search ends this many decades below the mean square: double precision resolves no smaller squared singular values.
_DECADES = 30
# Most spectra end within this many decades below the mean square; lower decades are searched only if mass lies there.
_FIRST_DECADES = 5
# By Markov's inequality at most this share of the singular values lies above the mean square divided by this number.
_LOST_ABOVE = 1e-8
# The smoothing and the spacing of the first grid, in t. They are equal, so that no band lies unseen between points.
_WIDE = 0.4
# The number of rounds in which the smoothing falls to the wanted one; each smoothing is about a quarter of the one
# before.
_ROUNDS = 5
# The tolerance and the most iterations of a point in the search; an unconverged point is replaced by its neighbours.
_TOLERANCE, _ITERATIONS = 1e-4, 150
# The largest mass between two points of the grid, and the largest error of the trapezium rule between two points.
_MASS, _ERROR = 1 / 100, 2e-5
# The grid does not resolve a density of t below this number, which over five decades is a mass of 0.002.
_FLOOR = 2e-4
# The weight of the first moment beside the mass when the grid is refined, so that both are resolved.
_MOMENT = 0.25
# The grid grows up to about this many points; a few hundred points are usual.
_LARGEST = 1200


def upper_bound(network: Network) -> float:
    r"""Return the bound $\prod_l (\|A_l\| + \|\sigma_l W_l\|)^2$ on the squared singular values.

    $A_l$ is the skip and $\sigma_l W_l$ the noise of layer l; the noise's norm is its limit for many features, or a
    bound on this limit.
    """
    if network.covariance is not None:
        factors = network.noise_factors()
        rows = torch.linalg.matrix_norm((factors @ factors.mT).sum(1), 2)
        columns = torch.linalg.matrix_norm((factors.mT @ factors).sum(1), 2)
    elif network.read is not None and network.write is not None:
        rows = columns = network.variance * network.read.square().sum(-1) * network.write.square().sum(-1)
    else:
        rows = columns = network.variance
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
    r"""Return a density's grid of ascending squared singular values, and the solution at all points of the search.

    The grid is [P]. The search solves its points with a low accuracy.

    Args:
        transform: The function that computes the Cauchy transform.
        eta: A fixed smoothing; None for $\eta$ proportional to x.
        relative_eta: $\eta / x$ if `eta` is None.
    """
    mean = min(float(network.gains().clamp_min(1e-300).log().sum()), 690.0)
    curve = _Curve(network, transform, eta, mean)
    t = _decades_with_mass(curve)
    for step in range(_ROUNDS):
        share = step / (_ROUNDS - 1)
        weight, converged = curve.evaluate(t, _WIDE ** (1 - share) * relative_eta**share)
        near = _widen(weight > _FLOOR)
        near = near if int(near.sum()) >= 4 else torch.ones_like(near)
        last = step == _ROUNDS - 1
        if last and bool((near & converged).any()):
            near &= converged  # an interpolated point hides a gap
        t, weight = t[near], weight[near]
        if not last:
            t = torch.cat([t, _middles(t, weight)]).sort().values
    lost = t[:0]
    while len(t) <= _LARGEST:
        middles = _middles(t, weight, _ERROR)
        middles = middles[~torch.isin(middles, lost)]
        if not len(middles):
            break
        added, converged = curve.evaluate(middles, relative_eta)
        lost = torch.cat([lost, middles[~converged]])
        t, order = torch.cat([t, middles[converged]]).sort()
        weight = torch.cat([weight, added[converged]])[order]
    return t.exp(), curve.solution()


@dataclass
class _Curve:
    """The density of t = log x, and all solutions computed so far, from which new points start.

    Attributes:
        eta: A fixed smoothing, or None.
        mean: The logarithm of the mean squared singular value.
    """

    network: Network
    transform: Transform
    eta: float | None
    mean: float
    parts: list[Solution] = field(default_factory=list)

    def solution(self) -> Solution:
        """Return all solved points as one solution."""
        return Solution.concatenate(self.parts)

    def solve(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return z G [P] and a mask of the points that converged [P]."""
        near = self.solution() if self.parts else None
        with warnings.catch_warnings():
            # A method says why it is not exact when the density is computed.
            warnings.simplefilter("ignore", UserWarning)
            points = z.to(self.network.skips.device)
            part = self.transform(self.network, points, tolerance=_TOLERANCE, maximum=_ITERATIONS, near=near)
        self.parts.append(part)
        return z * part.G.cpu(), part.converged.cpu()

    def evaluate(self, t: Tensor, relative_eta: float) -> tuple[Tensor, Tensor]:
        """Return the weight that places grid points, and a mask of the points that converged. [P] each

        The weight is the smoothed density of t plus a fraction of the density of the first moment (x times the density
        of t, divided by the mean). It is interpolated at points that did not converge. The smoothing is `relative_eta`
        times x, or the fixed smoothing if that is larger.
        """
        x = t.exp()
        z = torch.complex(x, torch.maximum(x * relative_eta, torch.full_like(x, self.eta or 0.0)))
        moment, converged = self.solve(z)
        # As in `density`: from z G if the smoothing is proportional to x, from x G if it is fixed.
        weight = -(moment if self.eta is None else moment * x / z).imag.clamp_max(0) / torch.pi
        if not bool(converged.any()):
            return torch.zeros_like(t), converged
        weight = torch.from_numpy(np.interp(t.numpy(), t[converged].numpy(), weight[converged].numpy()))
        # If the density is below the tolerance, its contribution to the first moment is noise.
        share = torch.where(weight > _TOLERANCE, weight * (t - self.mean).exp(), 0.0)
        return weight + _MOMENT * share, converged


def _decades_with_mass(curve: _Curve) -> Tensor:
    r"""Return evenly spaced t = log x in all decades that hold mass and in the decades beside them.

    $\mathrm{Re}\,zG$ at $z = iy$ is about the mass below y, and the equation is easy to solve there. The search goes
    down from a point above which there is at most negligible mass, until no mass is left below.
    """
    top = min(math.log(1.5) + max(math.log(upper_bound(curve.network)), curve.mean), curve.mean - math.log(_LOST_ABOVE))
    tens, mass = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    first, last = (curve.mean - decades * math.log(10) for decades in (_FIRST_DECADES, _DECADES))
    for start, end in ((top, first), (first, last)):
        count = max(2, math.ceil((start - end) / math.log(10)) + 1)
        decade = torch.linspace(start, end, count, dtype=torch.float64)
        moment, converged = curve.solve(1j * decade.exp())
        tens = torch.cat([decade.flip(0), tens])
        mass = torch.cat([torch.where(converged, moment.real, torch.nan).flip(0), mass])
        if mass[0] < _TOLERANCE:
            break
    width = tens.diff()
    # If an end of a decade did not converge, the decade counts as one that holds mass.
    near = _widen(~(mass.diff() < _TOLERANCE) & (width > 0))
    count = math.ceil(math.log(10) / _WIDE)
    inside = (
        tens[:-1][near].unsqueeze(-1) + width[near].unsqueeze(-1) * torch.arange(count, dtype=torch.float64) / count
    )
    return torch.cat([inside.flatten(), tens[1:][near][-1:]]).unique()


def _widen(seen: Tensor) -> Tensor:
    """Return a mask with every run of True extended by one entry on each side."""
    near = seen.clone()
    near[1:] |= seen[:-1]
    near[:-1] |= seen[1:]
    return near


def _middles(t: Tensor, weight: Tensor, tolerance: float = math.inf) -> Tensor:
    """Return the middle of each interval that has too much mass or too large an error of the trapezium rule.

    Args:
        t: The grid, log x. [P]
        weight: The density of t. [P]
        tolerance: The largest error of the trapezium rule on one interval, estimated from second differences.
    """
    width = t.diff()
    mass = width * torch.maximum(weight[1:], weight[:-1])
    bend = 2 * (weight.diff() / width).diff().abs() / (width[1:] + width[:-1])  # second derivative at inner points
    bend = torch.nn.functional.pad(bend, (1, 1))
    error = width**3 / 12 * torch.maximum(bend[1:], bend[:-1])
    return ((t[1:] + t[:-1]) / 2)[(mass > _MASS) | (error > tolerance)]
