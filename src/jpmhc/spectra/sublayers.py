r"""Laws of sublayer Jacobians, for sublayers that are not one Gaussian matrix.

A law is a probability distribution of random matrices. A sublayer's Jacobian $F'$ [p, p] is assumed to be bi-invariant:
its singular vectors have no preferred directions. The chain of layers then depends only on the Jacobian's determining
series $C(t)$. With the Cauchy transform G of $F'^\top F'$ the series solves $C(z G(z)^2) = z G(z) - 1$
(docs/derivations/real_networks.md). All laws here have mean square one (the mean squared singular value);
`Network.variance` is their scale, $C_l(t) = C(\sigma_l^2 t)$.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.manifolds import orthogonal
from jpmhc.spectra.activations import Activation, get_activation, hermite_nodes, panel_nodes

# A function that draws standard normal numbers of a given shape for each of b samples. [b, *shape]
NormalSource = Callable[..., Tensor]
# The number of nodes of a law of slopes, of a law of measured singular values, and the smallest number for each decade
# of squares. The integrands are rational with poles off the support, so that Gauss quadrature converges geometrically.
_SLOPE_NODES = 16
_MEASURED_NODES, _DECADE_NODES = 48, 8
# Squares that are smaller than the largest by more than this many decades share the nodes of the lowest decade.
_MOST_DECADES = 10


@dataclass(frozen=True, eq=False)
class Sublayer(ABC):
    """The law of a sublayer's Jacobian, stored as a discrete distribution of squares with mean one.

    Attributes:
        variance: The mean squared singular value of the Jacobian, which is the default variance of a `Network`.
        squares: The nodes, with mean one: squared slopes of a hidden layer, or squared singular values. [K]
        weights: The nodes' weights, which sum to one. [K]
    """

    variance: float
    squares: Tensor
    weights: Tensor

    @property
    @abstractmethod
    def norm(self) -> float:
        """An upper bound on the singular values of the law with mean square one."""

    @abstractmethod
    def sample(self, normal: NormalSource, width: int) -> Tensor:
        """Draw Jacobians with mean square one. [b, width, width]

        Args:
            normal: A function that draws standard normal numbers [b, *shape].
            width: Features p.
        """


@dataclass(frozen=True, eq=False)
class HiddenLayer(Sublayer):
    r"""The law of two Gaussian matrices around a layer of slopes, $F' = W_2\,\mathrm{diag}(d)\,W_1$.

    The determining series is $C(t) = E_d[\,d^2 t / (1 - d^2 t / e)\,]$ for slopes d with mean square one; `squares` are
    the $d^2$.

    Attributes:
        ratio: $e$, hidden features over features; infinite for a single Gaussian matrix, for which $C(t) = t$.
        draw_squares: A function that draws squared slopes with mean one [b, hidden, 1] from the activation instead of
            the nodes, so that samples do not share the nodes' errors; None for equal slopes.
    """

    ratio: float = math.inf
    draw_squares: Callable[[NormalSource, int], Tensor] | None = None

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
        return last @ first if self.draw_squares is None else last @ (self.draw_squares(normal, hidden).sqrt() * first)


@dataclass(frozen=True, eq=False)
class Rotated(Sublayer):
    r"""The law of fixed singular values between random rotations, $F' = U\,\mathrm{diag}(s)\,V$.

    `squares` are the $s^2$. The determining series follows from $G(z) = E\,1/(z - s^2)$.

    Attributes:
        sorted_squares: All $s^2$, ascending, with mean one. Samples use them; the theory uses the nodes `squares`. [N]
    """

    sorted_squares: Tensor

    @property
    def norm(self) -> float:
        return math.sqrt(float(self.sorted_squares[-1]))

    def sample(self, normal: NormalSource, width: int) -> Tensor:
        left, right = orthogonal.to_haar(normal(width, width)), orthogonal.to_haar(normal(width, width))
        count = len(self.sorted_squares)
        ranks = torch.arange(width, device=left.device).mul(2).add(1).mul(count).div(2 * width, rounding_mode="floor")
        return (left * self.sorted_squares.to(left)[ranks].sqrt()) @ right


def gaussian(variance: float = 1.0) -> HiddenLayer:
    """Return the law of a square Gaussian matrix whose entries have `variance` divided by the number of features."""
    one = torch.ones(1, dtype=torch.float64)
    return HiddenLayer(checks.positive_number(variance, "variance"), one, one)


def haar(scale: float = 1.0) -> Rotated:
    """Return the law of a random orthogonal matrix times `scale`."""
    one = torch.ones(1, dtype=torch.float64)
    return Rotated(checks.positive_number(scale, "scale") ** 2, one, one, one)


def two_matrix(
    activation: str | Activation,
    input_variance: float = 1.0,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    ratio: float = 4.0,
) -> HiddenLayer:
    r"""Return the law of the Jacobian of $u \mapsto W_2\,\phi(W_1 u)$ for Gaussian $W_1$ and $W_2$.

    Args:
        activation: $\phi$, a name in `ACTIVATIONS` or an `Activation`.
        input_variance: The mean square of the entries of $u$.
        scales: $s_1$ and $s_2$: entries of $W_1$ have variance $s_1$ divided by the number of its columns, and entries
            of $W_2$ have variance $s_2$ divided by the number of its columns.
        ratio: Hidden features over features.
    """
    phi, spread, gain = _check_hidden(activation, input_variance, scales, ratio)
    points, weights = panel_nodes(torch.tensor([spread], dtype=torch.float64), phi.kinks)

    def draw(normal: NormalSource, hidden: int) -> Tensor:
        return phi.derivative(spread * normal(hidden, 1)).square()

    return _hidden_layer(phi.derivative(spread * points).square(), weights, gain, ratio, draw)


def gated(
    activation: str | Activation,
    input_variance: float = 1.0,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    ratio: float = 4.0,
) -> HiddenLayer:
    r"""Return the law of the Jacobian of $u \mapsto W_2\,(\phi(W_1 u) \odot W_3 u)$ for Gaussian matrices $W_i$.

    With $\phi$ = "silu" this is SwiGLU; $\odot$ multiplies entries.

    Args:
        activation: $\phi$, a name in `ACTIVATIONS` or an `Activation`.
        input_variance: The mean square of the entries of $u$.
        scales: $s_1$ of $W_1$ and of $W_3$, and $s_2$ of $W_2$, as in `two_matrix`.
        ratio: Hidden features over features.
    """
    phi, spread, gain = _check_hidden(activation, input_variance, scales, ratio)
    points, weights = panel_nodes(torch.tensor([spread], dtype=torch.float64), phi.kinks, nodes=8)
    gate, gate_weights = hermite_nodes(24)
    inner = (spread * points).unsqueeze(-1)  # [P, 1]

    def square(inner: Tensor, gate: Tensor) -> Tensor:
        return (phi.derivative(inner) * gate).square() + phi.function(inner).square()

    def draw(normal: NormalSource, hidden: int) -> Tensor:
        return square(spread * normal(hidden, 1), spread * normal(hidden, 1))

    weights = weights.unsqueeze(-1) * gate_weights
    return _hidden_layer(square(inner, spread * gate).flatten(), weights.flatten(), gain, ratio, draw)


def measured(singular_values: Tensor | np.ndarray | Sequence[float]) -> Rotated:
    """Return the law of a Jacobian with the given singular values and random singular vectors."""
    values = checks.real_tensor(singular_values, "singular values").cpu().flatten()
    if len(values) == 0 or bool((values < 0).any()) or not bool((values > 0).any()):
        raise ValueError("singular values must not be negative, and at least one must be above zero")
    squares = values.square().sort().values
    mean = float(squares.mean())
    return Rotated(mean, *decade_nodes(squares / mean), squares / mean)


def decade_nodes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return quadrature nodes and weights for equally likely `values`, from one Gauss quadrature per decade of values.

    One quadrature for several decades would give no nodes to the small values. The mean stays exact.
    """
    largest = float(values.max())
    smallest = max(float(values[values > 0].min()), largest * 10.0**-_MOST_DECADES)
    count = max(1, math.ceil(math.log10(largest / smallest)))
    level = (values.clamp_min(smallest) / smallest).log() / math.log(largest / smallest + 1e-12) * count
    decades = level.long().clamp(0, count - 1)
    parts = []
    for decade in decades.unique().tolist():
        inside = values[decades == decade]
        nodes, weights = gauss_nodes(inside, torch.ones_like(inside), max(_DECADE_NODES, _MEASURED_NODES // count))
        parts.append((nodes, weights * (len(inside) / len(values))))
    squares, weights = (torch.cat(part) for part in zip(*parts))
    return squares, weights


def tail_nodes(values: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return at most `count` quadrature nodes and weights for a heavy-tailed law of numbers q with mean one.

    Mass and mean are kept. The quadrature is a Gauss quadrature in y = q / (1 + q) with weights multiplied by 1 + q.
    The theory integrates rational functions of q, which are smooth in y up to y = 1. A quadrature in q itself would put
    its nodes into the tail.
    """
    nodes, shares = gauss_nodes(values / (1 + values), weights * (1 + values), count)
    shares = shares * (1 - nodes)
    return nodes / (1 - nodes), shares / shares.sum()


def gauss_nodes(values: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return at most `count` nodes and weights that keep a discrete law's moments up to order 2 count - 1."""
    nodes, vectors = torch.linalg.eigh(jacobi_matrix(values, weights, count))
    return nodes.clamp_min(0), vectors[0].square()


def jacobi_matrix(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """Compute the Jacobi matrix, a tridiagonal matrix, of a discrete law by the Lanczos method. [k, k]

    k is `count`, or the number of the law's values if the law has fewer.
    """
    positive = weights > 0
    values, start = values[positive], (weights[positive] / weights[positive].sum()).sqrt()
    size = float(values.abs().max())
    basis, diagonal, beside = [start], [], []
    for _ in range(min(count, len(values))):
        image = values * basis[-1]
        diagonal.append(float(image @ basis[-1]))
        frame = torch.stack(basis)
        for _ in range(2):  # two orthogonalisations are enough
            image = image - (frame @ image) @ frame
        length = float(image.norm())
        if length <= 1e-10 * size:
            break
        beside.append(length)
        basis.append(image / length)
    rest = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(rest, 1) + torch.diag(rest, -1)


def _hidden_layer(
    squares: Tensor, weights: Tensor, gain: float, ratio: float, draw: Callable[[NormalSource, int], Tensor]
) -> HiddenLayer:
    mean = float((squares * weights).sum() / weights.sum())
    if mean <= 0:
        raise ValueError("the activation has slope zero everywhere, so the sublayer's Jacobian is zero")
    nodes, weights = tail_nodes(squares / mean, weights, _SLOPE_NODES)
    return HiddenLayer(gain * mean, nodes, weights, ratio, lambda normal, hidden: draw(normal, hidden) / mean)


def _check_hidden(
    activation: str | Activation, input_variance: float, scales: tuple[float, float], ratio: float
) -> tuple[Activation, float, float]:
    """Return the activation, the standard deviation of the hidden features, and the product of the scales."""
    first, last = (checks.positive_number(scale, "a weight scale") for scale in scales)
    checks.positive_number(ratio, "ratio, hidden features over features,")
    variance = first * checks.positive_number(input_variance, "input_variance")
    return get_activation(activation), math.sqrt(variance), first * last


def to_sublayers(value: Sublayer | Sequence[Sublayer] | None, depth: int) -> tuple[Sublayer, ...] | None:
    """Return `depth` laws, one per layer; `value` is such a list, a single law for all layers, or None for None."""
    if value is None:
        return None
    laws = (value,) * depth if isinstance(value, Sublayer) else tuple(value)
    if len(laws) != depth or not all(isinstance(law, Sublayer) for law in laws):
        raise ValueError(f"sublayers must be one law of a sublayer's Jacobian, or one for each of the {depth} layers")
    return laws
