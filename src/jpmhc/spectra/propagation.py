r"""Signal propagation: the variance of the activations in each layer, which gives the noise of the layer's Jacobian.

A layer maps $x \mapsto A x + \phi(W x + b)$ on $n$ streams of $p$ features. In the limit of many features the
pre-activations are Gaussian of some variance $q$, and the layer's Jacobian $A + D W$ has noise of variance
$\sigma^2 = \sigma_w^2 \psi(q)$.

Here A is the skip, entries of W have variance $\sigma_w^2$ over its width, and $\psi$, $\kappa$ and $\varphi$ are the
moments of the activation $\phi$ (`Activation`).

A hyper-connected layer with a norm has a sublayer $F(u) = W_2\,\phi(W_1 u)$, or gated, $W_2(\phi(W_1 u) \odot W_3 u)$.
A norm before the sublayer fixes the mean square of the sublayer's input, and divides the sublayer's Jacobian by the
root mean square of the norm's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.spectra.activations import Activation, get_activation
from jpmhc.spectra.arguments import to_layer_numbers, to_read_and_write, to_skips
from jpmhc.spectra.sublayers import HiddenLayer, gated, two_matrix

Numbers = Tensor | Sequence
FORMS = ("mean_field", "isotropic", "paper")


@dataclass(frozen=True, eq=False)
class Propagation:
    r"""Variances of the signal in every layer, and the resulting noise variances of the layers' Jacobians.

    Attributes:
        q: Variance of the pre-activations. [L]
        v: Mean square of the streams before layer 1, after layer 1, …, after layer L. [L + 1]
        e: Mean square slope $\psi(q)$. [L]
        variance: Noise variance of the Jacobian, $\sigma_w^2 \psi(q)$, as `Network` takes it. [L]

    >>> signals = propagate("tanh", torch.eye(2).repeat(3, 1, 1), weight_scale=0.5)
    >>> signals.variance.shape
    torch.Size([3])
    """

    q: Tensor
    v: Tensor
    e: Tensor
    variance: Tensor


def propagate(
    activation: str | Activation,
    skips: Tensor,
    weight_scale: Tensor | Sequence[float] | float,
    input_variance: float | Tensor = 1.0,
    *,
    depth: int | None = None,
    bias_scale: float = 0.0,
    read: Tensor | None = None,
    write: Tensor | None = None,
    form: str = "mean_field",
) -> Propagation:
    r"""Compute the second moments of a signal in all layers (appendix "Signal Propagation").

    The recursion has three forms:

    - `mean_field` follows the streams' second moments $C$ [n, n] and means $m$ [n], which is exact in the limit of many
      features: $q = \sigma_w^2 \mathrm{tr}\,C + \sigma_b^2$ and
      $C \leftarrow A C A^\top + \kappa I + \varphi^2 (1 1^\top - I)$ $+ \varphi (A m 1^\top + 1 m^\top A^\top)$;
    - `isotropic` follows only the mean square, $v \leftarrow \kappa(q) + \|A\|_F^2/n \cdot v$. It equals `mean_field`
      if $C$ stays a multiple of the identity and the mean output $\varphi$ is zero (orthogonal skips with an odd
      activation);
    - `paper` is eqs. q_recursion, e_recursion and v_recursion as printed: it adds the slope's moment to the variance,
      $q = \sigma_w^2 (v + e)$, and divides $\|A\|_F^2$ by the features p of a stream, not by all np coordinates.

    With `read` and `write` the sublayer acts on one stream, as in the hyper-connection block: $q = \sigma_w^2
    h_\text{read}^\top C h_\text{read} + \sigma_b^2$, and the output is written along $h_\text{write}$.

    Note:
        For $A = A_n \otimes I_p$ the paper's gain $\|A\|_F^2/p$ is $\|A_n\|_F^2$, n for an orthogonal skip; the gain
        per coordinate is $\|A_n\|_F^2 / n$, one for an orthogonal skip. With one stream the two are the same.

    Args:
        activation: A name in `ACTIVATIONS`, or an `Activation`.
        skips: The mixing matrices, [L, n, n], or one [n, n] for `depth` layers.
        weight_scale: $\sigma_w$, one number or one per layer: entries of $W$ have variance $\sigma_w^2$ divided by the
            width of $W$.
        input_variance: The mean square of each stream at the input, for independent streams; or the second moments of
            the streams [n, n], with equal entries for streams that start as copies.
        depth: The number of layers if `skips` is one matrix.
        bias_scale: $\sigma_b$.
        read: The weight of each stream in the sublayer's input. [L, n] or [n]
        write: The weight of the sublayer's output in each stream. [L, n] or [n]
        form: One of `FORMS`.

    >>> signals = propagate("tanh", torch.eye(2).repeat(3, 1, 1), weight_scale=0.5)
    >>> bool((signals.q.diff() > 0).all())
    True
    """
    activation = get_activation(activation)
    skips = to_skips(skips, depth=depth)
    scale = to_layer_numbers(weight_scale, "weight_scale", skips)
    read, write = to_read_and_write(read, write, skips)
    bias = checks.non_negative_number(bias_scale, "bias_scale")
    second = _input_moments(input_variance, skips)  # [n, n]
    checks.choice(form, FORMS, "form of signal propagation")
    if form != "mean_field" and read is not None:
        raise ValueError(f"the {form!r} recursion cannot take read and write vectors; use form='mean_field'")
    if form == "paper" and bias:
        raise ValueError("the paper's recursion has no bias; use form='mean_field' or bias_scale=0")
    if form == "mean_field":
        q, v = _mean_field_recursion(activation, skips, scale, second, bias, read, write)
    else:
        q, v = _mean_square_recursion(activation, skips, scale, second, bias, form == "paper")
    e = torch.stack([activation.psi(variance) for variance in q])  # eq. e_recursion
    return Propagation(q, v, e, scale.square() * e)


def draw_slopes(activation: str | Activation, propagation: Propagation, width: int, paths: int) -> Tensor | None:
    r"""Draw squared slopes $\phi'(\sqrt{q_l} Z)^2$, scaled to mean one, for paths through all layers. [paths, L, width]

    Z is standard normal, and $q_l$ is the variance of layer l's pre-activations. The slopes are quasi-random and the
    same in every call. The result is None if all slopes are equal or if there is only one path.
    """
    depth = len(propagation.q)
    if paths == 1:
        return None
    sobol = torch.quasirandom.SobolEngine(depth * width, scramble=True, seed=0)
    z = torch.special.ndtri(sobol.draw(paths, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)).to(propagation.q.device)
    squares = (
        get_activation(activation).derivative(propagation.q.sqrt().unsqueeze(-1) * z.view(paths, depth, width)).square()
    )
    mean = squares.mean((0, 2), keepdim=True)
    return None if bool((squares == squares[:1, :, :1]).all() or (mean == 0).any()) else squares / mean


def _mean_field_recursion(
    activation: Activation,
    skips: Tensor,
    scale: Tensor,
    second: Tensor,
    bias: float,
    read: Tensor | None,
    write: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `Propagation`'s q [L] and v [L + 1], from the recursion of the streams' second moments and means."""
    mean = torch.zeros_like(second[0])
    ones, eye = torch.ones_like(mean), torch.eye(len(mean), dtype=torch.float64, device=mean.device)
    qs, vs = [], [second.diagonal().mean()]
    for layer, skip in enumerate(skips):
        inner = vs[-1] if read is None else read[layer] @ second @ read[layer]
        q = scale[layer].square() * inner + bias**2
        kappa, phi = activation.kappa(q), activation.phi(q)
        if write is not None:
            target = write[layer]
            output = kappa * torch.outer(target, target)
        else:
            # Pre-activations of different streams are independent, so that the streams' outputs correlate only by
            # their means.
            target = ones
            output = kappa * eye + phi.square() * (torch.outer(ones, ones) - eye)
        mean = skip @ mean
        cross = phi * torch.outer(mean, target)
        second = skip @ second @ skip.T + output + cross + cross.T
        mean = mean + phi * target
        qs.append(q)
        vs.append(second.diagonal().mean())
    return torch.stack(qs), torch.stack(vs)


def _mean_square_recursion(
    activation: Activation, skips: Tensor, scale: Tensor, second: Tensor, bias: float, as_printed: bool
) -> tuple[Tensor, Tensor]:
    """Return `Propagation`'s q [L] and v [L + 1], from the recursion of the streams' mean square.

    `as_printed` adds the mean squared slope to v and divides the squared norm of A ⊗ I_p by p, as the paper does.
    """
    qs, vs = [], [second.diagonal().mean()]
    coordinates = 1 if as_printed else skips.shape[-1]
    slope = activation.psi(scale[0].square() * vs[0]) if as_printed else 0.0
    for layer, skip in enumerate(skips):
        qs.append(scale[layer].square() * (vs[-1] + slope) + bias**2)  # eq. q_recursion
        slope = activation.psi(qs[-1]) if as_printed else 0.0  # eq. e_recursion
        vs.append(activation.kappa(qs[-1]) + skip.square().sum() / coordinates * vs[-1])  # eq. v_recursion
    return torch.stack(qs), torch.stack(vs)


def _input_moments(input_variance: float | Tensor, skips: Tensor) -> Tensor:
    """Return the streams' second moments at the input. [n, n]"""
    n = skips.shape[-1]
    second = checks.real_tensor(input_variance, "input_variance").to(skips.device)
    if second.ndim == 0:
        second = second * torch.eye(n, dtype=torch.float64, device=skips.device)
    if second.shape != (n, n) or bool((second.diagonal() < 0).any()):
        raise ValueError(
            f"input_variance must be one number or the streams' second moments [{n}, {n}] and must not be negative"
        )
    return second


@dataclass(frozen=True)
class MLP:
    r"""A sublayer $F(u) = W_2\,\phi(W_1 u)$ with random weights, or gated, $F(u) = W_2\,(\phi(W_1 u) \odot W_3 u)$.

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


class Layers(NamedTuple):
    """Arguments of `Network` for layers with norms: skips, write vectors and noise variances include the norms."""

    skips: Tensor
    variance: Tensor
    read: Tensor
    write: Tensor
    sublayers: tuple[HiddenLayer, ...]


def follow_prenorm(
    skips: Numbers, read: Numbers, write: Numbers, mlp: MLP | None, start_variance: float, depth: int | None
) -> Layers:
    r"""Return the layers $x \leftarrow H x + w \otimes F(u / \mathrm{rms}(u))$ with $u = r^\top x$.

    The streams' second moments are $C \leftarrow H C H^\top + \kappa\, w w^\top$ from $C = v_0 1 1^\top$, with the mean
    square $\kappa$ of F's output and `start_variance` $v_0$. The noise variance is the mean squared singular value of
    F's Jacobian, divided by $r^\top C r$. H is `skips`, r is `read`, w is `write` and F is `mlp`.
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

    The layer's skip is $R^{-1} H$ and its write vector is $R^{-1} w$, for $R^2 = \mathrm{diag}(H C H^\top + \kappa\, w
    w^\top)$ with the second moments C of the streams and the mean square $\kappa$ of F's output. The arguments are as
    in `follow_prenorm`.
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
            "writes or skips so that every read and every stream has a signal"
        )
    return values
