r"""The scalar theory by S-transforms: $G_l \to S_l \to \prod_l S_l \to G$ (appendix "S-Transform").

The S-transform, $S(zG(z) - 1) = G(z) / (zG(z) - 1)$ (eq. s_transform_def), of a free product (scalar.py) is the product
of the factors' S-transforms (eq. s_product).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jpmhc.paper.one_layer import LayerValues, evaluate_layer, to_solution
from jpmhc.paper.scalar import ScalarLayers, why_not_exact
from jpmhc.spectra.fixed_point import ContinuedEquation, Equation, FixedPoints, Options, lead_down
from jpmhc.spectra.fixed_point import solve as solve_equation
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method


@method(scheme=Newton(), tolerance=1e-11, maximum=100)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve the scalar theory of layers with isotropic noise by composing their S-transforms, at points z [B].

    The residual measures $z S(w) w = 1 + w$ in logarithms, with $w = zG - 1$. Only Newton's method can solve this
    equation.
    """
    layers = ScalarLayers.of(network, "stransform")
    points = solve_inverse_w(layers, layers.rescale(z), options)
    return to_solution("stransform", (1 + 1 / points.x.squeeze(-1)) / z, points, why_not_exact(network))


def solve_inverse_w(layers: ScalarLayers, z: Tensor, options: Options) -> FixedPoints:
    r"""Solve $z\, S(w)\, w = 1 + w$ for $1/w$ at each point z, where S is the product of the layers' S-transforms.

    The Cauchy transform follows from $zG = 1 + w$. The unknown $1/w$ is about $z$ far from the spectrum. The equation
    is solved in logarithms, so that a product of a thousand layers neither overflows nor vanishes.
    """
    parts = []
    for chunk in layers.chunks(z):
        equation = _RoundTrip(layers, len(chunk), tolerance=1e-2 * options.tolerance)
        parts.append(lead_down(equation, chunk, options, top=layers.top))
    return FixedPoints.concatenate(parts)


class _RoundTrip(ContinuedEquation):
    r"""The equation $z S(w) w = 1 + w$ in the unknown $1/w$."""

    def __init__(self, layers: ScalarLayers, points: int, tolerance: float) -> None:
        self.layers, self.tolerance = layers, tolerance
        # The last solution of each layer's inner iteration, from which the inner iteration of the next step starts.
        self.omega = torch.empty(points, layers.depth, dtype=torch.complex128, device=layers.spectrum.device)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        self.omega[index] = z.unsqueeze(-1).repeat(1, self.layers.depth)
        return z.unsqueeze(-1)  # w is about 1/z, because the mean is one

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        inverse = x.squeeze(-1)
        log_s, slope, good, omega = s_transform(1 / inverse, self.layers, self.omega[index], self.tolerance)
        self.omega[index] = torch.where(good.unsqueeze(-1), omega, self.omega[index])
        residual = z.log() + log_s - (1 + inverse).log()
        step = residual / (slope / inverse.square() + 1 / (1 + inverse))
        return torch.where(good, residual.abs(), torch.inf), step.unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        inverse = x.squeeze(-1)
        return (inverse.imag > 0) & (((1 + 1 / inverse) / z).imag < 0)


def s_transform(
    w: Tensor, layers: ScalarLayers, start: Tensor, tolerance: float = 1e-13, maximum: int = 50
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Compute $\sum_l \log S_l(w)$ at w [B] by solving $z_l G_l(z_l) - 1 = w$ in every layer l.

    The unknowns are the $\omega_l$ of `evaluate_layer`.

    Args:
        w: Numbers with negative imaginary parts. [B]
        start: The first iterates of the $\omega_l$. [B, L]
        tolerance: The largest relative difference between both sides of the equation.
        maximum: The most Newton iterations.

    Returns:
        The sum of logarithms [B], its derivative in w [B], a mask of the rows in which every layer converged [B], and
        the $\omega_l$ [B, L].
    """
    depth = layers.depth
    target = w.unsqueeze(-1).expand(-1, depth).reshape(-1)
    inner = solve_equation(_OneLayer(layers), target, start.reshape(-1, 1), Options(Newton(), tolerance, maximum))
    omega = inner.x.view(len(w), depth)
    each = evaluate_layer(omega, layers.spectrum, layers.variance)
    # eq. s_transform_def says S = (1 + w)/(w z_l), and eq. s_product adds the logarithms; dz_l/dw = (dz/dω)/(dw/dω)
    log_s = depth * (1 + 1 / w).log() - each.z.log().sum(-1)
    slope = -depth / (w * (1 + w)) - (each.z_slope / (each.z * each.w_slope)).sum(-1)
    return log_s, slope, inner.converged.view(len(w), depth).all(-1), omega


class _OneLayer(Equation):
    r"""The equation $zG - 1 = w$ of one layer in the unknown $\omega$ at the point w; one row per pair (w, layer)."""

    def __init__(self, layers: ScalarLayers) -> None:
        self.layers = layers

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        here = self._layer(x, index)
        residual = z / here.w - 1
        return residual.abs(), (residual * here.w.square() / (z * here.w_slope)).unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        here = self._layer(x, index)
        return (here.z.imag > 0) & (here.g.imag < 0)

    def _layer(self, x: Tensor, index: Tensor) -> LayerValues:
        layer = index % self.layers.depth
        return evaluate_layer(x.squeeze(-1), self.layers.spectrum[layer], self.layers.variance[layer])
