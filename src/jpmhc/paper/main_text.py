r"""The two Dyson equations of the paper's main text for one layer, as printed. Neither gives the law of the layer.

The layer is $Y = A + \sigma X$ with the skip A and Gaussian X; for a scalar skip, $a$ stands for A.

Eq. dyson-fp, $m = a/(z - \sigma^2 m)$ with $G = m/z$, is solved by eq. newton-scalar; $m$ is the transform of a scaled
semicircle. Eq. matrix-dyson, $M = A_h (z - A_h^\top A_h)^{-1}$ with $A_h = A + \sigma^2 M$ and
$G = \frac1n \mathrm{Tr}\,(z - A_h^\top A_h)^{-1}$, is solved by eq. newton-matrix, Newton's method for n² unknowns.

Note:
    Both equations place the noise's self-energy in off-diagonal blocks of the linearisation (a block matrix with $Y$
    and $Y^\top$ off its diagonal), but the true self-energy is block diagonal. The law of one layer is eq.
    dyson_subordination of the paper's appendix (one_layer.py). Eq. newton-scalar divides by $1 + a\sigma^2/(z -
    \sigma^2 m)^2$, but the derivative is $1 - a\sigma^2/(z - \sigma^2 m)^2$: the printed iteration converges linearly.
    For n = 1 the matrix equation is cubic and differs from eq. dyson-fp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jpmhc.paper.one_layer import mean_diagonal, require_paper_noise, to_solution
from jpmhc.spectra.fixed_point import ContinuedEquation, Options, lead_down
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

# Linear convergence takes more iterations than the defaults of `Newton`.
_LINEAR = Newton(first_try=200, stage_iterations=50)
_NOT_THE_LAW = "eq. {} is not the law of a layer; method 'dyson' solves the one that is"


@method(scheme=_LINEAR, tolerance=1e-12, maximum=1000)
def solve_scalar(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve eq. dyson-fp for one layer whose skip is a multiple of the identity, at points z [B]."""
    require_paper_noise(network, "dyson-fp", layers=1)
    skip = network.skips[0]
    a = skip.diagonal().mean()
    if not torch.allclose(skip, a * torch.eye(network.streams, dtype=skip.dtype, device=skip.device)):
        raise ValueError("method 'dyson-fp' needs a skip that is a number times the identity; use 'dyson'")
    equation = _Scalar(float(a), float(network.variance[0]))
    points = lead_down(equation, z, options, top=_height(network))
    return to_solution("dyson-fp", points.x.squeeze(-1) / z, points, _NOT_THE_LAW.format("dyson-fp"))


@method(scheme=Newton(), tolerance=1e-12, maximum=100)
def solve_matrix(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve eq. matrix-dyson for one layer, at points z [B]; the solution's `matrix` is (z - A_hᵀ A_h)⁻¹."""
    require_paper_noise(network, "matrix-dyson", layers=1)
    equation = _Matrix(network.skips[0].to(torch.complex128), float(network.variance[0]))
    points = lead_down(equation, z, options, top=_height(network))
    resolvent = equation.dress(points.x, z)[1]
    green = mean_diagonal(resolvent)
    return to_solution("matrix-dyson", green, points, _NOT_THE_LAW.format("matrix-dyson"), matrix=resolvent)


class _Scalar(ContinuedEquation):
    """Eq. dyson-fp with m as the unknown."""

    def __init__(self, skip: float, variance: float) -> None:
        self.skip, self.variance = skip, variance

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return self.skip / z.unsqueeze(-1)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return self.skip / (z.unsqueeze(-1) - self.variance * x)  # eq. dyson-fp

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.image(x, z, index) - x
        slope = 1 + self.skip * self.variance / (z.unsqueeze(-1) - self.variance * x).square()  # eq. newton-scalar
        return (residual.abs() / self.scale(x, z, index)).squeeze(-1), residual / slope

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        # The product of the two roots is a/σ²; the smaller root is the one that vanishes at infinity.
        return self.variance * x.squeeze(-1).abs().square() <= abs(self.skip) * (1 + 1e-9)

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return (x + self.image(x, z, index)) / 2  # the printed step does not help where m is not small

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return x.abs().clamp_min(torch.finfo(torch.float64).tiny)


class _Matrix(ContinuedEquation):
    """Eq. matrix-dyson with the n² entries of M as the unknowns, solved by Newton's method (eq. newton-matrix)."""

    def __init__(self, skip: Tensor, variance: float) -> None:
        self.skip, self.variance = skip, variance

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return (self.skip / z[:, None, None]).flatten(1)

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        dressed, resolvent = self.dress(x, z)
        return (dressed @ resolvent).flatten(1)  # eq. matrix-dyson

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)

    def dress(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return A_h = A + σ² M and (z - A_hᵀ A_h)⁻¹, with the entries of M from the unknowns x. [b, n, n] each"""
        dressed = self.skip + self.variance * x.unflatten(-1, self.skip.shape)
        eye = torch.eye(len(self.skip), dtype=x.dtype, device=x.device)
        return dressed, torch.linalg.inv_ex(z[:, None, None] * eye - dressed.mT @ dressed)[0]


def _height(network: Network) -> float:
    norm = torch.linalg.matrix_norm(network.skips[0], 2) + network.variance[0].sqrt()
    return 10 * float(norm.square()) + 10
