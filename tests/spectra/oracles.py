"""The paper's own constructions, kept as independent checks of what the package solves in other ways."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jpmhc.paper.twisted import Factors
from jpmhc.spectra.fixed_point import Equation, Options, solve
from jpmhc.spectra.schemes import Newton


def find_support(spectrum: Tensor, variance: float) -> Tensor:
    r"""The support of the layer's squared singular values, as intervals [k, 2].

    An edge is a critical value of the explicit form on the real line: $dz/d\omega = 0$, which is
    $\sigma^2 f(\omega) = 1$ with $f = \mathrm{mean}_i\,(\omega + s_i)/(\omega - s_i)^2$. On $\omega > 0$ the function
    $f$ is convex between neighbouring $s_i$ and monotone outside them, so that every root is bracketed; the support
    reaches zero exactly when $\sigma^2\, \mathrm{mean}_i\, s_i^{-1} \ge 1$.

    Args:
        spectrum: The eigenvalues $s_i$ of $A^\top A$. [n]
        variance: $\sigma^2$.
    """
    s, counts = np.unique(spectrum.detach().cpu().double().numpy(), return_counts=True)
    w = counts / len(spectrum)
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
    bounds = [0.0]
    if s[0] > 0 and variance * float(np.sum(w / s)) < 1:
        bounds = [at(_bisect(excess, 0.0, max(s[0] - margin[0], 0.5 * s[0])))]
    for k in range(len(s) - 1):
        low, high = s[k] + margin[k], s[k + 1] - margin[k + 1]
        if low >= high or slope(low) >= 0 or slope(high) <= 0:
            continue
        bottom = _bisect(slope, low, high)
        if excess(bottom) < 0:
            bounds += [at(_bisect(excess, *pair)) for pair in ((low, bottom), (bottom, high))]
    high = s[-1] + margin[-1]
    while excess(high) > 0:
        high = s[-1] + 2 * (high - s[-1])
    bounds.append(at(_bisect(excess, s[-1] + margin[-1], high)))
    return torch.tensor(bounds, dtype=torch.float64).view(-1, 2)


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Find the root of a function that has different signs at two points, to the last digit."""
    rising = function(low) < 0
    while low < (middle := (low + high) / 2) < high:
        if (function(middle) < 0) == rising:
            low = middle
        else:
            high = middle
    return middle


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
    size, rank = left.shape
    _, r = torch.linalg.qr(torch.cat([left, right], -1))
    eye = torch.eye(rank, dtype=torch.float64, device=left.device)
    core = torch.cat([torch.cat([0 * eye, scale * eye], -1), torch.cat([scale * eye, left.T @ left], -1)])
    values = scale**2 + torch.linalg.eigvalsh(r @ core @ r.T)
    values = torch.cat([values.clamp_min(0), values.new_tensor([scale**2])])
    weights = torch.full((2 * rank + 1,), 1 / size, dtype=torch.float64, device=left.device)
    weights[-1] = (size - 2 * rank) / size
    return values, weights


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

    heights = [top * 4.0**-k for k in range(24)] + [0.0]
    first = b + 1j * top * eye
    g = torch.stack([_trace(torch.linalg.inv(first)), torch.ones_like(_trace(first)) - 1e-3j], -1)

    class SelfEnergies(Equation):
        """Its points are heights t: the transform is asked at b + i t."""

        def newton_correction(self, x: Tensor, z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            u, m, target = consistent(x, b[index] + 1j * z[:, None, None] * eye)
            residual = target - x
            # ∂M/∂g₂₂ = σ² M², ∂M/∂g₁₁ = σ² u⁻² M AᵀA M
            squared = u.square()
            along_22 = variance * m @ m
            along_11 = variance / squared[:, None, None] * m @ gram @ m
            from_u = variance / squared + 2 * variance * _trace(gram @ m) / (squared * u)
            first = torch.stack([_trace(along_11), _trace(along_22)], -1)
            second = torch.stack([from_u + _trace(gram @ along_11) / squared, _trace(gram @ along_22) / squared], -1)
            jacobian = torch.stack([first, second], -2) - torch.eye(2, dtype=x.dtype, device=x.device)
            step, _ = torch.linalg.solve_ex(jacobian, -residual)
            return (residual.abs() / x.abs()).amax(-1), step

        def safe_image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
            return (x + consistent(x, b[index] + 1j * z[:, None, None] * eye)[2]) / 2

        def admissible(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
            return (x.imag < 0).all(-1)

    for height in heights[:-1]:
        g = solve(SelfEnergies(), torch.full((len(b),), height, dtype=b.dtype), g, Options(Newton(), 1e-3, 20)).x
    found = solve(SelfEnergies(), torch.zeros(len(b), dtype=b.dtype), g, Options(Newton(), tolerance, maximum))
    return resolvent(found.x, b)[1], found.converged


def psi_inverse(
    factor: Factors, w: Tensor, start: Tensor, tolerance: float = 1e-13, maximum: int = 50
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Ψ-inversion and S-transform of one layer: $b$ with $G(b)\, b - 1 = W$, and $S(W) = W^{-1} G(b)$.

    With $G(b)^{-1} = b - S^{-1}$ the equation says $G(b) = W S$, so that only the two self-energies are unknown:
    $S^{-1} = \sigma^2 \beta P_x + A^\top U^{-1} A$ (docs/derivations/twisted.md).

    Note:
        The paper's eq. ov_s_transform has $b\, G(b) - 1 = W$ and $S = G(b) W^{-1}$: the mirror image of Dykema's
        definition, for which eq. twisted_product would need its factors reversed.

    Args:
        factor: One layer.
        w: $W$. [B, n, n]
        start: $(\alpha, \beta)$ to start from. [B, 2]
        tolerance: Of $\alpha$ and $\beta$, relative.
        maximum: The most Newton iterations.

    Returns:
        $S(W)$ [B, n, n], $b$ [B, n, n] and whether each converged [B].
    """

    class SelfEnergies(Equation):
        def image(self, x: Tensor, z: Tensor, index: Tensor) -> Tensor:
            inverse, u = factor.inverse_s(x[:, :1], x[:, 1:])
            s = torch.linalg.inv_ex(inverse)[0]  # [b, 1, n, n]
            return torch.cat(factor.orders(w[index].unsqueeze(1) @ s, u), -1)

    found = solve(SelfEnergies(), torch.zeros(len(w), dtype=w.dtype), start, Options(Newton(), tolerance, maximum))
    inverse = factor.inverse_s(found.x[:, :1], found.x[:, 1:])[0].squeeze(1)
    s = torch.linalg.inv_ex(inverse)[0]
    b = torch.linalg.inv_ex(w @ s)[0] + inverse
    return s, b, found.converged


def twisted_fold(factors: Factors, w: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    r"""The twisted fold (eq. twisted_fold): $S$ of the product $x_L \cdots x_1$ at $W$, layer by layer.

    Args:
        factors: The layers.
        w: $W$. [B, n, n]
        start: The layers' self-energies to start from, $\alpha$ first. [B, 2L]

    Returns:
        $S(W)$ [B, n, n] and whether every layer's Ψ-inversion converged [B].
    """
    depth = len(factors.skip)
    total = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device).expand_as(w)
    good = torch.ones(len(w), dtype=torch.bool, device=w.device)
    for layer in range(depth):
        s, _, converged = psi_inverse(
            Factors(*(part[layer : layer + 1] for part in factors.parts())), w, start[:, [layer, depth + layer]]
        )
        total, good = total @ s, good & converged
        w = torch.linalg.solve_ex(s, w @ s)[0]  # S⁻¹ W S
    return total, good


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-1, dim2=-2).mean(-1)
