r"""Signal propagation through hyper-connected layers with norms, which turns trained blocks into layers of the theory.

A sublayer is $F(u) = W_2\,\phi(W_1 u)$, or gated, $W_2(\phi(W_1 u) \odot W_3 u)$. A norm before the sublayer fixes the
mean square of the sublayer's input, and divides the sublayer's Jacobian by the root mean square of the norm's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.spectra.activations import Activation, get_activation
from jpmhc.spectra.arguments import to_read_and_write, to_skips
from jpmhc.spectra.sublayers import HiddenLayer, gated, two_matrix

Numbers = Tensor | Sequence


@dataclass(frozen=True)
class MLP:
    r"""A two-matrix sublayer with random weights.

    Attributes:
        activation: $\phi$, a name in `ACTIVATIONS` or an `Activation`.
        scales: $s_1$ and $s_2$: entries of $W_1$ (and $W_3$) have variance $s_1$ divided by the number of columns,
            entries of $W_2$ have $s_2$ divided by the number of columns. PyTorch's default for `nn.Linear` is 1/3.
        ratio: The number of hidden features divided by the number of features.
        gated: Whether $\phi(W_1 u)$ is multiplied by $W_3 u$, as in SwiGLU.

    >>> mlp = MLP("relu", ratio=4.0)
    >>> round(mlp.output_variance(1.0), 3)
    0.5
    """

    activation: str | Activation = "gelu"
    scales: tuple[float, float] = (1.0, 1.0)
    ratio: float = 4.0
    gated: bool = False

    def law(self, input_variance: float) -> HiddenLayer:
        """Return the law of the sublayer's Jacobian at inputs of a given mean square."""
        make = gated if self.gated else two_matrix
        return make(self.activation, input_variance, scales=self.scales, ratio=self.ratio)

    def output_variance(self, input_variance: float) -> float:
        """Return the mean square of the sublayer's output at inputs of a given mean square."""
        inner = self.scales[0] * input_variance
        output = self.scales[1] * float(get_activation(self.activation).kappa(inner))
        return output * inner if self.gated else output


@dataclass(frozen=True, eq=False)
class Layers:
    """Layers whose skips, writes and noise variances include the norms: the arguments of `Network`.

    Attributes:
        skips: The skips. [L, n, n]
        variance: Mean squared singular values of the sublayers' Jacobians, including a norm before them. [L]
        read: The read vectors. [L, n]
        write: The write vectors. [L, n]
        sublayers: The laws of the sublayers' Jacobians, one per layer.
    """

    skips: Tensor
    variance: Tensor
    read: Tensor
    write: Tensor
    sublayers: tuple[HiddenLayer, ...]


def follow_prenorm(
    skips: Numbers, read: Numbers, write: Numbers, mlp: MLP | None, start_variance: float, depth: int | None
) -> Layers:
    r"""Return the layers $x \leftarrow H x + w \otimes F(u / \mathrm{rms}(u))$ with $u = r^\top x$.

    The streams' second moments are $C \leftarrow H C H^\top + \kappa\, w w^\top$ from $C = v_0 1 1^\top$. The noise
    variance is the sublayer's own variance divided by $r^\top C r$.
    """
    skips, read, write, mlp, second = _check(skips, read, write, mlp, start_variance, depth)
    law, kappa = mlp.law(1.0), mlp.output_variance(1.0)
    variance = []
    for skip, r, w in zip(skips, read, write):
        variance.append(law.variance / (r @ second @ r))
        second = skip @ second @ skip.T + kappa * torch.outer(w, w)
    return Layers(skips, _require_signal(torch.stack(variance)), read, write, (law,) * len(skips))


def follow_postnorm(
    skips: Numbers, read: Numbers, write: Numbers, mlp: MLP | None, start_variance: float, depth: int | None
) -> Layers:
    r"""Return the layers $x \leftarrow \mathrm{norm}(H x + w \otimes F(r^\top x))$ with a norm of each stream.

    With $R^2 = \mathrm{diag}(H C H^\top + \kappa\, w w^\top)$ for second moments C of the streams, the layer's skip is
    $R^{-1} H$ and its write vector is $R^{-1} w$.
    """
    skips, read, write, mlp, second = _check(skips, read, write, mlp, start_variance, depth)
    new_skips, new_write, laws = [], [], []
    for skip, r, w in zip(skips, read, write):
        power = float(_require_signal(r @ second @ r))
        laws.append(mlp.law(power))
        second = skip @ second @ skip.T + mlp.output_variance(power) * torch.outer(w, w)
        size = _require_signal(second.diagonal()).sqrt()
        new_skips.append(skip / size.unsqueeze(-1))
        new_write.append(w / size)
        second = second / torch.outer(size, size)
    variance = skips.new_tensor([law.variance for law in laws])
    return Layers(torch.stack(new_skips), variance, read, torch.stack(new_write), tuple(laws))


def _check(
    skips: Numbers, read: Numbers, write: Numbers, mlp: MLP | None, start_variance: float, depth: int | None
) -> tuple[Tensor, Tensor, Tensor, MLP, Tensor]:
    """Return skips [L, n, n], reads and writes [L, n], the sublayer, and the second moments of the input [n, n]."""
    skips = to_skips(skips, depth=depth)
    reads, writes = to_read_and_write(read, write, skips)
    if reads is None or writes is None:
        raise ValueError("a layer with a norm needs read and write vectors")
    mlp = MLP() if mlp is None else mlp
    if not isinstance(mlp, MLP):
        raise ValueError(f"the sublayer must be a spectra.MLP, such as MLP('gelu', ratio=4.0), not {mlp!r}")
    start = checks.positive_number(start_variance, "start_variance") * torch.ones_like(skips[0])
    return skips, reads, writes, mlp, start


def _require_signal(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all() and (values > 0).all()):
        raise ValueError(
            "a norm divides by zero: a layer's read, or a stream after its write, has no signal; change the reads, "
            "writes or skips so that every read and every stream keeps some"
        )
    return values
