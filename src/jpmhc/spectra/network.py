r"""What is asked: a stack of twisted skips with Gaussian noise, $Y_l = A_l \otimes I_p + \sigma_l W_l$."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.checks import require_choice, to_layer_numbers, to_read_and_write, to_real_tensor, to_skips, to_whole_number
from jpmhc.spectra.activations import Activation
from jpmhc.spectra.propagation import propagate
from jpmhc.spectra.random_skips import sample_skips, skips_from_logits


@dataclass(frozen=True, eq=False)
class Network:
    r"""The layers of a Jacobian $J = Y_L \cdots Y_1$ in the limit of infinitely many features per stream.

    Three structures of noise, $X$ being a real Gaussian $p \times p$ matrix of entry variance $1/p$:

    - isotropic (neither `read` and `write` nor `covariance`): every entry of the $np \times np$ matrix $W_l$ is
      independent with variance $1/(np)$ (eq. jacobian-kronecker);
    - the hyper-connection block (`read` and `write`): $W_l = h_\text{write} h_\text{read}^\top \otimes X$;
    - general (`covariance`): $W_l = \sum_k B_{lk} \otimes X_k$ with independent $X_k$. Its self-energies are the
      completely positive maps $\sigma_l^2 \sum_k B_{lk} M B_{lk}^\top$ and $\sigma_l^2 \sum_k B_{lk}^\top M B_{lk}$ of
      $M$; every completely positive covariance is of this form with at most $n^2$ terms.

    Attributes:
        skips: The mixing matrices $A_l$, first layer first. [L, n, n]
        variance: The noise variance $\sigma_l^2$; a number stands for all layers. [L]
        read: What each stream contributes to the sublayer's input. [L, n]
        write: What each stream receives of the sublayer's output. [L, n]
        covariance: The matrices $B_{lk}$ of the general noise. [L, K, n, n]
    """

    skips: Tensor
    variance: Tensor
    read: Tensor | None = None
    write: Tensor | None = None
    covariance: Tensor | None = None

    def __init__(
        self,
        skips: Tensor | Sequence,
        variance: Tensor | Sequence[float] | float,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        covariance: Tensor | Sequence | None = None,
    ) -> None:
        skips = to_skips(skips)
        variance = to_layer_numbers(variance, "variance", skips)
        if read is not None and covariance is not None:
            raise ValueError(
                "give either read and write vectors or a covariance: each of them is the whole noise structure"
            )
        read, write = to_read_and_write(read, write, skips)
        if covariance is not None:
            covariance = to_real_tensor(covariance, "covariance").to(skips.device)
            if covariance.ndim != 4 or covariance.shape[:1] + covariance.shape[2:] != skips.shape:
                depth, n, _ = skips.shape
                raise ValueError(
                    f"covariance must be [L, K, n, n] = [{depth}, K, {n}, {n}], not {list(covariance.shape)}"
                )
        fields = {"skips": skips, "variance": variance, "read": read, "write": write, "covariance": covariance}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def repeated(
        cls,
        skip: Tensor | Sequence,
        variance: float,
        depth: int,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        covariance: Tensor | Sequence | None = None,
    ) -> Network:
        """The same layer `depth` times: skip [n, n], read and write [n], covariance [K, n, n]."""
        skips = to_skips(skip, "skip", to_whole_number(depth, "depth"))
        if covariance is not None:
            covariance = to_real_tensor(covariance, "covariance")
            covariance = covariance.expand(len(skips), *covariance.shape)
        return cls(skips, variance, read, write, covariance)

    @classmethod
    def from_mixer(
        cls,
        mixer: str,
        depth: int,
        variance: Tensor | Sequence[float] | float,
        streams: int = 4,
        seed: int = 0,
        *,
        shared: bool = False,
        rank: int | None = None,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
    ) -> Network:
        """Random skips of a kind, different in each layer or `shared` by all.

        Args:
            mixer: One of `SKIPS`: "identity", "bistochastic" (converged Sinkhorn of normal logits), "orthogonal"
                (Haar), "gaussian" (entries of variance 1/n), "grassmann" (projector onto a random subspace),
                "permutation" (random mixture of the paper's permutations); or a mixer's name: "sinkhorn" is
                bistochastic, "cayley" orthogonal, "unconstrained" gaussian.
            rank: The subspace's dimension for "grassmann", half the streams by default.
        """
        depth, streams = to_whole_number(depth, "depth"), to_whole_number(streams, "streams")
        skips = sample_skips(mixer, 1 if shared else depth, streams, to_whole_number(seed, "seed", 0), rank)
        return cls(skips.expand(depth, -1, -1), variance, read, write)

    @classmethod
    def from_logits(
        cls,
        mixer: str,
        logits: Tensor,
        variance: Tensor | Sequence[float] | float,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        *,
        basis: Tensor | None = None,
    ) -> Network:
        """Skips that a mixer makes of its logits, one set per layer: [L, n, n], frames [L, n, p] or weights [L, K].

        Args:
            mixer: "unconstrained" (the logits are the skips), "sinkhorn", "cayley", "grassmann" (the projector onto the
                frame's span) or "permutation".
            basis: The permutations [K, n] that "permutation" mixes.
        """
        return cls(skips_from_logits(mixer, logits, basis), variance, read, write)

    @classmethod
    def from_coefficients(
        cls, layers: Iterable[tuple[Tensor, Tensor, Tensor]], variance: Tensor | Sequence[float] | float
    ) -> Network:
        """The network a trained stack is at one token: what `block.coefficients(x)` gives, layer by layer.

        Args:
            layers: For each layer the read vector [n], the write vector [n] and the skip [n, n], in that order.
            variance: The noise variance of the sublayers' Jacobians: the mean square of their singular values.
        """
        layers = list(layers) if isinstance(layers, Iterable) else []
        parts = [tuple(to_real_tensor(part, "coefficients") for part in layer) for layer in layers]
        n = parts[0][0].shape[-1] if parts and parts[0] and parts[0][0].ndim else 0
        if n == 0 or any([tuple(part.shape) for part in layer] != [(n,), (n,), (n, n)] for layer in parts):
            raise ValueError(
                "coefficients must be a list of (read, write, skip) with one number of streams, of one token: vectors "
                "[n], [n] and a matrix [n, n] for each layer; choose a token by indexing"
            )
        reads, writes, skips = (torch.stack([layer[part].cpu() for layer in parts]) for part in range(3))
        return cls(skips, variance, reads, writes)

    @classmethod
    def from_activation(
        cls,
        skips: Tensor,
        activation: str | Activation,
        weight_scale: Tensor | Sequence[float] | float,
        input_variance: float | Tensor = 1.0,
        *,
        depth: int | None = None,
        bias_scale: float = 0.0,
        read: Tensor | None = None,
        write: Tensor | None = None,
        form: str = "mean_field",
    ) -> Network:
        """The linearisation of a nonlinear network: its noise variance comes from `propagation.propagate`."""
        skips = to_skips(skips, depth=depth)
        found = propagate(
            activation,
            skips,
            weight_scale,
            input_variance,
            bias_scale=bias_scale,
            read=read,
            write=write,
            form=form,
        )
        return cls(skips, found.variance, read, write)

    @property
    def depth(self) -> int:
        """How many layers, L."""
        return self.skips.shape[0]

    @property
    def streams(self) -> int:
        """How many streams, n (the paper's q)."""
        return self.skips.shape[-1]

    @property
    def isotropic(self) -> bool:
        """Whether the noise is the same in every direction."""
        return self.read is None and self.covariance is None

    @property
    def identical(self) -> bool:
        """Whether all layers are the same."""
        fields = (self.skips, self.variance, self.read, self.write, self.covariance)
        return all(bool((field == field[:1]).all()) for field in fields if field is not None)

    def to(self, device: torch.device | str) -> Network:
        """Return the same network with its tensors on a device, "cpu" or "cuda"."""
        names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        require_choice(str(device).split(":")[0], "available device", names)
        moved = {
            name: value.to(device)
            for name in ("skips", "variance", "read", "write", "covariance")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def gains(self) -> Tensor:
        r"""By what factor each layer multiplies the mean squared singular value; their product is its exact value.

        The trace of $M \leftarrow A_l M A_l^\top + \sigma_l^2 \sum_k B_{lk} M B_{lk}^\top$ from $M = I$, by layers. [L]
        """
        factors = self.noise_factors() if not self.isotropic else None
        eye = torch.eye(self.streams, dtype=torch.float64, device=self.skips.device)
        moment, gains = eye / self.streams, []
        for layer, skip in enumerate(self.skips):
            grown = skip @ moment @ skip.T
            if factors is None:
                grown = grown + self.variance[layer] / self.streams * eye
            else:
                grown = grown + (factors[layer] @ moment @ factors[layer].mT).sum(0)
            gain = grown.trace()
            gains.append(gain)
            moment = grown / gain if gain > 0 else moment
        return torch.stack(gains)

    def rescaled(self) -> tuple[Network, float]:
        """The network with every layer's gain divided out, and the squared factor that was: G(z) = G'(z / g) / g."""
        gains = self.gains()
        gains = torch.where(gains > 0, gains, 1.0)
        total = gains.log().sum().item()
        if abs(total) > 690:
            raise ValueError(f"the network multiplies squared lengths by e^{total:.0f}, beyond what a float64 can hold")
        scaled = replace(self, skips=self.skips / gains.sqrt().view(-1, 1, 1), variance=self.variance / gains)
        return scaled, math.exp(total)

    def noise_factors(self) -> Tensor:
        r"""The matrices $\sigma_l B_{lk}$ in $\sigma_l W_l = \sum_k \sigma_l B_{lk} \otimes X_k$, for any structure.

        Isotropic noise is the sum over all $n^2$ matrices $e_i e_j^\top / \sqrt n$.
        """
        n = self.streams
        if self.covariance is not None:
            factors = self.covariance
        elif self.read is not None and self.write is not None:
            factors = (self.write.unsqueeze(-1) * self.read.unsqueeze(-2)).unsqueeze(1)  # [L, 1, n, n]
        else:
            units = torch.eye(n * n, dtype=torch.float64, device=self.skips.device).view(n * n, n, n)
            factors = (units / n**0.5).expand(self.depth, -1, -1, -1)
        return self.variance.sqrt().view(-1, 1, 1, 1) * factors  # [L, K, n, n]


def require_network(network: Network) -> None:
    """Refuse what is no network, such as the matrix of one."""
    if not isinstance(network, Network):
        raise ValueError(
            f"a Network is needed, not a {type(network).__name__}; Network(skips, variance) is one, of skips [L, n, n]"
        )
