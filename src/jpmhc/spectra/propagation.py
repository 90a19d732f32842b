r"""Signal propagation: how strong the activations are in each layer, and so how much noise its Jacobian carries.

A layer maps $x \mapsto A x + \phi(W x + b)$ on $n$ streams of $p$ features. In the limit of many features the
pre-activations are Gaussian of some variance $q$, and the layer's Jacobian $A + D W$ has noise of variance
$\sigma^2 = \sigma_w^2 \psi(q)$.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.spectra.activations import Activation, get_activation
from jpmhc.spectra.arguments import not_negative, real, vectors, whole

FORMS = ("mean_field", "isotropic", "paper")


@dataclass(frozen=True, eq=False)
class Propagation:
    r"""The operating point of every layer.

    Attributes:
        q: Variance of the pre-activations. [L]
        v: Mean square of the streams before layer 1, after layer 1, …, after layer L. [L + 1]
        e: Mean square slope $\psi(q)$. [L]
        variance: Noise variance of the Jacobian, $\sigma_w^2 \psi(q)$, as `Network` takes it. [L]
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
    r"""Follow the second moments of a signal through the layers (appendix "Signal Propagation").

    Three forms of the recursion:

    - `mean_field` follows the streams' second moments $C$ [n, n] and means $m$ [n], which is exact in the limit of many
      features: $q = \sigma_w^2 \mathrm{tr}\,C + \sigma_b^2$ and
      $C \leftarrow A C A^\top + \kappa I + \varphi^2 (1 1^\top - I) + \varphi (A m 1^\top + 1 m^\top A^\top)$;
    - `isotropic` keeps the trace alone, $v \leftarrow \kappa(q) + \|A\|_F^2/n \cdot v$: the same where $C$ stays a
      multiple of the identity and the mean output $\varphi$ is zero (orthogonal skips with an odd activation);
    - `paper` is eqs. q_recursion, e_recursion and v_recursion as printed: it adds the slope's moment to the variance,
      $q = \sigma_w^2 (v + e)$, with the skip gain $\|A\|_F^2/n$ per coordinate.

    With `read` and `write` the sublayer acts on one stream, the true hyper-connection block: $q = \sigma_w^2
    h_\text{read}^\top C h_\text{read} + \sigma_b^2$ and the output is written along $h_\text{write}$.

    Note:
        The paper divides $\|A\|_F^2$ by $p$; for $A = A_n \otimes I_p$ that is $\|A_n\|_F^2$, and the gain per
        coordinate is $\|A_n\|_F^2 / n$, one for an orthogonal skip.

    Args:
        activation: A name in `ACTIVATIONS`, or an `Activation`.
        skips: The mixing matrices, [L, n, n], or one [n, n] for `depth` layers.
        weight_scale: $\sigma_w$, shared or per layer: entries of $W$ have variance $\sigma_w^2$ over its width.
        input_variance: The mean square of each stream at the input, streams independent; or their second moments
            [n, n] (all equal for streams that start as copies).
        depth: How many layers, when `skips` is one matrix.
        bias_scale: $\sigma_b$.
        read: What each stream contributes to the sublayer's input. [L, n] or [n]
        write: What each stream receives of the sublayer's output. [L, n] or [n]
        form: One of `FORMS`.
    """
    activation = get_activation(activation)
    skips, scale = _layers(skips, weight_scale, depth)
    layers, n, _ = skips.shape
    if form not in FORMS:
        raise ValueError(f"no form of signal propagation is called {form!r}; choose one of {', '.join(FORMS)}")
    if (read is None) != (write is None):
        raise ValueError("give both read and write vectors (the hyper-connection block) or neither (isotropic noise)")
    if form != "mean_field" and read is not None:
        raise ValueError(f"the {form!r} recursion knows isotropic noise only; with read and write use 'mean_field'")
    if form == "paper" and bias_scale:
        raise ValueError("the paper's recursion has no bias; use form='mean_field' or bias_scale=0")
    bias_scale = not_negative(bias_scale, "bias_scale")
    second = _input_moments(input_variance, n, skips.device)  # [n, n]
    if read is not None and write is not None:
        read = vectors(read, "read", (layers, n), skips.device)
        write = vectors(write, "write", (layers, n), skips.device)
    mean = torch.zeros(n, dtype=torch.float64, device=skips.device)
    v = second.diagonal().mean()
    slope = activation.psi(scale[0].square() * v)  # e⁰ of the paper's form
    ones, eye = torch.ones_like(mean), torch.eye(n, dtype=torch.float64, device=skips.device)
    qs, vs, es = [], [v], []
    for layer in range(layers):
        skip, gain = skips[layer], scale[layer].square()
        if form == "paper":
            q = gain * (v + slope)  # eq. q_recursion
        elif read is not None:
            q = gain * (read[layer] @ second @ read[layer]) + bias_scale**2
        else:
            q = gain * v + bias_scale**2
        slope = activation.psi(q)  # eq. e_recursion
        kappa = activation.kappa(q)
        if form == "mean_field":
            phi = activation.phi(q)
            if write is not None:
                target = write[layer]
                output = kappa * torch.outer(target, target)
            else:
                # Different streams see independent pre-activations, so that only their means multiply.
                target = ones
                output = kappa * eye + phi.square() * (torch.outer(ones, ones) - eye)
            mean = skip @ mean
            cross = phi * torch.outer(mean, target)
            second = skip @ second @ skip.T + output + cross + cross.T
            mean = mean + phi * target
            v = second.diagonal().mean()
        else:
            v = kappa + skip.square().sum() / n * v  # eq. v_recursion
        qs.append(q)
        es.append(slope)
        vs.append(v)
    e = torch.stack(es)
    return Propagation(torch.stack(qs), torch.stack(vs), e, scale.square() * e)


def _layers(skips: Tensor, weight_scale: Tensor | Sequence[float] | float, depth: int | None) -> tuple[Tensor, Tensor]:
    """Skips [L, n, n] and weight scales [L], or one sentence about what is wrong with them."""
    skips = real(skips, "skips")
    if skips.ndim == 2:
        if depth is None:
            raise ValueError("one skip matrix needs a depth; or give one matrix per layer [L, n, n]")
        skips = skips.expand(whole(depth, "depth"), *skips.shape)
    elif depth is not None and skips.ndim == 3 and depth != len(skips):
        raise ValueError(f"depth {depth} contradicts the {len(skips)} skip matrices given")
    if skips.ndim != 3 or skips.shape[-1] != skips.shape[-2] or 0 in skips.shape:
        raise ValueError(f"skips must be square matrices, one per layer [L, n, n], not of shape {list(skips.shape)}")
    scale = real(weight_scale, "weight_scale").to(skips.device)
    if scale.ndim > 1 or (scale.ndim == 1 and len(scale) != len(skips)):
        raise ValueError(
            f"weight_scale must be one number or one per layer [{len(skips)}], not of shape {list(scale.shape)}"
        )
    if bool((scale < 0).any()):
        raise ValueError("weight_scale must not be negative")
    return skips, scale.expand(len(skips))


def _input_moments(input_variance: float | Tensor, n: int, device: torch.device) -> Tensor:
    """The streams' second moments at the input. [n, n]"""
    second = real(input_variance, "input_variance").to(device)
    if second.ndim == 0:
        second = second * torch.eye(n, dtype=torch.float64, device=device)
    if second.shape != (n, n):
        raise ValueError(
            f"input_variance must be one number or the streams' second moments [{n}, {n}], not {list(second.shape)}"
        )
    if bool((second.diagonal() < 0).any()):
        raise ValueError("input_variance must not be negative")
    return second
