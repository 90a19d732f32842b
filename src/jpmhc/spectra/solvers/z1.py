r"""The $z_1$-mapping: L equal layers from one (appendix "Multi-Layer Composition: Identical Layers").

$z_L = z_1 (z_1 - 1/G_1(z_1))^{L-1}$ (eq. z1_mapping) is solved for the point $z_1$ at which one layer must be asked.

Note:
    The paper's operator-valued form (eq. ov_z1_scalar) is this same scalar equation.
    The unknown here is $\omega$, of which $z_1$ and $G_1$ are explicit functions, so that there is no inner Newton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers.dyson import Explicit, explicit, layer_cauchy
from jpmhc.spectra.solvers.fixed_point.anderson import FixedPoints
from jpmhc.spectra.solvers.fixed_point.newton import follow, newton
from jpmhc.spectra.solvers.scalar import ScalarLayers, scalar_solution

# From this depth on the equation is solved in logarithms (algorithm z1_mapping).
LOG_DEPTH = 5
# Armijo halvings before a step is given up.
_HALVINGS = tuple(0.5**k for k in range(8))


def solve(network: Network, z: Tensor, *, tolerance: float = 1e-11, maximum: int = 100) -> Solution:
    """The scalar theory's Cauchy transform for layers of one law; exact where `why_not_exact` has nothing to say."""
    z = check_points(z, network.skips.device)
    layers = ScalarLayers.of(network, "z1")
    if not layers.identical:
        raise ValueError("method 'z1' needs layers of one law, and these differ; use 'subordination' or 'chain'")
    points = layers.rescale(z.reshape(-1))
    mapping = _Mapping(layers)
    found = follow(mapping, points, top=layers.top, tolerance=tolerance, maximum=maximum, steps=_HALVINGS)
    if not bool(found.converged.all()):
        _restart(mapping, points, found, tolerance, maximum)
    g = (1 + mapping.layer(found.x).w) / z.reshape(-1)  # eq. GL_from_G1, which says z_L G_L = z_1 G_1
    return scalar_solution(network, "z1", (g, found.converged, found.residual, found.iterations), z.shape)


class _Mapping:
    """Eq. z1_mapping with ω, or its logarithm, as the unknown."""

    def __init__(self, layers: ScalarLayers) -> None:
        self.spectrum, self.variance = layers.spectrum[0], layers.variance[0]
        self.power = layers.depth - 1
        self.logarithmic = layers.depth >= LOG_DEPTH

    def layer(self, x: Tensor) -> Explicit:
        return explicit(self.omega(x), self.spectrum, self.variance)

    def omega(self, x: Tensor) -> Tensor:
        return (x.exp() if self.logarithmic else x).squeeze(-1)

    def unknown(self, omega: Tensor) -> Tensor:
        return (omega.log() if self.logarithmic else omega).unsqueeze(-1)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return self.unknown(z)  # after rescaling, ω = z₁ = z to leading order

    def evaluate(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        one = self.layer(x)
        rest = one.z * one.w / (1 + one.w)  # z₁ − 1/G₁
        log_slope = (1 + self.power) * one.z_slope / one.z + self.power * one.w_slope / (one.w * (1 + one.w))
        if self.logarithmic:
            # The arguments of z₁ and of z₁ − 1/G₁ lie in (−π, π) and add up to that of z: no multiple of 2πi is lost.
            residual = one.z.log() + self.power * rest.log() - z.log()
            step = -residual / (log_slope * self.omega(x))
        else:
            ratio = one.z * rest**self.power / z
            residual = ratio - 1
            step = -residual / (ratio * log_slope)
        return residual.abs(), step.unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        one = self.layer(x)
        inside = (one.z.imag > 0) & (one.g.imag < 0) & (one.w.imag < 0) & (((1 + one.w) / z).imag < 0)
        return inside & (x.squeeze(-1).imag.abs() < torch.pi) if self.logarithmic else inside


def _restart(mapping: _Mapping, z: Tensor, found: FixedPoints, tolerance: float, maximum: int) -> None:
    """Where continuation failed, start from z₁ between $z^{1/L}$ and $z$, from fixed points and from neighbours.

    Only admissible roots count: the equation has others.
    """
    lost = (~found.converged).nonzero().squeeze(-1)
    here = z[lost]
    guesses = [torch.exp(here.log() * t) for t in torch.linspace(1 / (mapping.power + 1), 1, 4).tolist()]
    guesses += [torch.full_like(here, value) for value in (1 + 1j, 0.1 + 0.1j, 1j)]
    starts = []
    for z_one in guesses:
        g = layer_cauchy(z_one, mapping.spectrum, float(mapping.variance), tolerance=1e-6)[0]
        starts.append(mapping.unknown(z_one * (1 - mapping.variance * g).square()))
    solved = found.converged.nonzero().squeeze(-1)
    if len(solved):
        nearest = (lost.unsqueeze(-1) - solved).abs().argmin(-1)
        starts.insert(0, found.x[solved[nearest]])
    for start in starts:
        again = newton(
            lambda x, index: mapping.evaluate(x, here[index], index),
            start,
            tolerance=tolerance,
            maximum=maximum,
            steps=_HALVINGS,
            admissible=lambda x, index: mapping.admissible(x, here[index], index),
        )
        better = again.converged & (~found.converged[lost] | (again.residual < found.residual[lost]))
        place = lost[better]
        found.x[place], found.residual[place], found.converged[place] = again.x[better], again.residual[better], True
        found.iterations[lost] += again.iterations
