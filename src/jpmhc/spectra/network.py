r"""What is asked: a stack of twisted skips with Gaussian noise, $Y_l = A_l \otimes I_p + \sigma_l W_l$."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation
from jpmhc.spectra.activations import Activation
from jpmhc.spectra.arguments import real, vectors, whole
from jpmhc.spectra.propagation import propagate


def _identity(n: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.eye(n, dtype=torch.float64).expand(*shape, n, n)


def _gaussian(n: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, n, n, dtype=torch.float64, generator=generator) / n**0.5


def _permutation(n: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # n + 2 permutations: the identity, the transpositions and the shifts, as the paper's 6 for 4 streams
    return permutation.sample(n, min(n + 2, math.factorial(n)), shape, generator=generator)


SKIPS: dict[str, Callable[[int, tuple[int, ...], torch.Generator], Tensor]] = {
    "identity": _identity,
    "bistochastic": lambda n, shape, generator: birkhoff.sample(n, shape, generator=generator),
    "orthogonal": lambda n, shape, generator: orthogonal.sample(n, shape, generator=generator),
    "gaussian": _gaussian,
    "grassmann": lambda n, shape, generator: grassmann.sample(n, None, shape, generator=generator),
    "permutation": _permutation,
}
_MIXER_SKIPS = {"sinkhorn": "bistochastic", "cayley": "orthogonal", "unconstrained": "gaussian"}
_FROM_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "unconstrained": lambda logits: logits,
    "sinkhorn": birkhoff.project,
    "cayley": orthogonal.project,
    "grassmann": grassmann.project,
}


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
        skips = real(skips, "skips")
        if skips.ndim != 3 or skips.shape[-1] != skips.shape[-2]:
            raise ValueError(
                f"skips must be square matrices, one per layer [L, n, n], not of shape {list(skips.shape)}"
            )
        depth, n, _ = skips.shape
        if depth == 0 or n == 0:
            raise ValueError("a network needs at least one layer and one stream (skips [L, n, n] with L, n >= 1)")
        variance = real(variance, "variance").to(skips.device)
        if variance.ndim == 0:
            variance = variance.expand(depth).clone()
        if variance.shape != (depth,):
            raise ValueError(
                f"variance must be one number or one per layer [{depth}], not of shape {list(variance.shape)}"
            )
        if (variance < 0).any():
            raise ValueError(f"the noise variance must not be negative, and {variance.min().item():g} is")
        if (read is None) != (write is None):
            raise ValueError(
                "give both read and write vectors (the hyper-connection block) or neither (isotropic noise)"
            )
        if read is not None and covariance is not None:
            raise ValueError(
                "give either read and write vectors or a covariance: each of them is the whole noise structure"
            )
        if read is not None and write is not None:
            read = vectors(read, "read", (depth, n), skips.device)
            write = vectors(write, "write", (depth, n), skips.device)
        if covariance is not None:
            covariance = real(covariance, "covariance").to(skips.device)
            if covariance.ndim != 4 or covariance.shape[0] != depth or covariance.shape[-2:] != (n, n):
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
        depth = whole(depth, "depth")
        skip = real(skip, "skip")
        if skip.ndim != 2:
            raise ValueError(f"skip must be one square matrix [n, n], not of shape {list(skip.shape)}")
        if covariance is not None:
            covariance = real(covariance, "covariance")
            if covariance.ndim != 3:
                raise ValueError(f"covariance must be one layer's [K, n, n], not of shape {list(covariance.shape)}")
            covariance = covariance.expand(depth, -1, -1, -1)
        return cls(skip.expand(depth, -1, -1), variance, read, write, covariance)

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
        kind = _MIXER_SKIPS.get(mixer, mixer) if isinstance(mixer, str) else None
        if kind not in SKIPS:
            raise ValueError(f"no random skip is called {mixer!r}; choose one of {', '.join([*SKIPS, *_MIXER_SKIPS])}")
        if rank is not None and kind != "grassmann":
            raise ValueError(f"rank is the dimension of a grassmann skip's subspace; a {mixer} skip has none")
        depth, streams = whole(depth, "depth"), whole(streams, "streams")
        generator = torch.Generator().manual_seed(whole(seed, "seed", 0))
        shape = (1,) if shared else (depth,)
        if rank is not None:
            skips = grassmann.sample(streams, whole(rank, "rank"), shape, generator=generator)
        else:
            skips = SKIPS[kind](streams, shape, generator)
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
        logits = real(logits, "logits")
        if (basis is None) == (mixer == "permutation"):
            raise ValueError("the mixer 'permutation' needs the basis [K, n] it mixes, and no other mixer takes one")
        if mixer == "permutation":
            assert basis is not None
            skips = permutation.mix(logits, basis)
        elif mixer in _FROM_LOGITS:
            skips = _FROM_LOGITS[mixer](logits)
        else:
            raise ValueError(
                f"no mixer from logits is called {mixer!r}; choose one of {', '.join(_FROM_LOGITS)}, permutation"
            )
        return cls(skips, variance, read, write)

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
        if not layers or not all(isinstance(layer, tuple | list) and len(layer) == 3 for layer in layers):
            raise ValueError("coefficients must be a list of (read, write, skip), one for each layer and at least one")
        parts = [tuple(real(part, "coefficients") for part in layer) for layer in layers]
        for number, (read, write, skip) in enumerate(parts, 1):
            if skip.ndim != 2 or read.ndim != 1 or write.ndim != 1:
                raise ValueError(
                    f"layer {number}: coefficients of one token are needed, a skip [n, n] and vectors [n], not shapes "
                    f"{list(skip.shape)}, {list(read.shape)}, {list(write.shape)}; choose a token by indexing"
                )
        if len({tuple(part.shape for part in layer) for layer in parts}) > 1:
            raise ValueError("the layers' coefficients must have one number of streams")
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
        skips = real(skips, "skips")
        found = propagate(
            activation,
            skips,
            weight_scale,
            input_variance,
            depth=depth,
            bias_scale=bias_scale,
            read=read,
            write=write,
            form=form,
        )
        return cls(skips if skips.ndim == 3 else skips.expand(len(found.variance), -1, -1), found.variance, read, write)

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
        """The same network with its tensors on a device."""
        try:
            target = torch.device(device)
        except RuntimeError:
            raise ValueError(f"no device is called {device!r}; use cpu or cuda") from None
        if target.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device is available; use the cpu")
        moved = {
            name: value.to(target)
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
