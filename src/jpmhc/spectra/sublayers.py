r"""Laws of sublayer Jacobians: what a sublayer adds to the noise of its layer, beyond its mean square.

A sublayer's Jacobian $F'$ [p, p] is taken as bi-invariant: its singular vectors have no preferred directions. Its
determining series $C(t)$ then says everything that the chain needs (docs/derivations/real_networks.md). All laws here
have mean square one; `Network.variance` is their scale, $C_l(t) = C(\sigma_l^2 t)$.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jpmhc.checks import to_positive_number, to_real_tensor
from jpmhc.manifolds import orthogonal
from jpmhc.spectra.activations import Activation, get_activation, hermite_nodes, panel_nodes

# Standard normal numbers of a shape, one set for each of b samples. [b, *shape]
NormalSource = Callable[..., Tensor]
# How many nodes stand for a law of slopes, and for one of measured singular values. The integrands are rational with
# poles off the support, so that Gauss quadrature converges geometrically.
_SLOPE_NODES = 16
_MEASURED_NODES = 48


@dataclass(frozen=True, eq=False)
class Sublayer(ABC):
    """The law of a sublayer's Jacobian, as a discrete law of squares with mean one.

    Attributes:
        variance: The mean squared singular value that the law came with, which `Network` takes unless it is given one.
        squares: The nodes, with mean one. [K]
        weights: Their weights, which sum to one. [K]
    """

    variance: float
    squares: Tensor
    weights: Tensor

    @property
    @abstractmethod
    def norm(self) -> float:
        """A bound on the largest singular value of the law with mean square one."""

    @abstractmethod
    def sample(self, normal: NormalSource, width: int) -> Tensor:
        """Draw Jacobians with mean square one. [b, width, width]

        Args:
            normal: Draws standard normal numbers [b, *shape].
            width: Features p.
        """


@dataclass(frozen=True, eq=False)
class HiddenLayer(Sublayer):
    r"""Two Gaussian matrices around a layer of slopes, $F' = W_2\,\mathrm{diag}(d)\,W_1$.

    $C(t) = E_d[\,d^2 t / (1 - d^2 t / e)\,]$ for slopes with mean square one; `squares` are the $d^2$.

    Attributes:
        ratio: $e$, hidden features over features; infinite for a single Gaussian matrix, for which $C(t) = t$.
    """

    ratio: float = math.inf

    @property
    def norm(self) -> float:
        if math.isinf(self.ratio):
            return 2.0
        largest = float(self.squares[self.weights > 1e-12].max())
        return math.sqrt(largest) * (2 + math.sqrt(self.ratio) + 1 / math.sqrt(self.ratio))

    def sample(self, normal: NormalSource, width: int) -> Tensor:
        if math.isinf(self.ratio):
            return normal(width, width) / width**0.5
        hidden = max(1, round(self.ratio * width))
        first, last = normal(hidden, width) / width**0.5, normal(width, hidden) / hidden**0.5
        slopes = _at_quantiles(self, torch.special.ndtr(normal(hidden, 1))).sqrt()
        return last @ (slopes * first)


@dataclass(frozen=True, eq=False)
class Rotated(Sublayer):
    r"""Given singular values between random rotations, $F' = U\,\mathrm{diag}(s)\,V$; `squares` are the $s^2$.

    $C(z G(z)^2) = z G(z) - 1$ with $G(z) = E\,1/(z - s^2)$.
    """

    @property
    def norm(self) -> float:
        return math.sqrt(float(self.squares.max()))

    def sample(self, normal: NormalSource, width: int) -> Tensor:
        left, right = orthogonal.to_haar(normal(width, width)), orthogonal.to_haar(normal(width, width))
        place = (torch.arange(width, dtype=left.dtype, device=left.device) + 0.5) / width
        return (left * _at_quantiles(self, place).sqrt()) @ right


def gaussian(variance: float = 1.0) -> HiddenLayer:
    """Return the law of one Gaussian matrix, whose entries have this variance over the number of features."""
    one = torch.ones(1, dtype=torch.float64)
    return HiddenLayer(to_positive_number(variance, "variance"), one, one)


def haar(scale: float = 1.0) -> Rotated:
    """Return the law of a random orthogonal matrix times a number."""
    one = torch.ones(1, dtype=torch.float64)
    return Rotated(to_positive_number(scale, "scale") ** 2, one, one)


def two_matrix(
    activation: str | Activation,
    input_variance: float = 1.0,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    ratio: float = 4.0,
) -> HiddenLayer:
    r"""Return the law of $u \mapsto W_2\,\phi(W_1 u)$ at inputs of a given mean square.

    Args:
        activation: $\phi$, a name in `ACTIVATIONS` or an `Activation`.
        input_variance: The mean square of the entries of $u$.
        scales: $s_1$ and $s_2$: entries of $W_1$ have variance $s_1$ over its columns, those of $W_2$ $s_2$ over its.
        ratio: Hidden features over features.
    """
    phi = get_activation(activation)
    first, last, ratio, variance = _check_hidden(scales, ratio, input_variance)
    spread = math.sqrt(first * variance)
    place, weights = panel_nodes(torch.tensor([spread], dtype=torch.float64), phi.kinks)
    return _hidden_layer(phi.derivative(spread * place).square(), weights, first * last, ratio)


def gated(
    activation: str | Activation,
    input_variance: float = 1.0,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    ratio: float = 4.0,
) -> HiddenLayer:
    r"""Return the law of $u \mapsto W_2\,(\phi(W_1 u) \odot W_3 u)$, as SwiGLU with $\phi$ = "silu".

    Args:
        activation: $\phi$, a name in `ACTIVATIONS` or an `Activation`.
        input_variance: The mean square of the entries of $u$.
        scales: $s_1$ of $W_1$ and of $W_3$, and $s_2$ of $W_2$, as in `two_matrix`.
        ratio: Hidden features over features.
    """
    phi = get_activation(activation)
    first, last, ratio, variance = _check_hidden(scales, ratio, input_variance)
    spread = math.sqrt(first * variance)
    place, weights = panel_nodes(torch.tensor([spread], dtype=torch.float64), phi.kinks, nodes=8)
    gate, gate_weights = hermite_nodes(24)
    inner = (spread * place).unsqueeze(-1)  # [P, 1]
    squares = (phi.derivative(inner) * spread * gate).square() + phi.function(inner).square()
    return _hidden_layer(squares.flatten(), (weights.unsqueeze(-1) * gate_weights).flatten(), first * last, ratio)


def measured(singular_values: Tensor | np.ndarray | Sequence[float]) -> Rotated:
    """Return the law of a Jacobian with these singular values and random singular vectors."""
    values = to_real_tensor(singular_values, "singular values").cpu().flatten()
    if len(values) == 0 or bool((values < 0).any()) or not bool((values > 0).any()):
        raise ValueError("singular values must not be negative, and at least one must be above zero")
    squares, weights = gauss_nodes(values.square(), torch.full_like(values, 1 / len(values)), _MEASURED_NODES)
    mean = float((squares * weights).sum())
    return Rotated(mean, squares / mean, weights)


def gauss_nodes(values: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return at most `count` nodes and weights with the same moments up to order 2 count - 1, by the Lanczos method."""
    kept = weights > 0
    values, start = values[kept], (weights[kept] / weights[kept].sum()).sqrt()
    size = float(values.abs().max())
    basis, diagonal, beside = [start], [], []
    for _ in range(min(count, len(values))):
        image = values * basis[-1]
        diagonal.append(float(image @ basis[-1]))
        frame = torch.stack(basis)
        for _ in range(2):  # orthogonalised twice, which is enough
            image = image - (frame @ image) @ frame
        length = float(image.norm())
        if length <= 1e-10 * size:
            break
        beside.append(length)
        basis.append(image / length)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    rest = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    matrix = matrix + torch.diag(rest, 1) + torch.diag(rest, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    return nodes.clamp_min(0), vectors[0].square()


def _hidden_layer(squares: Tensor, weights: Tensor, gain: float, ratio: float) -> HiddenLayer:
    nodes, weights = gauss_nodes(squares, weights, _SLOPE_NODES)
    mean = float((nodes * weights).sum())
    if mean <= 0:
        raise ValueError("the activation has slope zero everywhere, so the sublayer's Jacobian is zero")
    return HiddenLayer(gain * mean, nodes / mean, weights, ratio)


def _check_hidden(
    scales: tuple[float, float], ratio: float, input_variance: float
) -> tuple[float, float, float, float]:
    first, last = (to_positive_number(scale, "a weight scale") for scale in scales)
    return (
        first,
        last,
        to_positive_number(ratio, "ratio, hidden features over features,"),
        to_positive_number(input_variance, "input_variance"),
    )


def _at_quantiles(law: Sublayer, place: Tensor) -> Tensor:
    """Return the law's squares at places of (0, 1) in their cumulative weight, of the places' shape."""
    edges = law.weights.cumsum(0).to(place)
    found = torch.searchsorted(edges, place.contiguous()).clamp_max(len(law.squares) - 1)
    return law.squares.to(place)[found]


def to_sublayers(value: Sublayer | Sequence[Sublayer] | None, depth: int) -> tuple[Sublayer, ...] | None:
    """Return one law per layer; a single one stands for all layers."""
    if value is None:
        return None
    laws = (value,) * depth if isinstance(value, Sublayer) else tuple(value)
    if len(laws) != depth or not all(isinstance(law, Sublayer) for law in laws):
        raise ValueError(f"sublayers must be one law of a sublayer's Jacobian, or one for each of the {depth} layers")
    return laws
