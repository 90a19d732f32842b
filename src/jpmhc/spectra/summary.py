r"""Numbers that summarise a network's spectrum without computing a density (docs/derivations/real_networks.md).

J is the Jacobian of all n streams and T the model's own map (`Network.ends`). Layer l has the skip $A_l$ and the noise
variance $\sigma_l^2$; its noise is isotropic, has the block's read vector $r_l$ and write vector $w_l$, or is general
with the matrices $B_{lk}$. J has a gap at zero if no singular values lie near zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.machine import use_threads
from jpmhc.spectra.chain.solve import cauchy, solve_together
from jpmhc.spectra.density import COLLAPSED
from jpmhc.spectra.network import Network, require_network


@dataclass(frozen=True, eq=False)
class Summary:
    r"""Numbers that say how a network changes signals and gradients: J and T are the maps of `Network.ends`.

    Attributes:
        geometric_mean: The geometric mean of J's singular values. If `gap_margin` is below 1 it is
            $\prod_l |\det A_l|^{1/n}$ for any noise; otherwise it is NaN for general, tied or non-Gaussian noise.
        gap_margin: The largest spectral radius, over the layers, of $A_l^{-1}$ times the noise. J has no singular
            values near zero exactly if `gap_margin` is below one. Infinite for a singular skip.
        total_noise: $c = \sum_l \sigma_l^2$.
        mean_square: J's mean squared singular value; NaN for tied weights.
        model_mean_square: The mean squared singular value of the model's own map T; NaN for tied weights.
        direct_path: $q = 1^\top A_L \cdots A_1 1 / n$, the factor by which T multiplies without its sublayers.
        gradient_gains: The mean square of the derivative of T's output with respect to each sublayer's output, for
            weights that no two layers share. [L]
        collapsed: The share of J's singular values below the threshold of `summary`.
        collapsed_differences: The part of `collapsed` that comes from differences between streams.
        collapsed_mean: The part of `collapsed` that comes from the mean stream: the share of T's singular values below
            the threshold, divided by n.

    >>> result = summary(Network.repeated(torch.eye(2), 0.1, 3))
    >>> round(result.mean_square, 3), round(result.collapsed, 3)
    (1.331, 0.0)
    """

    geometric_mean: float
    gap_margin: float
    total_noise: float
    mean_square: float
    model_mean_square: float
    direct_path: float
    gradient_gains: Tensor
    collapsed: float
    collapsed_differences: float
    collapsed_mean: float


def summary(network: Network, threshold: float = COLLAPSED) -> Summary:
    """Return the `Summary` of a network.

    Args:
        threshold: Singular values below this number count as collapsed.

    >>> result = summary(Network.repeated(torch.eye(2), 0.1, 3))
    >>> result.gap_margin < 1, result.direct_path
    (True, 1.0)
    """
    require_network(network)
    threshold = checks.positive_number(threshold, "the threshold")
    streams, model = replace(network, ends="streams"), network.end_to_end()
    all_streams, own_map = share_below(streams, threshold), share_below(model, threshold)
    mean = min(own_map / network.streams, all_streams)
    return Summary(
        geometric_mean=geometric_mean(network),
        gap_margin=float(gap_radii(network).max()),
        total_noise=float(network.variance.sum()),
        mean_square=streams.mean_square(),
        model_mean_square=model.mean_square(),
        direct_path=direct_path(network),
        gradient_gains=gradient_gains(network),
        collapsed=all_streams,
        collapsed_differences=all_streams - mean,
        collapsed_mean=mean,
    )


def direct_path(network: Network) -> float:
    r"""Return $1^\top A_L \cdots A_1 1 / n$, the factor by which the model's map T multiplies without its sublayers."""
    through = torch.ones_like(network.skips[0, 0])
    for skip in network.skips:
        through = skip @ through
    return float(through.mean())


def gap_radii(network: Network) -> Tensor:
    r"""Return, for each layer, the spectral radius of $A_l^{-1}$ times the layer's noise. [L]

    J has a gap at zero exactly if all radii are below 1. A radius is $\sigma_l \sqrt{\mathrm{tr}(A_l A_l^\top)^{-1}}$
    for isotropic noise and $\sigma_l |r_l^\top A_l^{-1} w_l|$ for the block. For general noise it is the root of the
    spectral radius of $M \mapsto \sum_k A_l^{-1} B_{lk} M B_{lk}^\top A_l^{-\top}$, $\sigma_l$ included in $B_{lk}$.
    The radius of a layer with a singular skip is infinite.

    >>> gap_radii(Network.repeated(torch.eye(2), 0.25, 2)).tolist()
    [0.5, 0.5]
    """
    inverse, info = torch.linalg.inv_ex(network.skips)
    if network.isotropic:
        radii = (network.variance * inverse.square().sum((-2, -1)) / network.streams).sqrt()
    elif network.read is not None and network.write is not None:
        through = (network.read.unsqueeze(-2) @ inverse @ network.write.unsqueeze(-1)).flatten()
        radii = network.variance.sqrt() * through.abs()
    else:
        factors = inverse.unsqueeze(1) @ network.noise_factors()  # [L, K, n, n]
        maps = torch.einsum("lkij,lkmn->limjn", factors, factors).flatten(3, 4).flatten(1, 2)
        radii = torch.linalg.eigvals(maps).abs().amax(-1).sqrt()
    return torch.where((info == 0) & torch.isfinite(radii), radii, torch.inf)


def geometric_mean(network: Network) -> float:
    r"""Return the geometric mean of J's singular values: $\prod_l |\det A_l|^{1/n}$ if J has a gap at zero.

    A layer with a radius (`gap_radii`) of at least one contributes a factor above $|\det A_l|^{1/n}$. For isotropic
    noise the factor is $\Delta$ with $\log\Delta^2 = \mathrm{mean} \log(s_i + v) - v/\sigma^2$. Here $s_i$ are the
    squared singular values of $A_l$, and v solves $\sigma^2\,\mathrm{mean}\,1/(s_i + v) = 1$. For the block, by the
    determinant lemma, $|\det A_l|^{1/n}$ is multiplied by $|\det(1 + \tau X)|^{1/(np)}$ with the noise's $p \times p$
    matrix X (`Network`) and $\tau = \sigma |r^\top A^{-1} w|$. If such a layer's noise is general, tied or not
    Gaussian, the result is NaN.

    >>> round(geometric_mean(Network.repeated(2 * torch.eye(2), 0.1, 3)), 3)
    8.0
    """
    radii = gap_radii(network)
    logs = torch.linalg.slogdet(network.skips).logabsdet / network.streams
    beyond = (radii >= 1).nonzero().squeeze(-1).tolist()
    for layer in beyond:
        if network.covariance is not None or network.sublayers is not None or network.tied is not None:
            return math.nan
        if network.isotropic:
            squares = torch.linalg.svdvals(network.skips[layer]).square()
            logs[layer] = _log_determinant(squares, float(network.variance[layer]))
        elif math.isinf(float(radii[layer])):
            return math.nan
        else:
            square = float(radii[layer]) ** 2
            logs[layer] += (math.log(square) - 1 + 1 / square) / (2 * network.streams)
    return math.exp(float(logs.sum()))


def gradient_gains(network: Network, end: Tensor | None = None) -> Tensor:
    r"""Return the mean square of the derivative of the model's output with respect to each sublayer's output. [L]

    The mean square is $\gamma_l = w_l^\top B_l w_l$ with $B_L = 1 1^\top / n^2$ and
    $B_{l-1} = A_l^\top B_l A_l + \sigma_l^2 \gamma_l\, r_l r_l^\top$. For noise without read and write vectors it is
    $\mathrm{Tr}\,B_l$, summed over the outputs of all streams.

    Args:
        end: $B_L$; by default $1 1^\top / n^2$ for the mean stream as the output. The identity stands for all streams.
            [n, n]

    >>> gradient_gains(Network.repeated(torch.eye(2), 0.1, 3, read=[0.5, 0.5], write=[1.0, 1.0])).shape
    torch.Size([3])
    """
    moment = torch.full_like(network.skips[0], 1 / network.streams**2) if end is None else end.to(network.skips)
    eye = torch.eye(network.streams, dtype=moment.dtype, device=moment.device)
    factors = None if network.covariance is None else network.noise_factors()
    gains = []
    for layer in range(network.depth - 1, -1, -1):
        skip, variance = network.skips[layer], network.variance[layer]
        gains.append(moment.trace() if network.write is None else network.write[layer] @ moment @ network.write[layer])
        if factors is not None:
            noise = (factors[layer].mT @ moment @ factors[layer]).sum(0)
        elif network.read is not None:
            noise = variance * gains[-1] * torch.outer(network.read[layer], network.read[layer])
        else:
            noise = variance * gains[-1] / network.streams * eye
        moment = skip.T @ moment @ skip + noise
    return torch.stack(gains[::-1])


def share_below(network: Network, threshold: float, *, points: int = 12, tolerance: float = 1e-5) -> float:
    r"""Return the share of singular values below a threshold, $\frac1\pi \int_0^\pi \mathrm{Re}\,zG\,d\varphi$.

    G is the Cauchy transform of the squared singular values, and the arc $z = \theta^2 e^{i\varphi}$ encloses those
    singular values that lie below the threshold $\theta$. Gauss–Legendre quadrature in $\varphi$ needs few points,
    because $G$ is smooth up to the real axis unless an edge of the spectrum lies at the threshold.

    Args:
        threshold: A singular value, $\theta$.
        points: The number of points on the arc.
        tolerance: The tolerance of `cauchy` at these points.

    >>> round(share_below(Network.repeated(torch.diag(torch.tensor([1.0, 0.01])), 1e-6, 1), 0.1), 3)
    0.5
    """
    require_network(network)
    z, weight = _arc(threshold, points, network.skips.device)
    return _integrate_share(z, cauchy(network, z, tolerance=tolerance).G, weight)


def shares_below(networks: Sequence[Network], threshold: float, *, points: int, tolerance: float) -> list[float]:
    """Return `share_below` of several networks of one shape with read and write vectors, solved in one batch."""
    z, weight = _arc(threshold, points, networks[0].skips.device)
    with torch.no_grad(), use_threads(1):
        rows = solve_together(networks, z, tolerance=tolerance)
    return [_integrate_share(z, green, weight) for green in rows]


def _arc(threshold: float, points: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points on the upper half circle around zero with radius threshold², and weights that sum to two."""
    threshold, points = checks.positive_number(threshold, "the threshold"), checks.whole_number(points, "points")
    angle, weight = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(points))
    return threshold**2 * torch.exp(0.5j * math.pi * (angle + 1)).to(device), weight


def _integrate_share(z: Tensor, green: Tensor, weight: Tensor) -> float:
    share = float(((z * green).real.cpu() * weight / 2).sum())
    return min(1.0, max(0.0, share))


def _log_determinant(squares: Tensor, variance: float) -> float:
    """Return the mean logarithm of a layer's singular values for isotropic noise with a radius of at least one.

    The radius is the one of `gap_radii`.
    """
    low, high = 0.0, variance
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if variance * float((1 / (squares + middle)).mean()) > 1 else (low, middle)
    return float((squares + high).log().mean() - high / variance) / 2
