r"""Subordination for layers of different laws (appendix "Multi-Layer Composition: Heterogeneous Layers").

Subordination evaluates each layer's Cauchy transform $G_l$ at a point $z_l$ of its own. At these points all $z_l
G_l(z_l) - 1$ equal one $w$, and $z = \frac{w + 1}{w} \prod_l \frac{1}{S_l(w)}$ (eq. z_L_w) with $S_l = G_l(z_l)/w$.

Note:
    The paper solves for each $z_l$ by a Newton iteration inside a Newton iteration for $w$ with a finite-difference
    derivative. Here one Newton iteration changes $w$ and the layers' $\omega_l$ (`evaluate_layer`) together. The
    iteration's Jacobian is analytic and an arrow matrix, with which a step takes $O(L)$.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from jpmhc.paper import stransform
from jpmhc.paper.one_layer import evaluate_layer, layer_cauchy, to_solution
from jpmhc.paper.scalar import ScalarLayers, why_not_exact
from jpmhc.spectra.fixed_point import ContinuedEquation, FixedPoints, Options, lead_down
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

# The number of points of the convergence test, and the share that must converge before all points are solved.
PROBE_POINTS = 10
PROBE_SHARE = 0.8


@method(scheme=Newton(), tolerance=1e-11, maximum=100)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    r"""Solve the scalar theory of layers with isotropic noise by subordination, at points z [B].

    This is alg. subordination_hetero; alg. ov_hetero, with a scalar unknown, is the same.

    Ten points are tried first. If fewer than eight converge, all points are solved by the method "stransform", with a
    warning, and the result's `method` is "stransform". The residual measures eq. z_L_w in logarithms.

    Newton's method changes $w$ and the layers' $\omega_l$ together. Other schemes iterate the fixed point
    $z_l = z / \prod_{j \ne l} (z_j - 1/G_j)$, with up to five times as many iterations.
    """
    layers, reason = ScalarLayers.of(network, "subordination"), why_not_exact(network)
    points = layers.rescale(z)
    if len(points) > PROBE_POINTS:
        probed = torch.linspace(0, len(points) - 1, PROBE_POINTS, device=z.device).round().long()
        _, probe = _solve_points(layers, points[probed], options)
        share = float(probe.converged.double().mean())
        if share < PROBE_SHARE:
            note = f"the iteration converged at {share:.0%} of the probed points; S-transform used instead"
            warnings.warn(f"method 'subordination': {note}", stacklevel=2)
            solution = stransform.solve_inverse_w(layers, points, replace(options, scheme=Newton()))
            return to_solution("stransform", (1 + 1 / solution.x.squeeze(-1)) / z, solution, reason, note)
    products, parts = zip(*[_solve_points(layers, chunk, options) for chunk in layers.chunks(points)])
    return to_solution("subordination", torch.cat(products) / z, FixedPoints.concatenate(parts), reason)


def _solve_points(layers: ScalarLayers, z: Tensor, options: Options) -> tuple[Tensor, FixedPoints]:
    """Return zG, which is 1 + w, at each point [B], and the results of the iteration."""
    if options.scheme.uses_corrections:
        solution = lead_down(_Arrow(layers), z, options, top=layers.top)
        return 1 + 1 / solution.x[:, 0], solution
    equation = _BelinschiSpeicher(layers)
    solution = lead_down(equation, z, replace(options, maximum=5 * options.maximum), top=layers.top)
    product = equation.products(solution.x).mean(-1)
    inside = (product.imag < 0) & ((product / z).imag < 0)
    return product, replace(solution, converged=solution.converged & inside)


class _Arrow(ContinuedEquation):
    r"""Eq. z_L_w and the layers' own equations, in the unknowns $(1/w, \omega_1, \dots, \omega_L)$.

    The unknown is $1/w$ and not $w$, because $1/w$ is nearly linear in every $\omega_l$, both far from the spectrum
    ($1/w \approx \omega$) and near the spectrum of a layer with little noise ($1/w \approx (\omega - s)/s$).
    """

    def __init__(self, layers: ScalarLayers) -> None:
        self.layers = layers

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return z.unsqueeze(-1).repeat(1, 1 + self.layers.depth)  # every z_l is z; w is about 1/z: the mean is one

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        inverse, others = x[:, :1], self.layers.depth - 1
        each = evaluate_layer(x[:, 1:], self.layers.spectrum, self.layers.variance)  # [b, L]
        common = 1 / each.w - inverse
        common_slope = -each.w_slope / each.w.square()
        # eq. z_L_w in logarithms: with S_l = (1 + w)/(w z_l) = (1 + 1/w)/z_l it is a sum over the z_l.
        total = each.z.log().sum(-1, keepdim=True) - others * (1 + inverse).log() - z.log().unsqueeze(-1)
        total_slope = each.z_slope / each.z
        # Arrow elimination: insert δω_l = (δ(1/w) − common_l)/common_slope_l into the equation for the total.
        pull = (total_slope / common_slope).sum(-1, keepdim=True) - others / (1 + inverse)
        push = total - (total_slope * common / common_slope).sum(-1, keepdim=True)
        step = -push / pull
        size = torch.maximum(total.abs().squeeze(-1), (common / inverse).abs().amax(-1))
        return size, torch.cat([step, (step - common) / common_slope], -1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        inverse = x[:, 0]
        each = evaluate_layer(x[:, 1:], self.layers.spectrum, self.layers.variance)
        inside = ((each.z.imag > 0) & (each.g.imag < 0)).all(-1)
        return inside & (inverse.imag > 0) & (((1 + 1 / inverse) / z).imag < 0)


class _BelinschiSpeicher(ContinuedEquation):
    r"""The fixed point $\log z_l = \log z - \sum_{j \ne l} \log (z_j - 1/G_j(z_j))$ in the unknowns $\log z_l$."""

    def __init__(self, layers: ScalarLayers) -> None:
        self.layers = layers

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return z.log().unsqueeze(-1).expand(-1, self.layers.depth)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        rest = x + torch.log1p(-1 / self.products(x))  # log (z_l − 1/G_l)
        return z.log().unsqueeze(-1) - (rest.sum(-1, keepdim=True) - rest)

    def between(self, x: Tensor, image: Tensor, share: float) -> Tensor:
        return x + share / self.layers.depth * (image - x)  # the way to g(x) is a sum over the layers

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return ((x.imag > 0) & (x.imag < torch.pi)).all(-1)

    def products(self, x: Tensor) -> Tensor:
        """Return z_l G_l(z_l) of every layer from the unknowns x = log z_l. [b, L]"""
        z = x.exp()
        spectrum = self.layers.spectrum.expand(*z.shape, -1).flatten(0, 1)
        variance = self.layers.variance.expand(z.shape).flatten()
        return z * layer_cauchy(z.flatten(), spectrum, variance).x.view(z.shape)
