r"""The S-transform round trip: $G_l \to S_l \to \prod_l S_l \to G$ (appendix "S-Transform").

$S(zG(z) - 1) = G(z) / (zG(z) - 1)$ (eq. s_transform_def) turns the free product into a product (eq. s_product).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers.dyson import Explicit, explicit, layer_cauchy
from jpmhc.spectra.solvers.fixed_point.newton import follow, newton
from jpmhc.spectra.solvers.scalar import ScalarLayers, scalar_solution


def solve(network: Network, z: Tensor, *, tolerance: float = 1e-11, maximum: int = 100) -> Solution:
    """The scalar theory's Cauchy transform for any layers; exact where `why_not_exact` has nothing to say."""
    z = check_points(z, network.skips.device)
    layers = ScalarLayers.of(network, "stransform")
    product, converged, residual, count = compose(layers, layers.rescale(z.reshape(-1)), tolerance, maximum)
    values = product / z.reshape(-1), converged, residual, count
    return scalar_solution(network, "stransform", values, z.shape)


def compose(layers: ScalarLayers, z: Tensor, tolerance: float, maximum: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""S to Cauchy: solve $z\, S(w)\, w = 1 + w$ for $w$ at each point, S being the product over the layers.

    The unknown is $1/w$, which is about $z$ far from the spectrum; the equation is taken in logarithms, where a product
    of a thousand layers stays in range.

    Returns:
        $zG = 1 + w$, converged, residual and iterations. [B] each
    """
    parts = []
    for chunk in layers.chunks(z):
        equation = _RoundTrip(layers, len(chunk), 1e-2 * tolerance)
        found = follow(equation, chunk, top=layers.top, tolerance=tolerance, maximum=maximum)
        parts.append((1 + 1 / found.x.squeeze(-1), found.converged, found.residual, found.iterations))
    product, converged, residual, iterations = (torch.cat(part) for part in zip(*parts))
    return product, converged, residual, iterations


class _RoundTrip:
    r"""$z S(w) w = 1 + w$ in the unknown $1/w$."""

    def __init__(self, layers: ScalarLayers, points: int, tolerance: float) -> None:
        self.layers, self.tolerance = layers, tolerance
        # What each layer's inner iteration found last, so that the next outer step starts there.
        self.omega = torch.empty(points, layers.depth, dtype=torch.complex128, device=layers.spectrum.device)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        self.omega[index] = z.unsqueeze(-1).repeat(1, self.layers.depth)
        return z.unsqueeze(-1)  # w is the mean, one, over z

    def evaluate(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        inverse = x.squeeze(-1)
        log_s, slope, good, found = s_transform(1 / inverse, self.layers, self.omega[index], self.tolerance)
        self.omega[index] = torch.where(good.unsqueeze(-1), found, self.omega[index])
        residual = z.log() + log_s - (1 + inverse).log()
        step = residual / (slope / inverse.square() + 1 / (1 + inverse))
        return torch.where(good, residual.abs(), torch.inf), step.unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        inverse = x.squeeze(-1)
        return (inverse.imag > 0) & (((1 + 1 / inverse) / z).imag < 0)


def s_transform(
    w: Tensor, layers: ScalarLayers, start: Tensor, tolerance: float = 1e-13, maximum: int = 50
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Cauchy to S: $\sum_l \log S_l(w)$, by solving $z_l G_l(z_l) - 1 = w$ in every layer.

    Args:
        w: Where to evaluate; of negative imaginary part. [B]
        layers: The layers' laws.
        start: Where to start $\omega_l$. [B, L]
        tolerance: Of $z_l G_l - 1$ against $w$, relative.
        maximum: The most Newton iterations.

    Returns:
        The sum of logarithms [B], its derivative in $w$ [B], whether every layer converged [B], and $\omega_l$ [B, L].
    """
    depth = layers.depth
    target = w.unsqueeze(-1).expand(-1, depth).reshape(-1)
    which = torch.arange(depth, device=w.device).repeat(len(w))

    def at(omega: Tensor, index: Tensor) -> Explicit:
        layer = which[index]
        return explicit(omega, layers.spectrum[layer], layers.variance[layer])

    def evaluate(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        here = at(x.squeeze(-1), index)
        residual = target[index] / here.w - 1
        return residual.abs(), (residual * here.w.square() / (target[index] * here.w_slope)).unsqueeze(-1)

    def admissible(x: Tensor, index: Tensor) -> Tensor:
        here = at(x.squeeze(-1), index)
        return (here.z.imag > 0) & (here.g.imag < 0)

    found = newton(evaluate, start.reshape(-1, 1), tolerance=tolerance, maximum=maximum, admissible=admissible)
    omega = found.x.view(len(w), depth)
    each = explicit(omega, layers.spectrum, layers.variance)
    # S = (1 + w)/(w z_l), and dz_l/dw = (dz/dω)/(dw/dω)
    log_s = depth * (1 + 1 / w).log() - each.z.log().sum(-1)
    slope = -depth / (w * (1 + w)) - (each.z_slope / (each.z * each.w_slope)).sum(-1)
    return log_s, slope, found.converged.view(len(w), depth).all(-1), omega


def layer_products(z: Tensor, layers: ScalarLayers) -> Tensor:
    """z_l G_l(z_l) of every layer at points of its own: [B, L] -> [B, L]."""
    spectrum = layers.spectrum.expand(*z.shape, -1).flatten(0, 1)
    variance = layers.variance.expand(z.shape).flatten()
    return z * layer_cauchy(z.flatten(), spectrum, variance)[0].view(z.shape)
