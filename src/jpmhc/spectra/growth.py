r"""How fast singular values grow or collapse with depth: closed forms at infinite depth.

All L layers share one normal skip with squared singular values $s_i$ and have isotropic noise of variance $\sigma^2$; J
is the product of the layers, and "mean" is over i. A growth factor is $\kappa = \lim s(J)^{2/L}$ for a singular value
s(J) (docs/derivations/real_networks.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jpmhc import checks

_HALVINGS = 200


def share_of_growth_below(
    kappa: Tensor | Sequence[float] | float, squares: Tensor | Sequence[float], variance: float
) -> Tensor:
    r"""Return the share of growth factors $s(J)^{2/L}$ below $\kappa$, for infinitely many equal layers.

    The share is $\frac12 - \frac12 \mathrm{mean}\, u_i / \sqrt{u_i^2 + 4\beta^2}$. Here $\beta$ solves $1/\sigma^2 =
    \mathrm{mean}\,1/\sqrt{u_i^2 + 4\beta^2}$ with $u_i = s_i - \kappa + \beta^2/\kappa$; $\beta$ is zero for $\kappa$
    outside the range of the growth factors.

    Args:
        kappa: Growth factors, above zero, of any shape.
        squares: $s_i$, the squared singular values of the skip.
        variance: $\sigma^2$ of one layer.

    >>> round(float(share_of_growth_below(0.5, [1.0, 0.25], 0.01)), 2)
    0.5
    """
    kappa, squares = checks.real_tensor(kappa, "kappa"), _to_squares(squares)
    variance = checks.positive_number(variance, "variance")
    if bool((kappa <= 0).any()):
        raise ValueError("kappa, a growth factor of squared singular values, must be above zero")
    kappa = kappa.unsqueeze(-1)

    def distances(beta: Tensor) -> tuple[Tensor, Tensor]:
        u = squares - kappa + beta.square() / kappa
        return u, (u.square() + 4 * beta.square()).sqrt()

    # The mean decreases with beta and is below 1/σ² at beta = σ²: there is one root or none.
    low, high = torch.zeros_like(kappa), torch.full_like(kappa, variance)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = (1 / distances(middle)[1]).mean(-1, keepdim=True) > 1 / variance
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    u, size = distances(low)
    return 0.5 - 0.5 * torch.where(size > 0, u / size.clamp_min(1e-300), 0.0).mean(-1)


def growth_edges(squares: Tensor | Sequence[float], variance: float) -> tuple[float, float]:
    r"""Return the smallest and the largest growth factor $s(J)^{2/L}$ for infinitely many equal layers.

    The growth factors solve $\sigma^2\,\mathrm{mean}\,1/|\kappa - s_i| = 1$ for $\kappa$, the smallest below all $s_i$
    and the largest above all $s_i$. If there is no solution below all $s_i$, the smallest growth factor is zero.

    >>> edges = growth_edges([1.0], 0.1)
    >>> len(edges)
    2
    """
    squares, variance = _to_squares(squares), checks.positive_number(variance, "variance")

    def solve(low: float, high: float, sign: float) -> float:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            inside = variance * float((1 / (squares - middle).abs()).mean()) > 1
            # go away from the squares if the middle is nearer to them than the edge, and towards them otherwise
            low, high = (middle, high) if inside == (sign > 0) else (low, middle)
        return (low + high) / 2

    top, bottom = float(squares.max()), float(squares.min())
    largest = solve(top, top + variance, 1.0)
    gap = bottom > 0 and variance * float((1 / squares).mean()) < 1
    return (solve(0.0, bottom, -1.0) if gap else 0.0), largest


def projector_rate(streams: int, rank: int) -> float:
    r"""Return the mean of log s, divided by the depth, for the nonzero singular values s of a product of projectors.

    The projectors are random, of rank k on n streams, one per layer, and there is no noise. The mean is $\frac{1}{2k}
    \sum_{j=1}^{k} [\psi(\tfrac{k-j+1}{2}) - \psi(\tfrac{n-j+1}{2})]$ with the digamma function $\psi$. The mean is
    below zero unless k = n: products of independent projectors collapse, and only a projector shared by all layers does
    not.

    >>> projector_rate(4, 2) < 0
    True
    """
    n, k = checks.whole_number(streams, "streams"), checks.whole_number(rank, "rank")
    if k > n:
        raise ValueError(f"rank {k} exceeds the number of streams {n}")
    j = torch.arange(1, k + 1, dtype=torch.float64)
    return float((torch.digamma((k - j + 1) / 2) - torch.digamma((n - j + 1) / 2)).sum() / (2 * k))


def layers_until_collapse(skips: Tensor, threshold: float = 0.1) -> float:
    r"""Return the number of layers after which the differences between streams fall below a threshold.

    A layer whose skip H has row sums one multiplies the differences by $|\det H|^{1/(n-1)}$ in geometric mean. The
    number of layers is infinite if the differences do not shrink.

    Args:
        skips: A sample of the layers' skips H, with row sums one. [L, n, n]
        threshold: The factor to which the differences fall.

    >>> skip = torch.full((2, 2), 0.1) + 0.8 * torch.eye(2)
    >>> round(layers_until_collapse(skip[None].double()), 1)
    10.3
    """
    skips = checks.real_tensor(skips, "skips")
    n = checks.square(skips, "skips")
    rate = float(torch.linalg.slogdet(skips).logabsdet.mean()) / max(1, n - 1)
    return math.log(checks.positive_number(threshold, "the threshold")) / rate if rate < -1e-9 else math.inf


def _to_squares(value: Tensor | Sequence[float]) -> Tensor:
    squares = checks.real_tensor(value, "squared singular values").flatten()
    if len(squares) == 0 or bool((squares < 0).any()):
        raise ValueError("squared singular values of a skip must be given, none of them negative")
    return squares
