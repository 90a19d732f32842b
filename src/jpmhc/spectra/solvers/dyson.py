r"""One layer, $Y = A + \sigma X$: the subordination equation, its explicit form, and its edges.

With $s_i$ the eigenvalues of $A^\top A$ the Cauchy transform of $Y^\top Y$ solves eq. dyson_subordination,
$G = u \cdot \mathrm{mean}_i\, (\omega - s_i)^{-1}$ with $u = 1 - \sigma^2 G$ and $\omega = z u^2$.
Derivations: docs/derivations/one_layer.md.

Note:
    Eqs. dyson-fp and matrix-dyson of the paper do not give this law (the self-energy is diagonal in the linearisation,
    not off-diagonal); eqs. dyson_subordination and matrix_dyson_schur do, and are what is solved here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from jpmhc.spectra.network import Network
from jpmhc.spectra.solution import Solution, check_points
from jpmhc.spectra.solvers.fixed_point.newton import follow, newton


def gram_spectrum(skips: Tensor) -> Tensor:
    r"""Eigenvalues of $A^\top A$, the $s_i$ of eq. dyson_subordination: [..., n, n] -> [..., n]."""
    return torch.linalg.svdvals(skips).square()


def low_rank_spectrum(scale: float, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Eigenvalues of $A^\top A$ and their weights for $A = a I + U V^\top$, in $O(p r^2)$ (appendix "Woodbury").

    $A^\top A - a^2 = [U\ V] \begin{pmatrix} 0 & a \\ a & U^\top U \end{pmatrix} [U\ V]^\top$ has rank $2r$ at most: one
    QR of $[U\ V]$ leaves a $2r \times 2r$ eigenproblem.

    Args:
        scale: $a$.
        left: $U$. [p, r]
        right: $V$. [p, r]

    Returns:
        The values $s_i$ and the weights that sum to one, $a^2$ standing for all directions outside $U$ and $V$.
    """
    left, right = left.to(torch.float64), right.to(torch.float64)
    if left.ndim != 2 or left.shape != right.shape:
        raise ValueError(f"U and V must be matrices of one shape, not {list(left.shape)} and {list(right.shape)}")
    size, rank = left.shape
    if 2 * rank > size:
        raise ValueError(f"a rank of {rank} is not low in dimension {size}; use gram_spectrum of the whole matrix")
    _, r = torch.linalg.qr(torch.cat([left, right], -1))
    eye = torch.eye(rank, dtype=torch.float64, device=left.device)
    core = torch.cat([torch.cat([0 * eye, scale * eye], -1), torch.cat([scale * eye, left.T @ left], -1)])
    values = scale**2 + torch.linalg.eigvalsh(r @ core @ r.T)
    values = torch.cat([values.clamp_min(0), values.new_tensor([scale**2])])
    weights = torch.full((2 * rank + 1,), 1 / size, dtype=torch.float64, device=left.device)
    weights[-1] = (size - 2 * rank) / size
    return values, weights


class Explicit(NamedTuple):
    r"""One layer at a value of $\omega$: $z$, $G$, $w = zG - 1$ and the slopes $dz/d\omega$, $dw/d\omega$."""

    z: Tensor
    g: Tensor
    w: Tensor
    z_slope: Tensor
    w_slope: Tensor


def explicit(omega: Tensor, spectrum: Tensor, variance: Tensor | float, weight: Tensor | None = None) -> Explicit:
    r"""The layer's law in closed form, with $\omega$ as the parameter.

    With $h = \mathrm{mean}_i\,(\omega - s_i)^{-1}$ and $a = 1 + \sigma^2 h$: $z = \omega a^2$ and $G = h / a$. The
    moment function is $w = \mathrm{mean}_i\, s_i/(\omega - s_i) + \sigma^2 \omega h^2$, free of the
    cancellation in $zG - 1$.

    Args:
        omega: $\omega$. [...]
        spectrum: $s_i$. [..., n]
        variance: $\sigma^2$. [...]
        weight: Weights of the $s_i$, equal by default. [..., n]
    """
    inverse = 1 / (omega.unsqueeze(-1) - spectrum)  # [..., n]
    square = inverse.square()
    h, h_slope = _mean(inverse, weight), -_mean(square, weight)
    a = 1 + variance * h
    return Explicit(
        z=omega * a.square(),
        g=h / a,
        w=_mean(spectrum * inverse, weight) + variance * omega * h.square(),
        z_slope=a.square() + 2 * omega * a * variance * h_slope,
        w_slope=-_mean(spectrum * square, weight) + variance * (h.square() + 2 * omega * h * h_slope),
    )


def edges(spectrum: Tensor, variance: float, weight: Tensor | None = None) -> Tensor:
    r"""The support of the layer's squared singular values, as intervals [k, 2].

    An edge is a critical value of the explicit form on the real line: $dz/d\omega = 0$, which is
    $\sigma^2 f(\omega) = 1$ with $f = \mathrm{mean}_i\,(\omega + s_i)/(\omega - s_i)^2$. On $\omega > 0$ the function
    $f$ is convex between neighbouring $s_i$ and monotone outside them, so that every root is bracketed; the support
    reaches zero exactly when $\sigma^2\, \mathrm{mean}_i\, s_i^{-1} \ge 1$.
    """
    s, inverse = np.unique(spectrum.detach().cpu().double().numpy(), return_inverse=True)
    w = np.full(len(spectrum), 1 / len(spectrum)) if weight is None else weight.detach().cpu().numpy()
    w = np.bincount(inverse, weights=w)
    if variance < 0:
        raise ValueError(f"the noise variance must not be negative, and {variance:g} is")
    if variance == 0:
        return torch.from_numpy(np.stack([s, s], -1))

    def excess(omega: float) -> float:
        return variance * float(np.sum(w * (omega + s) / (omega - s) ** 2)) - 1

    def slope(omega: float) -> float:
        return -float(np.sum(w * (omega + 3 * s) / (omega - s) ** 3))

    def at(omega: float) -> float:
        return omega * (1 + variance * float(np.sum(w / (omega - s)))) ** 2

    # Closer to s_i than σ² w_i / 2 the excess is above one, because (ω + s)/(ω − s)² ≥ 1/|ω − s|.
    margin = variance * w / 2
    bounds = []
    if s[0] > 0 and variance * float(np.sum(w / s)) < 1:
        bounds.append(at(optimize.brentq(excess, 0.0, max(s[0] - margin[0], 0.5 * s[0]), xtol=1e-15 * s[0])))
    else:
        bounds.append(0.0)
    for k in range(len(s) - 1):
        low, high = s[k] + margin[k], s[k + 1] - margin[k + 1]
        if low >= high or slope(low) >= 0 or slope(high) <= 0:
            continue
        bottom = optimize.brentq(slope, low, high, xtol=1e-15)
        if excess(bottom) < 0:
            bounds += [at(optimize.brentq(excess, *pair, xtol=1e-15)) for pair in ((low, bottom), (bottom, high))]
    high = s[-1] + margin[-1]
    while excess(high) > 0:
        high = s[-1] + 2 * (high - s[-1])
    bounds.append(at(optimize.brentq(excess, s[-1] + margin[-1], high, xtol=1e-15)))
    return torch.tensor(bounds, dtype=torch.float64).view(-1, 2)


def layer_cauchy(
    z: Tensor,
    spectrum: Tensor,
    variance: Tensor | float,
    weight: Tensor | None = None,
    *,
    tolerance: float = 1e-12,
    maximum: int = 200,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""$G(z)$ of one layer by Newton on eq. dyson_residual.

    Two passes (appendix "Batch solver"): a continuation that follows the solution down from a height where it is
    $1/z$, then a refinement of all points at once. The solution is the only one with $\mathrm{Im}\, G < 0$ and
    $\mathrm{Im}\, zG \le 0$; Newton steps that leave this region are replaced by half of a fixed-point step, which
    never does.

    Args:
        z: Points of the upper half plane. [B]
        spectrum: The eigenvalues $s_i$ of $A^\top A$, of one layer or of one per point. [n] or [B, n]
        variance: $\sigma^2$, likewise. A number or [B]
        weight: Weights of the $s_i$, equal by default. [n]
        tolerance: Of the residual, relative to $|G|$.
        maximum: The most Newton iterations in the second pass.

    Returns:
        G, converged, residual and iterations. [B] each
    """
    variance = torch.as_tensor(variance, dtype=torch.float64, device=z.device).expand(len(z))
    equation = _Subordination(spectrum.expand(len(z), -1), variance, weight)
    norm = float((spectrum.max().sqrt() + variance.max().sqrt()).square())
    found = follow(equation, z, top=4 * norm, tolerance=tolerance, maximum=maximum, fallback=equation.half_step)
    return found.x.squeeze(-1), found.converged, found.residual, found.iterations


class _Subordination:
    """Eq. dyson_subordination with G as the unknown."""

    def __init__(self, spectrum: Tensor, variance: Tensor, weight: Tensor | None) -> None:
        self.spectrum, self.variance, self.weight = spectrum, variance, weight

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        return 1 / z.unsqueeze(-1)

    def evaluate(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        g = x.squeeze(-1)
        u, h, h2 = self._free(g, z, index)
        variance = self.variance[index]
        residual = u * h - g  # eq. dyson_residual
        slope = -variance * h + 2 * variance * z * u.square() * h2 - 1  # eq. dyson_jacobian
        return residual.abs() / g.abs(), (-residual / slope).unsqueeze(-1)

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        g = x.squeeze(-1)
        return (g.imag < 0) & ((z * g).imag <= 1e-14)  # zG = 1, up to rounding, where Y = 0

    def half_step(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        u, h, _ = self._free(x.squeeze(-1), z, index)
        return (x + (u * h).unsqueeze(-1)) / 2

    def _free(self, g: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u = 1 - self.variance[index] * g
        inverse = 1 / ((z * u.square()).unsqueeze(-1) - self.spectrum[index])
        return u, _mean(inverse, self.weight), _mean(inverse.square(), self.weight)


def matrix_cauchy(
    b: Tensor, skip: Tensor, variance: float, *, tolerance: float = 1e-12, maximum: int = 200
) -> tuple[Tensor, Tensor]:
    r"""The layer's $M_n$-valued Cauchy transform $E_B[(b - Y^\top Y)^{-1}]$ at matrices $b$ (eq. matrix_dyson_schur).

    The self-energies are two scalars, $g_{11} = \mathrm{tr}\, G(b)$ and
    $g_{22} = u^{-1} + u^{-2}\, \mathrm{tr}\, A\, G(b) A^\top$, found by Newton with the analytic Jacobian, following
    $b + i t$ down to $t = 0$.

    Args:
        b: Matrices whose imaginary part $(b - b^*)/2i$ is positive. [B, n, n] complex
        skip: $A$. [n, n]
        variance: $\sigma^2$.
        tolerance: Of the two self-consistency residuals, relative to the unknowns.
        maximum: The most Newton iterations.

    Returns:
        $G(b)$ [B, n, n] and whether each converged [B].
    """
    imaginary = (b - b.mH) / 2j
    if bool((torch.linalg.eigvalsh(imaginary)[..., 0] <= 0).any()):
        raise ValueError("the matrix spectral parameter needs a positive imaginary part, (b - b*)/2i > 0")
    n = skip.shape[-1]
    gram = (skip.mT @ skip).to(b.dtype)
    eye = torch.eye(n, dtype=b.dtype, device=b.device)
    top = 4 * float(torch.linalg.matrix_norm(skip, 2) + variance**0.5) ** 2 + float(b.abs().max()) * n

    def resolvent(g: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        u = 1 - variance * g[:, 0]
        return u, torch.linalg.inv(at - variance * g[:, 1, None, None] * eye - gram / u[:, None, None])

    def consistent(g: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, m = resolvent(g, at)
        return u, m, torch.stack([_trace(m), 1 / u + _trace(gram @ m) / u.square()], -1)

    g = torch.empty(0)
    heights = [top * 4.0**-k for k in range(24)] + [0.0]
    for stage, height in enumerate(heights):
        shifted = b + 1j * height * eye

        def evaluate(x: Tensor, index: Tensor, shifted: Tensor = shifted) -> tuple[Tensor, Tensor]:
            u, m, target = consistent(x, shifted[index])
            residual = target - x
            # ∂M/∂g₂₂ = σ² M², ∂M/∂g₁₁ = σ² u⁻² M AᵀA M
            along_22 = variance * m @ m
            along_11 = variance / u.square()[:, None, None] * m @ gram @ m
            squared = u.square()
            jacobian = torch.stack(
                [
                    torch.stack([_trace(along_11), _trace(along_22)], -1),
                    torch.stack(
                        [
                            variance / squared
                            + 2 * variance * _trace(gram @ m) / (squared * u)
                            + _trace(gram @ along_11) / squared,
                            _trace(gram @ along_22) / squared,
                        ],
                        -1,
                    ),
                ],
                -2,
            ) - torch.eye(2, dtype=x.dtype, device=x.device)
            step, _ = torch.linalg.solve_ex(jacobian, -residual)
            return (residual.abs() / x.abs()).amax(-1), step

        def half_step(x: Tensor, index: Tensor, shifted: Tensor = shifted) -> Tensor:
            return (x + consistent(x, shifted[index])[2]) / 2

        last = stage == len(heights) - 1
        if stage == 0:
            g = torch.stack([_trace(torch.linalg.inv(shifted)), torch.ones_like(_trace(shifted)) - 1e-3j], -1)
        found = newton(
            evaluate,
            g,
            tolerance=tolerance if last else 1e-3,
            maximum=maximum if last else 20,
            admissible=lambda x, index: (x.imag < 0).all(-1),
            fallback=half_step,
        )
        g = found.x
    return resolvent(g, b)[1], found.converged


def solve(network: Network, z: Tensor, *, tolerance: float = 1e-12, maximum: int = 200) -> Solution:
    """The Cauchy transform of a network of one layer with isotropic noise."""
    z = check_points(z, network.skips.device)
    if network.depth != 1:
        raise ValueError(f"method 'dyson' solves one layer, and this network has {network.depth}; use 'chain'")
    if not network.isotropic:
        raise ValueError("method 'dyson' needs isotropic noise, and this network's is structured; use 'chain'")
    spectrum, variance = gram_spectrum(network.skips[0]), float(network.variance[0])
    parts = layer_cauchy(z.reshape(-1), spectrum, variance, tolerance=tolerance, maximum=maximum)
    g, converged, residual, iterations = (part.reshape(z.shape) for part in parts)
    return Solution(g, converged, residual, iterations, "dyson")


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.mean(-1) if weight is None else (values * weight).sum(-1)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-1, dim2=-2).mean(-1)
