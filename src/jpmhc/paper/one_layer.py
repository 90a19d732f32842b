r"""The law of one layer, $Y = A + \sigma X$: the subordination equation and its explicit form.

A is the skip, and X is Gaussian. For eigenvalues $s_i$ of $A^\top A$ the Cauchy transform of $Y^\top Y$ solves eq.
dyson_subordination, $G = u \cdot \mathrm{mean}_i\, (\omega - s_i)^{-1}$ with $u = 1 - \sigma^2 G$ and $\omega = z u^2$.
Derivations: docs/derivations/paper_methods.md.

`matrix_cauchy` solves eq. matrix_dyson_schur for the layer's $M_n$-valued transform, whose argument is a matrix b
instead of a number z. main_text.py has the equations of the paper's main text, which have another law.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc.spectra.fixed_point import ContinuedEquation, FixedPoints, Options, lead_down
from jpmhc.spectra.fixed_point import solve as solve_equation
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Newton
from jpmhc.spectra.solution import Solution, method

_OPTIONS = Options(Newton(), tolerance=1e-12, maximum=200)


def gram_spectrum(skips: Tensor) -> Tensor:
    r"""Compute the eigenvalues $s_i$ of $A^\top A$ in eq. dyson_subordination: [..., n, n] -> [..., n]."""
    return torch.linalg.svdvals(skips).square()


class LayerValues(NamedTuple):
    r"""The values of $z$, $G$, $w = zG - 1$, $dz/d\omega$ and $dw/d\omega$ of one layer at some $\omega$."""

    z: Tensor
    g: Tensor
    w: Tensor
    z_slope: Tensor
    w_slope: Tensor


def evaluate_layer(omega: Tensor, spectrum: Tensor, variance: Tensor | float) -> LayerValues:
    r"""Evaluate the layer's law in closed form, with $\omega$ [...] as the parameter.

    $z = \omega a^2$ and $G = h / a$ with $h = \mathrm{mean}_i\,(\omega - s_i)^{-1}$ and $a = 1 + \sigma^2 h$. The
    moment function $w = zG - 1$ is computed as $w = \mathrm{mean}_i\, s_i/(\omega - s_i) + \sigma^2 \omega h^2$, which
    avoids the cancellation in $zG - 1$. The $s_i$ are [..., n], and $\sigma^2$ is [...].
    """
    inverse = 1 / (omega.unsqueeze(-1) - spectrum)  # [..., n]
    square = inverse.square()
    h, h_slope = inverse.mean(-1), -square.mean(-1)
    a = 1 + variance * h
    return LayerValues(
        z=omega * a.square(),
        g=h / a,
        w=(spectrum * inverse).mean(-1) + variance * omega * h.square(),
        z_slope=a.square() + 2 * omega * a * variance * h_slope,
        w_slope=-(spectrum * square).mean(-1) + variance * (h.square() + 2 * omega * h * h_slope),
    )


def layer_cauchy(
    z: Tensor, spectrum: Tensor, variance: Tensor | float, options: Options = _OPTIONS, *, weights: Tensor | None = None
) -> FixedPoints:
    r"""Solve eq. dyson_residual for $G(z)$ of one layer; G is the attribute `x` [B, 1] of the result.

    The solver has two passes (appendix "Batch solver"): a continuation from far above the real axis, where $G \approx
    1/z$, and a refinement of all points at once. The equation has exactly one solution with $\mathrm{Im}\, G < 0$ and
    $\mathrm{Im}\, zG \le 0$. A Newton step that leaves this region is replaced by half of a fixed-point step, which
    stays in the region.

    Args:
        z: Points of the upper half plane. [B]
        spectrum: The eigenvalues $s_i$ of $A^\top A$, of one layer for all points or one layer per point. [n] or [B, n]
        variance: $\sigma^2$ of one layer for all points, or of one layer per point. A number or [B]
        options: The scheme, the tolerance relative to $|G|$, and the most iterations.
        weights: The share of each eigenvalue, as `low_rank_spectrum` returns them; equal by default. [n]

    >>> z = torch.tensor([1 + 0.1j], dtype=torch.complex128)
    >>> solution = layer_cauchy(z, torch.ones(1, dtype=torch.float64), 0.05)
    >>> bool(solution.converged), bool(solution.x.imag < 0)
    (True, True)
    """
    variance = torch.as_tensor(variance, dtype=torch.float64, device=z.device).expand(len(z))
    weights = torch.full_like(spectrum, 1 / spectrum.shape[-1]) if weights is None else weights
    equation = _Subordination(spectrum.expand(len(z), -1), variance, weights.expand(len(z), -1))
    norm = float((spectrum.max().sqrt() + variance.max().sqrt()).square())
    return lead_down(equation, z, options, top=4 * norm)


class _Subordination(ContinuedEquation):
    """Eq. dyson_subordination with G as the unknown."""

    def __init__(self, spectrum: Tensor, variance: Tensor, weights: Tensor) -> None:
        self.spectrum, self.variance, self.weights = spectrum, variance, weights

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
        weights = self.weights[index]
        return u, (weights * inverse).sum(-1), (weights * inverse.square()).sum(-1)


def matrix_cauchy(
    b: Tensor, skip: Tensor, variance: float, *, tolerance: float = 1e-12, maximum: int = 200
) -> tuple[Tensor, Tensor]:
    r"""Compute the layer's $M_n$-valued transform $E_B[(b - Y^\top Y)^{-1}]$ at matrices b (eq. matrix_dyson_schur).

    $E_B$, an n × n matrix, is the mean over noise and features, and tr is the normalised trace. The unknowns are two
    scalars, $g_{11} = \mathrm{tr}\, G(b)$ and, with $u = 1 - \sigma^2 g_{11}$, $g_{22} = u^{-1} + u^{-2}\,
    \mathrm{tr}\, A\, G(b) A^\top$. Newton's method computes them at $b + i t$, from a large t down to $t = 0$.

    Args:
        b: Matrices whose imaginary part $(b - b^*)/2i$ is positive. [B, n, n] complex
        skip: $A$. [n, n]
        variance: $\sigma^2$.
        tolerance: The largest residual of the two equations, relative to the unknowns.
        maximum: The most Newton iterations at $t = 0$.

    Returns:
        $G(b)$ [B, n, n] and a mask of the matrices that converged [B].

    >>> b = torch.diag(torch.tensor([1 + 0.1j, 2 + 0.1j], dtype=torch.complex128))
    >>> green, converged = matrix_cauchy(b[None], torch.eye(2, dtype=torch.float64), 0.05)
    >>> green.shape, bool(converged)
    (torch.Size([1, 2, 2]), True)
    """
    if b.ndim != 3 or b.shape[1:] != skip.shape:
        raise ValueError(f"b must be matrices [B, n, n] of the skip's size {len(skip)}, not of shape {list(b.shape)}")
    equation = _Schur(b, skip, variance)
    # The equation's points are i t, from a large t, where the resolvent is about 1/(i t), down to 0.
    top = 4 * float(torch.linalg.matrix_norm(skip, 2) + variance**0.5) ** 2 + float(b.abs().max()) * len(skip)
    options = Options(Newton(), tolerance, maximum)
    points = torch.full((len(b),), 1j * top, dtype=b.dtype, device=b.device)
    x = equation.start(points, torch.arange(len(b), device=b.device))
    for _ in range(24):
        x = solve_equation(equation, points, x, options.rough).x
        points = points / 4
    solution = solve_equation(equation, torch.zeros_like(points), x, options)
    return equation.resolvent(solution.x, b), solution.converged


class _Schur(ContinuedEquation):
    """Eq. matrix_dyson_schur at b + i t, with $(g_{11}, g_{22})$ as unknowns and i t as points."""

    def __init__(self, b: Tensor, skip: Tensor, variance: float) -> None:
        self.b, self.variance = b, variance
        self.gram = (skip.mT @ skip).to(b.dtype)
        self.eye = torch.eye(len(skip), dtype=b.dtype, device=b.device)

    def start(self, z: Tensor, index: Tensor) -> Tensor:
        first = mean_diagonal(torch.linalg.inv(self.b[index] + z[:, None, None] * self.eye))
        return torch.stack([first, torch.ones_like(first) - 1e-3j], -1)

    def resolvent(self, x: Tensor, b: Tensor) -> Tensor:
        """Return the transform G at the matrices b from the unknowns x = $(g_{11}, g_{22})$. [b, n, n]"""
        u, shift = (1 - self.variance * x[:, 0])[:, None, None], (self.variance * x[:, 1])[:, None, None]
        return torch.linalg.inv(b - shift * self.eye - self.gram / u)  # eq. matrix_dyson_schur

    def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        m, u = self.resolvent(x, self.b[index] + z[:, None, None] * self.eye), 1 - self.variance * x[:, 0]
        return torch.stack([mean_diagonal(m), 1 / u + mean_diagonal(self.gram @ m) / u.square()], -1)

    def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return (x + self.image(x, z, index)) / 2

    def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return (x.imag < 0).all(-1)

    def scale(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
        return x.abs()


def mean_diagonal(matrix: Tensor) -> Tensor:
    """Return the normalised trace of matrices [..., n, n]. [...]"""
    return matrix.diagonal(dim1=-1, dim2=-2).mean(-1)


def low_rank_spectrum(scale: float, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Compute the eigenvalues of $A^\top A$ and their weights for $A = a I + U V^\top$, in $O(p r^2)$.

    The results are arguments of `layer_cauchy` (appendix "Woodbury acceleration").

    $A^\top A - a^2 = [U\ V] \begin{pmatrix} 0 & a \\ a & U^\top U \end{pmatrix} [U\ V]^\top$ has at most rank $2r$: a
    QR decomposition of $[U\ V]$ reduces the problem to a $2r \times 2r$ eigenproblem.

    Args:
        scale: $a$.
        left: $U$. [p, r]
        right: $V$. [p, r]

    Returns:
        The eigenvalues $s_i$, and weights that sum to one; the last eigenvalue $a^2$ stands for all directions
        orthogonal to $U$ and $V$. [2 r + 1] each

    >>> values, weights = low_rank_spectrum(1.0, torch.ones(4, 1).double() / 4, torch.ones(4, 1).double())
    >>> values.round(decimals=6).tolist(), weights.tolist()
    ([1.0, 4.0, 1.0], [0.25, 0.25, 0.5])
    """
    size, rank = left.shape
    _, r = torch.linalg.qr(torch.cat([left, right], -1))
    eye = torch.eye(rank, dtype=torch.float64, device=left.device)
    core = torch.cat([torch.cat([0 * eye, scale * eye], -1), torch.cat([scale * eye, left.T @ left], -1)])
    values = scale**2 + torch.linalg.eigvalsh(r @ core @ r.T)
    values = torch.cat([values.clamp_min(0), values.new_tensor([scale**2])])
    weights = torch.full((2 * rank + 1,), 1 / size, dtype=torch.float64, device=left.device)
    weights[-1] = (size - 2 * rank) / size
    return values, weights


@method(scheme=_OPTIONS.scheme, tolerance=_OPTIONS.tolerance, maximum=_OPTIONS.maximum)
def solve(network: Network, z: Tensor, options: Options) -> Solution:
    """Solve a network of one layer with isotropic noise at points z [B]; the residual is relative to $|G|$."""
    require_paper_noise(network, "dyson", layers=1)
    spectrum, variance = gram_spectrum(network.skips[0]), float(network.variance[0])
    points = layer_cauchy(z, spectrum, variance, options)
    return to_solution("dyson", points.x.squeeze(-1), points)


def to_solution(
    method: str, green: Tensor, points: FixedPoints, reason: str = "", note: str = "", matrix: Tensor | None = None
) -> Solution:
    """Return a method's solution, with G [B], a note for the user, and a matrix [B, n, n] if the method computes one.

    If there is a `reason` why the method's equation is not exact for the network, warn, and add the reason to the note.
    """
    if reason:
        warnings.warn(f"method '{method}': {reason}", stacklevel=4)
    note = "; ".join(part for part in (note, reason) if part)
    converged, residual, iterations = points.converged, points.residual, points.iterations
    return Solution(green, converged, residual, iterations, method, exact=not reason, note=note, matrix=matrix)


def require_paper_noise(network: Network, method: str, *, layers: int | None = None, isotropic: bool = True) -> None:
    """Raise ValueError if the method `method` cannot solve the network.

    The noise must be independent and Gaussian and, if `isotropic` is true, the same in every direction. `layers` is the
    number of layers that the method solves; None allows any number.
    """
    reason = ""
    if layers is not None and network.depth != layers:
        reason = f"solves one layer, and this network has {network.depth}"
    elif isotropic and not network.isotropic:
        reason = "needs isotropic noise, and this network's is structured (read and write vectors or a covariance)"
    elif not network.gaussian_streams:
        reason = (
            "knows independent Gaussian noise and the Jacobian of all streams, not other sublayers, unequal slopes, "
            "tied weights or the model's own ends"
        )
    if reason:
        raise ValueError(f"method '{method}' {reason}; use 'chain'")
