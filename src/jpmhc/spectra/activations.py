r"""Activations and their Gaussian moments, from which signal propagation and the layers' noise are computed.

For an activation $\phi$, $Z \sim \mathcal N(0, 1)$ and a variance $v$ the theory needs three numbers (the paper's eqs.
psi, kappa and phi_moment): $\psi = E[\phi'(\sqrt v Z)^2]$, $\kappa = E[\phi(\sqrt v Z)^2]$ and $\varphi = E[\phi(\sqrt
v Z)]$.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from jpmhc import checks

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    r"""An activation and its Gaussian moments.

    A moment is computed from its closed form if there is one, and otherwise by Gauss–Legendre quadrature on panels,
    intervals that end at the kinks.

    Note:
        The paper uses Gauss–Hermite quadrature with 100 nodes (appendix "Activation Functions"). It is poor across a
        kink (hard-tanh, $\psi(1)$: 0.655 instead of 0.6827) and at large variance (tanh, $\psi(100)$: 90 % off).

    Attributes:
        name: The name in `ACTIVATIONS`.
        function: $\phi$.
        derivative: $\phi'$ almost everywhere.
        kinks: The points at which $\phi$ or $\phi'$ is not smooth.
        closed: The closed forms of $(\psi, \kappa, \varphi)$ as functions of $v$; None if there are none.

    >>> square = Activation("square", torch.square, lambda x: 2 * x)
    >>> float(square.psi(1.0)), float(square.kappa(1.0))  # E 4 Z², E Z⁴
    (4.0, 3.0)
    """

    name: str
    function: Function
    derivative: Function
    kinks: tuple[float, ...] = ()
    closed: tuple[Function, Function, Function] | None = None

    def __post_init__(self) -> None:
        for part in ("function", "derivative"):
            if not callable(getattr(self, part)):
                raise ValueError(
                    f"the {part} of the activation {self.name!r} must be a function of a tensor, got "
                    f"{getattr(self, part)!r}"
                )

    def psi(self, variance: Tensor | float) -> Tensor:
        r"""Return the mean square slope $\psi(v) = E[\phi'(\sqrt v Z)^2]$ for a standard normal Z (eq. psi)."""
        return self._moment(variance, 0, lambda x: self.derivative(x).square())

    def kappa(self, variance: Tensor | float) -> Tensor:
        r"""Return the mean square output $\kappa(v) = E[\phi(\sqrt v Z)^2]$ for a standard normal Z (eq. kappa)."""
        return self._moment(variance, 1, lambda x: self.function(x).square())

    def phi(self, variance: Tensor | float) -> Tensor:
        r"""Return the mean output $\varphi(v) = E[\phi(\sqrt v Z)]$ for a standard normal Z (eq. phi_moment)."""
        return self._moment(variance, 2, self.function)

    def _moment(self, variance: Tensor | float, which: int, integrand: Function) -> Tensor:
        variance = checks.real_tensor(variance, "the variance of a pre-activation")
        if bool((variance < 0).any()):
            raise ValueError("the variance of a pre-activation must not be negative")
        if self.closed is not None:
            return self.closed[which](variance)
        return panel_expectation(integrand, variance.sqrt().unsqueeze(-1), self.kinks)


@lru_cache(maxsize=8)
def hermite_nodes(nodes: int) -> tuple[Tensor, Tensor]:
    """Return the nodes and weights of Gauss–Hermite quadrature for the mean over a standard normal Z. [nodes] each"""
    x, weight = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(x), torch.from_numpy(weight / math.sqrt(2 * math.pi))


@lru_cache(maxsize=8)
def _legendre(nodes: int) -> tuple[Tensor, Tensor]:
    x, weight = np.polynomial.legendre.leggauss(nodes)
    return torch.from_numpy(x), torch.from_numpy(weight)


def panel_nodes(scale: Tensor, kinks: tuple[float, ...] = (), nodes: int = 32) -> tuple[Tensor, Tensor]:
    r"""Return nodes $z_k$ and weights $w_k$ with $E[f(s Z)] \approx \sum_k w_k f(s z_k)$. [..., K] each

    Z is standard normal, and the scale $s$ is [..., 1]. The method is Gauss–Legendre quadrature on panels. The panels
    end at the kinks of $f$, at $\pm 1, \pm 2, \pm 4, \dots$ ($f$ changes over distances of about one) and at multiples
    of $s$ (the density's width), up to ten standard deviations.
    """
    x, weight = (part.to(scale.device) for part in _legendre(nodes))
    reach = 10.0
    own = [2.0**k for k in range(-1, 1 + max(1, math.ceil(math.log2(max(2.0, reach * float(scale.max()))))))]
    fixed = torch.tensor([0.0, *kinks, *own, *(-b for b in own)], dtype=torch.float64, device=scale.device)
    sigmas = torch.arange(-reach, reach + 1, dtype=torch.float64, device=scale.device)
    # Bounds in units of s; bounds outside the reach give panels of length zero.
    tiny = torch.finfo(torch.float64).tiny
    bounds = torch.cat([(fixed / scale.clamp_min(tiny)), sigmas.expand(*scale.shape[:-1], -1)], -1)
    bounds = bounds.clamp(-reach, reach).sort(-1).values
    middle, half = (bounds[..., 1:] + bounds[..., :-1]) / 2, (bounds[..., 1:] - bounds[..., :-1]) / 2
    z = middle.unsqueeze(-1) + half.unsqueeze(-1) * x  # [..., panels, nodes]
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    return z.flatten(-2), (density * weight * half.unsqueeze(-1)).flatten(-2)


def panel_expectation(function: Function, scale: Tensor, kinks: tuple[float, ...] = (), nodes: int = 32) -> Tensor:
    r"""Compute $E[f(s Z)]$ for a standard normal Z by the quadrature of `panel_nodes`; scale $s$ [..., 1] -> [...]."""
    z, weight = panel_nodes(scale, kinks, nodes)
    return (function(scale * z) * weight).sum(-1)


def leaky_relu(slope: float = 0.01) -> Activation:
    r"""Return the activation $\max(x, \text{slope} \cdot x)$ with closed forms of its moments."""
    square = (1 + slope**2) / 2
    return Activation(
        name="relu" if slope == 0 else "leaky_relu",
        function=lambda x: functional.leaky_relu(x, slope),
        derivative=lambda x: slope + (1 - slope) * (x > 0).to(x.dtype),
        kinks=(0.0,),
        closed=(
            lambda v: torch.full_like(v, square),
            lambda v: square * v,
            lambda v: (1 - slope) * (v / (2 * math.pi)).sqrt(),
        ),
    )


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _normal_density(x: Tensor) -> Tensor:
    return torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation(
            "linear",
            lambda x: x,
            torch.ones_like,
            closed=(torch.ones_like, lambda v: v, torch.zeros_like),
        ),
        leaky_relu(0.0),
        leaky_relu(0.01),
        Activation("tanh", torch.tanh, lambda x: 1 / torch.cosh(x.clamp(-300, 300)).square()),
        Activation("sigmoid", torch.sigmoid, _sigmoid_slope),
        Activation("hard_tanh", lambda x: x.clamp(-1, 1), lambda x: (x.abs() < 1).to(x.dtype), kinks=(-1.0, 1.0)),
        Activation("gelu", functional.gelu, lambda x: torch.special.ndtr(x) + x * _normal_density(x)),
        Activation("silu", functional.silu, lambda x: torch.sigmoid(x) + x * _sigmoid_slope(x)),
    )
}


def get_activation(activation: str | Activation) -> Activation:
    """Return an activation by its name in `ACTIVATIONS` or by MODULE:NAME; return an `Activation` unchanged.

    >>> get_activation("gelu").name
    'gelu'
    """
    named = isinstance(activation, str) and ":" in activation
    own: object = checks.named_object(str(activation)) if named else activation
    if isinstance(own, Activation):
        if own not in ACTIVATIONS.values():
            _check_derivative(own)
        return own
    if named or callable(own):
        raise ValueError(
            "an activation of your own must be a spectra.Activation(name, function, derivative), got "
            f"{checks.quote(own)}"
        )
    checks.choice(activation, ACTIVATIONS, "activation")
    return ACTIVATIONS[str(activation)]


def _check_derivative(activation: Activation) -> None:
    """Raise an error if an activation's derivative differs from the difference quotient of its function."""
    step = 1e-5
    x = torch.linspace(-3.0, 3.0, 120, dtype=torch.float64)  # an even number, so that no point is zero
    away = [(x - kink).abs() > 2 * step for kink in activation.kinks]
    x = x[torch.stack(away).all(0)] if away else x
    slope = (activation.function(x + step) - activation.function(x - step)) / (2 * step)
    given = activation.derivative(x)
    worst = int(((slope - given).abs() / (1 + slope.abs())).argmax())
    if not abs(float(slope[worst] - given[worst])) <= 1e-4 * (1 + abs(float(slope[worst]))):
        raise ValueError(
            f"the derivative of the activation {activation.name!r} is {float(given[worst]):.4g} at "
            f"{float(x[worst]):.3g}, where its function has the slope {float(slope[worst]):.4g}"
        )
