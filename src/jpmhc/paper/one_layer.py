r"""One layer, $Y = A + \sigma X$: the subordination equation and its explicit form.

With $s_i$ the eigenvalues of $A^\top A$ the Cauchy transform of $Y^\top Y$ solves eq. dyson_subordination,
$G = u \cdot \mathrm{mean}_i\, (\omega - s_i)^{-1}$ with $u = 1 - \sigma^2 G$ and $\omega = z u^2$.
Derivations: docs/derivations/one_layer.md.

Note:
    Eqs. dyson-fp and matrix-dyson of the paper do not give this law (the self-energy is diagonal in the linearisation,
    not off-diagonal); eqs. dyson_subordination and matrix_dyson_schur do, and are what is solved here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc.spectra.fixed_point import Equation, FixedPoints, Options, lead_down
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

_OPTIONS = Options(Newton(), tolerance=1e-12, maximum=200)


def gram_spectrum(skips: Tensor) -> Tensor:
    r"""Compute the eigenvalues of $A^\top A$, the $s_i$ of eq. dyson_subordination: [..., n, n] -> [..., n]."""
    return torch.linalg.svdvals(skips).square()


class Explicit(NamedTuple):
    r"""One layer at a value of $\omega$: $z$, $G$, $w = zG - 1$ and the slopes $dz/d\omega$, $dw/d\omega$."""

    z: Tensor
    g: Tensor
    w: Tensor
    z_slope: Tensor
    w_slope: Tensor


def explicit(omega: Tensor, spectrum: Tensor, variance: Tensor | float) -> Explicit:
    r"""Evaluate the layer's law in closed form, with $\omega$ as the parameter.

    With $h = \mathrm{mean}_i\,(\omega - s_i)^{-1}$ and $a = 1 + \sigma^2 h$: $z = \omega a^2$ and $G = h / a$. The
    moment function is $w = \mathrm{mean}_i\, s_i/(\omega - s_i) + \sigma^2 \omega h^2$, free of the
    cancellation in $zG - 1$.

    Args:
        omega: $\omega$. [...]
        spectrum: $s_i$. [..., n]
        variance: $\sigma^2$. [...]
    """
    inverse = 1 / (omega.unsqueeze(-1) - spectrum)  # [..., n]
    square = inverse.square()
    h, h_slope = inverse.mean(-1), -square.mean(-1)
    a = 1 + variance * h
    return Explicit(
        z=omega * a.square(),
        g=h / a,
        w=(spectrum * inverse).mean(-1) + variance * omega * h.square(),
        z_slope=a.square() + 2 * omega * a * variance * h_slope,
        w_slope=-(spectrum * square).mean(-1) + variance * (h.square() + 2 * omega * h * h_slope),
    )


def layer_cauchy(
    z: Tensor,
    spectrum: Tensor,
    variance: Tensor | float,
    options: Options = _OPTIONS,
) -> FixedPoints:
    r"""Solve eq. dyson_residual for $G(z)$ of one layer; the unknown of the result is G. [B, 1]

    Two passes (appendix "Batch solver"): a continuation that follows the solution down from a height where it is
    $1/z$, then a refinement of all points at once. The solution is the only one with $\mathrm{Im}\, G < 0$ and
    $\mathrm{Im}\, zG \le 0$; Newton steps that leave this region are replaced by half of a fixed-point step, which
    never does.

    Args:
        z: Points of the upper half plane. [B]
        spectrum: The eigenvalues $s_i$ of $A^\top A$, of one layer or of one per point. [n] or [B, n]
        variance: $\sigma^2$, likewise. A number or [B]
        options: How to iterate; the residual is relative to $|G|$.
    """
    variance = torch.as_tensor(variance, dtype=torch.float64, device=z.device).expand(len(z))
    equation = _Subordination(spectrum.expand(len(z), -1), variance)
    norm = float((spectrum.max().sqrt() + variance.max().sqrt()).square())
    return lead_down(equation, z, options, top=4 * norm)


class _Subordination(Equation):
    """Eq. dyson_subordination with G as the unknown."""

    def __init__(self, spectrum: Tensor, variance: Tensor) -> None:
        self.spectrum, self.variance = spectrum, variance

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return 1 / z.unsqueeze(-1)

    def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        g = x.squeeze(-1)
        u, h, h2 = self._free(g, z, index)
        variance = self.variance[index]
        residual = u * h - g  # eq. dyson_residual
        slope = -variance * h + 2 * variance * z * u.square() * h2 - 1  # eq. dyson_jacobian
        return residual.abs() / g.abs(), (-residual / slope).unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        g = x.squeeze(-1)
        return (g.imag < 0) & ((z * g).imag <= 1e-14)  # zG = 1, up to rounding, where Y = 0

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        u, h, _ = self._free(x.squeeze(-1), z, index)
        return (u * h).unsqueeze(-1)

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return (x + self.image(x, z, index)) / 2

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return x.abs()

    def _free(self, g: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = 1 - self.variance[index] * g
        inverse = 1 / ((z * u.square()).unsqueeze(-1) - self.spectrum[index])
        return u, inverse.mean(-1), inverse.square().mean(-1)


@method(scheme=_OPTIONS.scheme, tolerance=_OPTIONS.tolerance, maximum=_OPTIONS.maximum)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve a network of one layer with isotropic noise at points z [B]; the residual is relative to $|G|$."""
    if network.depth != 1:
        raise ValueError(f"method 'dyson' solves one layer, and this network has {network.depth}; use 'chain'")
    require_isotropic(network, "dyson")
    spectrum, variance = gram_spectrum(network.skips[0]), float(network.variance[0])
    solution = layer_cauchy(z, spectrum, variance, options)
    return Solution(solution.x.squeeze(-1), solution.converged, solution.residual, solution.iterations, "dyson")


def require_isotropic(network: Network, method: str) -> None:
    """Raise an error unless the network is of the paper's model: Gaussian noise, the same in every direction."""
    if not network.isotropic:
        raise ValueError(
            f"method '{method}' needs isotropic noise, and this network's is structured (read and write vectors or "
            "a covariance); use 'chain'"
        )
    require_gaussian_streams(network, method)


def require_gaussian_streams(network: Network, method: str) -> None:
    """Raise an error for what no method of the paper knows: other sublayers, slopes, tied weights, the model's ends."""
    if not network.gaussian_streams:
        raise ValueError(
            f"method '{method}' knows independent Gaussian noise and the Jacobian of all streams, not other sublayers, "
            "unequal slopes, tied weights or the model's own ends; use 'auto'"
        )
