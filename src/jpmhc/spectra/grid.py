r"""The grid of a density: it finds the spectrum by itself, over however many orders of magnitude the spectrum has.

All of it happens in t = log x, on the curve $-\mathrm{Im}\,zG/\pi$, the density of t. First the decades that hold mass
are found; then the curve is followed from a wide smoothing, which lets no band slip through, down to the one asked for.
"""

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, Transform

# The search ends so many decades below the mean square: squares of singular values in doubles reach no further.
_DECADES = 30
# Most spectra end within so many decades below the mean square; only where mass is left there are the others asked.
_FIRST_DECADES = 5
# By Markov's inequality at most this share of the singular values lies above the mean square divided by it.
_LOST_ABOVE = 1e-8
# The smoothing and the spacing of the first grid, in t: equal, so that each point sees as far as its neighbours.
_WIDE = 0.4
# In so many rounds the smoothing falls to the one asked for; from 0.3 to 1e-3 each is a quarter of the one before.
_ROUNDS = 5
# The search needs no more digits of a mass than this, and no more iterations of a point: its neighbours stand for it.
_TOLERANCE, _ITERATIONS = 1e-4, 150
# An interval between two points holds at most this mass, and the trapezium rule errs on it by at most this.
_MASS, _ERROR = 1 / 100, 2e-5
# A density of t below this is not resolved: over five decades it is a mass of 0.002.
_FLOOR = 2e-4
# A share of the mean square counts as this much mass, so that the first moment is resolved too.
_MOMENT = 0.25
# A grid does not grow beyond this: some hundred points are usual.
_LARGEST = 1200


def upper_bound(network: Network) -> float:
    r"""Bound the squared singular values from above by $\prod_l (\|A_l\| + \|\sigma_l W_l\|)^2$."""
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
    r"""Find squared singular values at which to evaluate a density, ascending, and solve the network roughly there.

    Args:
        network: The network.
        transform: The Cauchy transform.
        eta: A fixed smoothing; None for $\eta$ proportional to x.
        relative_eta: $\eta / x$ where `eta` is None.
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
    """The density of t = log x, with every point that was solved on the way; each starts from the nearest of them.

    Attributes:
        network: The network.
        transform: Its Cauchy transform.
        eta: A fixed smoothing, or None.
        mean: The logarithm of the mean square.
        parts: What was solved.
    """

    network: Network
    transform: Transform
    eta: float | None
    mean: float
    parts: list[Solution] = field(default_factory=list)

    def solution(self) -> Solution:
        """Return everything that was solved."""
        return Solution.concatenate(self.parts)

    def solve(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return z G and which points converged."""
        near = self.solution() if self.parts else None
        with warnings.catch_warnings():
            # A method says why it is not exact when the density is computed.
            warnings.simplefilter("ignore", UserWarning)
            points = z.to(self.network.skips.device)
            part = self.transform(self.network, points, tolerance=_TOLERANCE, maximum=_ITERATIONS, near=near)
        self.parts.append(part)
        return z * part.G.cpu(), part.converged.cpu()

    def evaluate(self, t: Tensor, relative_eta: float) -> tuple[Tensor, Tensor]:
        """Return the smoothed density of t, with the mean square's share in it, and which points converged.

        A point that did not converge is interpolated.
        """
        x = t.exp()
        z = torch.complex(x, torch.maximum(x * relative_eta, torch.full_like(x, self.eta or 0.0)))
        moment, converged = self.solve(z)
        # As the density is read off: z G for a smoothing proportional to x, x G for a fixed one.
        weight = -(moment if self.eta is None else moment * x / z).imag.clamp_max(0) / torch.pi
        if not bool(converged.any()):
            return torch.zeros_like(t), converged
        weight = torch.from_numpy(np.interp(t.numpy(), t[converged].numpy(), weight[converged].numpy()))
        # Where the density is below the tolerance its share of the mean square is noise.
        share = torch.where(weight > _TOLERANCE, weight * (t - self.mean).exp(), 0.0)
        return weight + _MOMENT * share, converged


def _decades_with_mass(curve: _Curve) -> Tensor:
    r"""Return t = log x, evenly in each decade that holds mass and in its neighbours.

    $\mathrm{Re}\,zG$ at $z = iy$ is the mass below y, and easy to solve for; points below the spectrum are not. The
    search goes down from the mean until nothing is left below.
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
    # A decade with an end that did not converge is searched.
    near = _widen(~(mass.diff() < _TOLERANCE) & (width > 0))
    count = math.ceil(math.log(10) / _WIDE)
    inside = (
        tens[:-1][near].unsqueeze(-1) + width[near].unsqueeze(-1) * torch.arange(count, dtype=torch.float64) / count
    )
    return torch.cat([inside.flatten(), tens[1:][near][-1:]]).unique()


def _widen(seen: Tensor) -> Tensor:
    """Return a mask with one more place on each side of every run."""
    near = seen.clone()
    near[1:] |= seen[:-1]
    near[:-1] |= seen[1:]
    return near


def _middles(t: Tensor, weight: Tensor, tolerance: float = math.inf) -> Tensor:
    """Return the middles of intervals that hold too much mass, or on which the trapezium rule errs too much.

    Args:
        t: The grid, log x. [P]
        weight: The density of t. [P]
        tolerance: Of the trapezium rule's error on one interval, as the bend of the curve at its ends tells it.
    """
    width = t.diff()
    mass = width * torch.maximum(weight[1:], weight[:-1])
    bend = 2 * (weight.diff() / width).diff().abs() / (width[1:] + width[:-1])  # second derivative at inner points
    bend = torch.nn.functional.pad(bend, (1, 1))
    error = width**3 / 12 * torch.maximum(bend[1:], bend[:-1])
    return ((t[1:] + t[:-1]) / 2)[(mass > _MASS) | (error > tolerance)]
