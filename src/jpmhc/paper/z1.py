r"""The $z_1$-mapping: L equal layers from one layer (appendix "Multi-Layer Composition: Identical Layers").

Eq. z1_mapping, $z_L = z_1 (z_1 - 1/G_1(z_1))^{L-1}$, is solved for $z_1$, the argument of one layer's transform $G_1$.

Note:
    The paper's operator-valued form computes $z_1$ from the same scalar equation (eq. ov_z1_scalar), and then raises
    one layer's matrix-valued transform, instead of its trace, to a power (eq. ov_GL_matrix_power). Both forms agree if
    $A^\top A$ is a multiple of the identity; otherwise the operator-valued form has the larger error.
    The unknown here is $\omega$. $z_1$ and $G_1$ are explicit functions of $\omega$, so that no inner Newton iteration
    is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jpmhc.paper.one_layer import LayerValues, evaluate_layer, to_solution
from jpmhc.paper.scalar import ScalarLayers, why_not_exact
from jpmhc.spectra.fixed_point import ContinuedEquation, FixedPoints, Options, lead_down
from jpmhc.spectra.fixed_point import solve as solve_equation
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

# The step is halved more often than by default before the row ends.
_SCHEME = Newton(lengths=tuple(0.5**k for k in range(8)))


@method(scheme=_SCHEME, tolerance=1e-11, maximum=100)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve the scalar theory of layers with isotropic noise and equal laws, at points z [B].

    The residual measures eq. z1_mapping in logarithms. Only Newton's method can solve the equation.
    """
    mapping, points = _find_omega(ScalarLayers.of(network, "z1"), z, options)
    green = (1 + mapping.layer(points.x).w) / z  # eq. GL_from_G1, which says z_L G_L = z_1 G_1
    return to_solution("z1", green, points, why_not_exact(network))


@method(scheme=_SCHEME, tolerance=1e-11, maximum=100)
def solve_matrix_power(network: Network, z: Tensor, options: Options) -> Solution:
    r"""Compute the paper's operator-valued transform of equal layers as printed (eq. ov_GL_matrix_power).

    This is the transform of alg. ov_panel: $G_L = G_1(z_1)^L\,(z_1 G_1(z_1) - 1)^{-(L-1)}$ with the matrix $G_1(z_1) =
    u\,(\omega - A^\top A)^{-1}$ of one layer with skip A (eq. matrix_dyson; u and $\omega$ as in one_layer.py) at the
    $z_1$ of `solve`. All skips must have the same $A^\top A$. In the solution, `matrix` is $G_L$, and G is the mean of
    its diagonal.
    """
    layers = ScalarLayers.of(network, "z1-matrix")
    gram = network.skips.mT @ network.skips
    if not layers.identical or not bool(torch.allclose(gram, gram[:1].expand_as(gram), atol=1e-12)):
        raise ValueError("method 'z1-matrix' needs equal layers, and these differ; use 'chain'")
    mapping, points = _find_omega(layers, z, options)
    one = mapping.layer(points.x)
    vectors, values, _ = torch.linalg.svd(gram[0])
    spectrum = values * (mapping.spectrum.sum() / values.sum().clamp_min(torch.finfo(torch.float64).tiny))
    # All factors are functions of AᵀA, so that powers of matrices are powers of eigenvalues.
    g = (1 - mapping.variance * one.g).unsqueeze(-1) / (points.x.exp() - spectrum)  # [B, n]
    w = one.z.unsqueeze(-1) * g - 1
    # eq. ov_GL_matrix_power
    power = torch.exp(layers.depth * g.log() - (layers.depth - 1) * w.log() - layers.log_mean)
    matrix = (vectors * power.unsqueeze(-2)) @ vectors.mT.to(power.dtype)
    return to_solution("z1-matrix", power.mean(-1), points, why_not_exact(network), matrix=matrix)


def _find_omega(layers: ScalarLayers, z: Tensor, options: Options) -> tuple[_Mapping, FixedPoints]:
    """Solve eq. z1_mapping for ω at all points; return the equation and the results."""
    if not layers.identical:
        raise ValueError("method 'z1' needs layers of one law, and these differ; use 'subordination' or 'chain'")
    points = layers.rescale(z)
    mapping = _Mapping(layers)
    solution = lead_down(mapping, points, options, top=layers.top)
    lost, solved = solution.unconverged(), solution.converged.nonzero().squeeze(-1)
    if len(lost) and len(solved):  # the other points start again from the nearest solved ones
        nearest = (lost.unsqueeze(-1) - solved).abs().argmin(-1)
        start = solution.x[solved[nearest]]
        solution.merge_pass(lost, solve_equation(mapping, points[lost], start, options, lost))
    return mapping, solution


class _Mapping(ContinuedEquation):
    """Eq. z1_mapping in logarithms, with log ω as the unknown (alg. z1_mapping uses logarithms from five layers on)."""

    def __init__(self, layers: ScalarLayers) -> None:
        self.spectrum, self.variance = layers.spectrum[0], layers.variance[0]
        self.power = layers.depth - 1

    def layer(self, x: Tensor) -> LayerValues:
        return evaluate_layer(x.exp().squeeze(-1), self.spectrum, self.variance)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return z.log().unsqueeze(-1)  # after rescaling, ω = z₁ = z to leading order

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        one = self.layer(x)
        rest = one.z * one.w / (1 + one.w)  # z₁ − 1/G₁
        slope = (1 + self.power) * one.z_slope / one.z + self.power * one.w_slope / (one.w * (1 + one.w))
        # The arguments of z₁ and of z₁ − 1/G₁ lie in (−π, π) and add up to the argument of z: no multiple of 2πi is
        # lost.
        residual = one.z.log() + self.power * rest.log() - z.log()  # eq. z1_mapping, which is eq. ov_z1_scalar too
        return residual.abs(), -residual.unsqueeze(-1) / (slope.unsqueeze(-1) * x.exp())

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        one = self.layer(x)
        inside = (one.z.imag > 0) & (one.g.imag < 0) & (one.w.imag < 0) & (((1 + one.w) / z).imag < 0)
        return inside & (x.squeeze(-1).imag.abs() < torch.pi)
