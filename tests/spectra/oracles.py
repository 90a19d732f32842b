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
