"""The paper's own constructions, kept as independent checks of what the package solves in other ways."""

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor


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
        bounds = [at(brentq(excess, 0.0, max(s[0] - margin[0], 0.5 * s[0])))]
    for k in range(len(s) - 1):
        low, high = s[k] + margin[k], s[k + 1] - margin[k + 1]
        if low >= high or slope(low) >= 0 or slope(high) <= 0:
            continue
        bottom = brentq(slope, low, high)
        if excess(bottom) < 0:
            bounds += [at(brentq(excess, *pair)) for pair in ((low, bottom), (bottom, high))]
    high = s[-1] + margin[-1]
    while excess(high) > 0:
        high = s[-1] + 2 * (high - s[-1])
    bounds.append(at(brentq(excess, s[-1] + margin[-1], high)))
    return torch.tensor(bounds, dtype=torch.float64).view(-1, 2)
