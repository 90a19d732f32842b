r"""Moments and edges of a spectrum without smoothing, from a contour integral and from the zeros of the density."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.density import Density
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.solution import Solution, Transform

# The number of points on the contour's upper half; the rule's error falls geometrically with this number.
_CONTOUR = 48
# The smoothing at which points outside the spectrum are told from points inside. Outside, Im G is of the order of the
# smoothing, so that the tolerance has to be smaller.
_EDGE_ETA = 1e-5
_EDGE_TOLERANCE = 1e-7
# The first band begins at zero if it begins below this share of the largest squared singular value.
_ZERO = 1e-12
# An edge's bracket, in log x, is divided by four until it is this narrow.
_BRACKET = 2e-3
_NARROWEST = 1e-4
# The squared density is extrapolated to its zero from these points, in bracket widths inside the edge, at this
# smoothing.
_FINE_ETA = 1e-7
_INWARD = (1.0, 2.0, 3.0, 4.0)
# If that zero does not lie in the bracket, the density is no square root there; the bracket is then divided by four so
# many more times.
_QUARTERINGS = 6
# A band is where x rho is above this on a density's grid.
_BAND = 5e-3


def moments(network: Network, count: int, top: float, transform: Transform = cauchy) -> Tensor:
    r"""Compute $\int x^k \rho\,dx = \frac{1}{2\pi i}\oint z^k G(z)\,dz$ for k = 1, …, count to nine digits. [count]

    $\rho$ is the density of squared singular values x, and G is its Cauchy transform.

    Args:
        top: A number above all squared singular values, such as the end of a density's grid.

    >>> moments(Network.repeated(torch.eye(2), 0.1, 1), 1, top=3.0).round(decimals=4).tolist()
    [1.1]
    """
    require_network(network)
    count, top = (
        checks.whole_number(count, "the number of moments"),
        checks.positive_number(top, "top, a number above the spectrum,"),
    )
    # The contour is a circle through -top and 2 top. It is symmetric about the real axis: its upper half is enough. The
    # larger its radius relative to the spectrum's distance from its centre, the smaller the rule's error.
    centre, radius = top / 2, 1.5 * top
    angle = (torch.arange(_CONTOUR, dtype=torch.float64, device=network.skips.device) + 0.5) * (math.pi / _CONTOUR)
    arm = radius * torch.exp(1j * angle)
    solution = transform(network, centre + arm, tolerance=1e-11)
    if not bool(solution.converged.all()):
        raise ValueError(f"the moments are unknown: around the spectrum, {solution.why_unconverged()}")
    mass = float((solution.G * arm).real.mean())
    if mass > 1 + 1e-6:
        raise ValueError(
            f"for this network the method '{solution.method}' does not give the transform of a law: it has a mass of "
            f"{mass:.4g} instead of one, and no moments"
        )
    if mass < 1 - 1e-6:
        raise ValueError(f"top = {top:g} must lie above the spectrum; the circle through it holds a mass of {mass:.4g}")
    powers = torch.stack([(centre + arm) ** k for k in range(1, count + 1)])
    return (powers * solution.G * arm).real.mean(-1)


def edges(network: Network, density: Density, transform: Transform = cauchy) -> Tensor:
    r"""Return the lower and the upper edge of each band of squared singular values, to about five digits. [k, 2]

    A band is an interval on which the density is above zero; the grid of `density` gives the first, rough edges.
    Halving the smoothing $\eta$ halves $\mathrm{Im}\,G$ outside the spectrum, leaves it unchanged inside, and divides
    $\mathrm{Im}\,G$ by $\sqrt 2$ at an edge, where the density vanishes like a square root. Each edge lies between the
    peak of its band and the grid's first point outside the band. This interval is divided until it is short. Then the
    squared density, which is analytic near the edge, is extrapolated to its zero from points inside the band, where the
    equation is easier to solve than at the edge. The first band begins at zero if its lower edge is less than 1e-12 of
    the grid's end. The upper edge of the last band may lie beyond the grid. A gap between two neighbouring points of
    the grid is not detected. If the density in a gap is low but not zero, the gap's edges are taken from the grid.

    >>> from jpmhc.spectra import density as compute_density
    >>> network = Network.repeated(torch.eye(2), 0.1, 1)
    >>> edges(network, compute_density(network)).shape
    torch.Size([1, 2])
    """

    require_network(network)
    if not isinstance(density, Density):
        raise ValueError("the second argument must be a Density of the network: edges(network, density(network))")

    last: Solution | None = None

    def within(x: Tensor) -> Tensor:
        nonlocal last
        z = torch.stack([torch.complex(x, x * eta) for eta in (_EDGE_ETA, _EDGE_ETA / 2)])
        last = transform(network, z, tolerance=_EDGE_TOLERANCE, near=last)
        return last.G[0].imag / last.G[1].imag < math.sqrt(2)

    def fine(x: Tensor) -> Solution:
        return transform(network, torch.complex(x, x * _FINE_ETA), tolerance=_EDGE_TOLERANCE, near=last)

    weight = density.x * density.values
    seen = torch.cat([weight.new_zeros(1), weight, weight.new_zeros(1)]) > _BAND
    starts = (seen[1:] & ~seen[:-1]).nonzero().squeeze(-1).tolist()
    ends = (seen[:-1] & ~seen[1:]).nonzero().squeeze(-1).tolist()  # one past the band's last point
    peaks = [start + int(weight[start:end].argmax()) for start, end in zip(starts, ends)]
    outside = [max(start - 1, 0) for start in starts] + [min(end, len(weight) - 1) for end in ends]
    x = density.x.to(network.skips.device)
    outer, inner = x[outside].log(), x[peaks + peaks].log()
    # The grid shows a band only where the curve is high: the first band may begin below it, and the last end above it.
    steps = torch.arange(1, 16, dtype=x.dtype, device=x.device) * math.log(4.0)
    below = torch.cat([x[: outside[0] + 1].log().flip(0), x[:1].log() - steps])
    beyond = {
        0: below[below > x[-1].log() + math.log(_ZERO)],
        -1: torch.cat([x[outside[-1] :].log(), x[-1:].log() + steps[:4]]),
    }
    hidden = within(x[outside])
    for edge, points in beyond.items():
        if bool(hidden[edge]) and len(points):
            out = (~within(points.exp())).nonzero().squeeze(-1)
            if len(out) and int(out[0]) > 0:
                outer[edge], inner[edge], hidden[edge] = points[out[0]], points[out[0] - 1], False
    positions = outer.exp()
    if bool(hidden[0]):
        positions[0] = 0.0
    if not bool(hidden.all()):
        positions[~hidden] = _locate(outer[~hidden], inner[~hidden], within, fine)
    return positions.view(2, -1).T.cpu()


def _locate(
    outer: Tensor, inner: Tensor, within: Callable[[Tensor], Tensor], fine: Callable[[Tensor], Solution]
) -> Tensor:
    """Return x at the edge between each pair of points `outer` (outside the spectrum) and `inner` (inside). [edges]

    Args:
        outer: log x outside the spectrum. [edges]
        inner: log x inside the spectrum. [edges]
        within: A function from points x to a mask of the points inside the spectrum.
        fine: A function from points x to the solution with a small smoothing.
    """
    quarters = torch.arange(5, dtype=outer.dtype, device=outer.device).unsqueeze(-1) / 4

    def divide(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        points = outer + (inner - outer) * quarters  # [5, edges], from outside to inside
        inside = within(points[1:-1].exp())
        first = torch.cat([inside, torch.ones_like(inside[:1])]).int().argmax(0) + 1  # the first point that is inside
        outer, inner = (points.gather(0, (first - step).unsqueeze(0)).squeeze(0) for step in (1, 0))
        return outer, inner

    while float((inner - outer).abs().max()) > _BRACKET:
        outer, inner = divide(outer, inner)
    width = (inner - outer).sign() * (inner - outer).abs().clamp_min(_NARROWEST)
    away = outer.new_tensor(_INWARD).unsqueeze(-1).expand(-1, len(width))
    points = (inner + away * width).exp()
    solved = fine(points)
    zero = _interpolate_zero(away, (points * solved.G.imag).square())
    positions = (inner + zero * width).exp()
    lost = ~((zero > -1.5) & (zero < 0.5) & solved.converged.all(0))
    if bool(lost.any()):
        outer, inner = outer[lost], inner[lost]
        for _ in range(_QUARTERINGS):
            outer, inner = divide(outer, inner)
        positions[lost] = inner.exp()
    return positions


def _interpolate_zero(points: Tensor, values: Tensor) -> Tensor:
    """Return the zero of each column of `values` [k, m] at `points` [k, m], by inverse polynomial interpolation. [m]"""
    terms = []
    for k, position in enumerate(points):
        others = torch.cat([values[:k], values[k + 1 :]])
        terms.append(position * (others / (others - values[k])).prod(0))
    return torch.stack(terms).sum(0)
