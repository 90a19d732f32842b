r"""Moments and edges of a spectrum without smoothing: by a contour around it, and by how $\mathrm{Im}\,G$ vanishes."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.density import Density
from jpmhc.spectra.network import Network, require_network
from jpmhc.spectra.solution import Solution, Transform

# Points on the contour's upper half; the rule converges geometrically in them.
_CONTOUR = 48
# The smoothing at which the outside is told from the inside; Im G is of its order outside and has to be known better.
_EDGE_ETA = 1e-5
_EDGE_TOLERANCE = 1e-7
# The first band begins at zero if it begins below this share of the largest squared singular value.
_ZERO = 1e-12
# An edge's bracket, in log x, is divided by four until it is this narrow.
_BRACKET = 2e-3
_NARROWEST = 1e-4
# At this smoothing, so many brackets inside, the squared density is extrapolated to its zero.
_FINE_ETA = 1e-7
_INWARD = (1.0, 2.0, 3.0, 4.0)
# Where that zero is not in the bracket, the edge is no square root, and the bracket is divided so often again.
_QUARTERINGS = 6
# A band is where x rho is above this on a density's grid.
_BAND = 5e-3


def moments(network: Network, count: int, top: float, transform: Transform = cauchy) -> Tensor:
    r"""Compute the moments $\int x^k \rho\,dx = \frac{1}{2\pi i}\oint z^k G(z)\,dz$ for k = 1, …, count to nine digits.

    Args:
        top: A number above the spectrum, such as the end of a density's grid.

    >>> moments(Network.repeated(torch.eye(2), 0.1, 1), 1, top=3.0).round(decimals=4).tolist()
    [1.1]
    """
    require_network(network)
    count, top = (
        checks.whole_number(count, "the number of moments"),
        checks.positive_number(top, "top, a number above the spectrum,"),
    )
    # A circle through -top and 2 top, symmetric about the real axis: the upper half is enough. The rule's error falls
    # with the ratio of its radius to the distance of the spectrum from its centre.
    centre, radius = top / 2, 1.5 * top
    angle = (torch.arange(_CONTOUR, dtype=torch.float64, device=network.skips.device) + 0.5) * (math.pi / _CONTOUR)
    arm = radius * torch.exp(1j * angle)
    solution = transform(network, centre + arm, tolerance=1e-11)
    if not bool(solution.converged.all()):
        raise ValueError(f"no moments: around the spectrum, {solution.why_unconverged()}")
    mass = float((solution.G * arm).real.mean())
    if abs(mass - 1) > 1e-6:
        raise ValueError(f"top = {top:g} must lie above the spectrum; the circle through it holds a mass of {mass:.4g}")
    powers = torch.stack([(centre + arm) ** k for k in range(1, count + 1)])
    return (powers * solution.G * arm).real.mean(-1)


def edges(network: Network, density: Density, transform: Transform = cauchy) -> Tensor:
    r"""Find where the bands of squared singular values begin and end, [k, 2], to about five digits.

    Halving $\eta$ halves $\mathrm{Im}\,G$ outside the spectrum and leaves it alone inside; at an edge, where the
    density is a square root, it is divided by $\sqrt 2$. Each edge lies between the peak of its band and the grid's
    first point beyond it; that interval is divided a few times, and the zero of the squared density, which is analytic
    there, is extrapolated from the inside, where the equation is easier to solve than at the edge. The first band
    begins at zero if its beginning is less than 1e-12 of the grid's end; the last band's end is looked for beyond the
    grid's. A gap that falls between two points of the grid is not seen, and one in which the density is low but not
    zero ends where the grid shows it.

    >>> from jpmhc.spectra import density as compute_density
    >>> network = Network.repeated(torch.eye(2), 0.1, 1)
    >>> edges(network, compute_density(network)).shape
    torch.Size([1, 2])
    """

    require_network(network)
    if not isinstance(density, Density):
        raise ValueError("edges are looked for on a density of the network: edges(network, density(network))")

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
    # The curve shows a band where it is high: the first may begin, and the last end, beyond what it shows.
    steps = torch.arange(1, 16, dtype=x.dtype, device=x.device) * math.log(4.0)
    below = torch.cat([x[: outside[0] + 1].log().flip(0), x[:1].log() - steps])
    beyond = {
        0: below[below > x[-1].log() + math.log(_ZERO)],
        -1: torch.cat([x[outside[-1] :].log(), x[-1:].log() + steps[:4]]),
    }
    hidden = within(x[outside])
    for edge, places in beyond.items():
        if bool(hidden[edge]) and len(places):
            out = (~within(places.exp())).nonzero().squeeze(-1)
            if len(out) and int(out[0]) > 0:
                outer[edge], inner[edge], hidden[edge] = places[out[0]], places[out[0] - 1], False
    positions = outer.exp()
    if bool(hidden[0]):
        positions[0] = 0.0
    if not bool(hidden.all()):
        positions[~hidden] = _locate(outer[~hidden], inner[~hidden], within, fine)
    return positions.view(2, -1).T.cpu()


def _locate(
    outer: Tensor, inner: Tensor, within: Callable[[Tensor], Tensor], fine: Callable[[Tensor], Solution]
) -> Tensor:
    """Find edges between places outside and inside the spectrum, given and asked about as log x. [edges]"""
    quarters = torch.arange(5, dtype=outer.dtype, device=outer.device).unsqueeze(-1) / 4

    def divide(outer: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        places = outer + (inner - outer) * quarters  # [5, edges], from outside to inside
        inside = within(places[1:-1].exp())
        first = torch.cat([inside, torch.ones_like(inside[:1])]).int().argmax(0) + 1  # the first place that is inside
        outer, inner = (places.gather(0, (first - step).unsqueeze(0)).squeeze(0) for step in (1, 0))
        return outer, inner

    while float((inner - outer).abs().max()) > _BRACKET:
        outer, inner = divide(outer, inner)
    width = (inner - outer).sign() * (inner - outer).abs().clamp_min(_NARROWEST)
    away = outer.new_tensor(_INWARD).unsqueeze(-1).expand(-1, len(width))
    places = (inner + away * width).exp()
    solved = fine(places)
    zero = _interpolate_zero(away, (places * solved.G.imag).square())
    positions = (inner + zero * width).exp()
    lost = ~((zero > -1.5) & (zero < 0.5) & solved.converged.all(0))
    if bool(lost.any()):
        outer, inner = outer[lost], inner[lost]
        for _ in range(_QUARTERINGS):
            outer, inner = divide(outer, inner)
        positions[lost] = inner.exp()
    return positions


def _interpolate_zero(places: Tensor, values: Tensor) -> Tensor:
    """Return where each column of a function vanishes, by the polynomial that gives its places by its values. [k, m]"""
    terms = []
    for k, position in enumerate(places):
        others = torch.cat([values[:k], values[k + 1 :]])
        terms.append(position * (others / (others - values[k])).prod(0))
    return torch.stack(terms).sum(0)
