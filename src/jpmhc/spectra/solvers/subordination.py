r"""Subordination for layers of different laws (appendix "Multi-Layer Composition: Heterogeneous Layers").

Every layer is asked at a point $z_l$ of its own such that all $z_l G_l(z_l) - 1$ equal one $w$, and
$z = \frac{w + 1}{w} \prod_l \frac{1}{S_l(w)}$ (eq. z_L_w) with $S_l = G_l(z_l)/w$.

Note:
    The paper nests a Newton for each $z_l$ inside a Newton for $w$ with a finite-difference derivative. Here $w$ and
    the layers' $\omega_l$ move together: the Jacobian is an arrow, solved in $O(L)$, and analytic.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers import stransform
from jpmhc.spectra.solvers.dyson import explicit
from jpmhc.spectra.solvers.fixed_point.anderson import FixedPoints, anderson
from jpmhc.spectra.solvers.fixed_point.newton import descent, follow
from jpmhc.spectra.solvers.scalar import ScalarLayers, scalar_solution

# The convergence probe: how many points, and which share of them must converge for the whole grid to be tried.
PROBE_POINTS = 10
PROBE_SHARE = 0.8


def solve(
    network: Network,
    z: Tensor,
    *,
    tolerance: float = 1e-11,
    maximum: int = 100,
    iteration: str = "newton",
) -> Solution:
    """The scalar theory's Cauchy transform for any layers; exact where `why_not_exact` has nothing to say.

    Ten points are tried first. If fewer than eight converge, the S-transform's own nested iteration takes over, with a
    warning, and the result carries its name.

    Args:
        network: Layers with isotropic noise.
        z: Points of the upper half plane.
        tolerance: Of the residual of eq. z_L_w in logarithms.
        maximum: The most iterations at the last height.
        iteration: `newton`, or `anderson` for the accelerated fixed point $z_l = z / \\prod_{j \\ne l} (z_j - 1/G_j)$.
    """
    z = check_points(z, network.skips.device)
    if iteration not in ("newton", "anderson"):
        raise ValueError(f"iteration must be 'newton' or 'anderson', not {iteration!r}")
    layers = ScalarLayers.of(network, "subordination")
    points = layers.rescale(z.reshape(-1))
    attempt = _by_newton if iteration == "newton" else _by_anderson
    if len(points) > PROBE_POINTS:
        places = torch.linspace(0, len(points) - 1, PROBE_POINTS, device=z.device).round().long()
        _, probe = attempt(layers, points[places], tolerance, maximum)
        share = float(probe.converged.double().mean())
        if share < PROBE_SHARE:
            note = f"the {iteration} iteration converged at {share:.0%} of the probed points; S-transform used instead"
            warnings.warn(f"method 'subordination': {note}", stacklevel=2)
            values = stransform.compose(layers, points, tolerance, maximum)
            return scalar_solution(network, "stransform", (values[0] / z.reshape(-1), *values[1:]), z.shape, note)
    parts = []
    for chunk in layers.chunks(points):
        w, found = attempt(layers, chunk, tolerance, maximum)
        parts.append((1 + w, found.converged, found.residual, found.iterations))
    product, converged, residual, iterations = (torch.cat(part) for part in zip(*parts))
    values = product / z.reshape(-1), converged, residual, iterations
    return scalar_solution(network, "subordination", values, z.shape)


def _by_newton(layers: ScalarLayers, z: Tensor, tolerance: float, maximum: int) -> tuple[Tensor, FixedPoints]:
    """w at each point, and how the iteration went."""
    found = follow(_Arrow(layers), z, top=layers.top, tolerance=tolerance, maximum=maximum)
    return 1 / found.x[:, 0], found


class _Arrow:
    r"""Eq. z_L_w and the layers' own equations, in the unknowns $(1/w, \omega_1, \dots, \omega_L)$.

    $1/w$ is nearly linear in every $\omega_l$, both far from the spectrum ($1/w \approx \omega$) and near that of a
    layer with little noise ($1/w \approx (\omega - s)/s$); $w$ itself is in neither.
    """

    def __init__(self, layers: ScalarLayers) -> None:
        self.layers = layers

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return z.unsqueeze(-1).repeat(1, 1 + self.layers.depth)  # every z_l is z, and w the mean, one, over z

    def evaluate(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        inverse, others = x[:, :1], self.layers.depth - 1
        each = explicit(x[:, 1:], self.layers.spectrum, self.layers.variance)  # [b, L]
        common = 1 / each.w - inverse
        common_slope = -each.w_slope / each.w.square()
        # eq. z_L_w in logarithms: with S_l = (1 + w)/(w z_l) = (1 + 1/w)/z_l it is a sum over the z_l.
        total = each.z.log().sum(-1, keepdim=True) - others * (1 + inverse).log() - z.log().unsqueeze(-1)
        total_slope = each.z_slope / each.z
        # Arrow elimination: δω_l = (δ(1/w) − common_l)/common_slope_l, put into the equation for the total.
        pull = (total_slope / common_slope).sum(-1, keepdim=True) - others / (1 + inverse)
        push = total - (total_slope * common / common_slope).sum(-1, keepdim=True)
        step = -push / pull
        size = torch.maximum(total.abs().squeeze(-1), (common / inverse).abs().amax(-1))
        return size, torch.cat([step, (step - common) / common_slope], -1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        inverse = x[:, 0]
        each = explicit(x[:, 1:], self.layers.spectrum, self.layers.variance)
        inside = ((each.z.imag > 0) & (each.g.imag < 0)).all(-1)
        return inside & (inverse.imag > 0) & (((1 + 1 / inverse) / z).imag < 0)


def _by_anderson(layers: ScalarLayers, z: Tensor, tolerance: float, maximum: int) -> tuple[Tensor, FixedPoints]:
    r"""w at each point by Anderson/DIIS (depth 5) on $\log z_l = \log z - \sum_{j \ne l} \log (z_j - 1/G_j(z_j))$."""
    path = descent(z, layers.top, 4.0)
    x = path[0].log().unsqueeze(-1).expand(-1, layers.depth)
    spent = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for stage, point in enumerate(path):

        def step(x: Tensor, index: Tensor, point: Tensor = point) -> Tensor:
            rest = x + torch.log1p(-1 / stransform.layer_products(x.exp(), layers))  # log (z_l − 1/G_l)
            return point[index].log().unsqueeze(-1) - (rest.sum(-1, keepdim=True) - rest)

        last = stage == len(path) - 1
        found = anderson(
            step,
            x,
            tolerance=tolerance if last else 1e-4,
            maximum=5 * maximum if last else 50,
            damping=1 / layers.depth,
            admissible=lambda x, index: ((x.imag > 0) & (x.imag < torch.pi)).all(-1),
        )
        x, spent = found.x, spent + found.iterations
    product = stransform.layer_products(x.exp(), layers).mean(-1)
    inside = (product.imag < 0) & ((product / z).imag < 0)
    return product - 1, FixedPoints(x, found.converged & inside, found.residual, spent)
