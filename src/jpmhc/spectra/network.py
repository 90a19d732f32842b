r"""The description of a network for the theory: layers $Y_l = A_l \otimes I_p + \sigma_l W_l$ with random $W_l$."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks, mixers
from jpmhc.manifolds import grassmann
from jpmhc.spectra.activations import Activation
from jpmhc.spectra.arguments import to_correlations, to_layer_numbers, to_read_and_write, to_skips
from jpmhc.spectra.propagation import MLP, draw_slopes, follow_postnorm, follow_prenorm, propagate
from jpmhc.spectra.sublayers import Sublayer, to_sublayers

ENDS = ("streams", "model")
SKIPS = (*mixers.MIXERS, *mixers.ENSEMBLES)
# A layer maps its whole input to zero if its gain is at most this fraction of the skip's squared norm.
_NOTHING = 1e-30
_ALIVE = 12  # the number of arrays as large as all skips that are in memory at once when a network is solved
_FIELDS = ("skips", "variance", "read", "write", "covariance", "slopes", "tied")


@dataclass(frozen=True, eq=False)
class Network:
    r"""The layers of a Jacobian $J = Y_L \cdots Y_1$ in the limit of infinitely many features per stream.

    There are n streams of p features, and layer l is $Y_l = A_l \otimes I_p + \sigma_l W_l$. The noise has one of three
    structures, in which $X$ is a real Gaussian $p \times p$ matrix of entry variance $1/p$:

    - isotropic (neither `read` and `write` nor `covariance`): every entry of the $np \times np$ matrix $W_l$ is
      independent with variance $1/(np)$ (eq. jacobian-kronecker);
    - the hyper-connection block (`read` and `write`): $W_l = h_\text{write} h_\text{read}^\top \otimes X$;
    - general (`covariance`): $W_l = \sum_k B_{lk} \otimes X_k$ with independent $X_k$. The theory uses only its
      self-energies, the completely positive maps $\sigma_l^2 \sum_k B_{lk} M B_{lk}^\top$ and $\sigma_l^2 \sum_k
      B_{lk}^\top M B_{lk}$ of $M$; every completely positive covariance is of this form with at most $n^2$ terms.

    Attributes:
        skips: The mixing matrices $A_l$, first layer first. [L, n, n]
        variance: The noise variance $\sigma_l^2$, the mean squared singular value of $\sigma_l X$; one number is used
            for all layers; None takes the variances of `sublayers`. [L]
        read: The weight of each stream in the sublayer's input. [L, n]
        write: The weight of the sublayer's output in each stream. [L, n]
        covariance: The matrices $B_{lk}$ of the general noise. [L, K, n, n]
        sublayers: Laws of the sublayers' Jacobians, which replace the Gaussian $X$ of the block: one law for all layers
            or one per layer (`sublayers.py`).
        slopes: The squared slopes of the activation, scaled to mean one, whose roots multiply the noise's rows; drawn
            for K paths through all layers: one per layer and stream, or one per layer for the block. [K, L, n] or [K,
            L, 1]
        tied: Correlations of the layers' noises [L, L], or labels [L]: layers with the same label share their weights.
        ends: "streams" for the Jacobian J of all streams; "model" for the model's own map, T = reduce ∘ J ∘ expand,
            where expand copies the input to all streams and reduce is the mean over streams.

    >>> network = Network.repeated(torch.eye(2), 0.1, 3)
    >>> network.depth, network.streams, round(network.mean_square(), 3)
    (3, 2, 1.331)
    """

    skips: Tensor
    variance: Tensor
    read: Tensor | None = None
    write: Tensor | None = None
    covariance: Tensor | None = None
    sublayers: tuple[Sublayer, ...] | None = None
    slopes: Tensor | None = None
    tied: Tensor | None = None
    ends: str = "streams"

    def __init__(
        self,
        skips: Tensor | Sequence,
        variance: Tensor | Sequence[float] | float | None,
        read: Tensor | Sequence | None = None,
        write: Tensor | Sequence | None = None,
        covariance: Tensor | Sequence | None = None,
        *,
        sublayers: Sublayer | Sequence[Sublayer] | None = None,
        slopes: Tensor | None = None,
        tied: Tensor | Sequence | None = None,
        ends: str = "streams",
    ) -> None:
        skips = to_skips(skips)
        sublayers = to_sublayers(sublayers, len(skips))
        if variance is None and sublayers is not None:
            variance = [law.variance for law in sublayers]
        variance = to_layer_numbers(variance, "variance", skips)  # type: ignore[arg-type]
        if read is not None and covariance is not None:
            raise ValueError(
                "give either read and write vectors or a covariance: each of them is the whole noise structure"
            )
        read, write = to_read_and_write(read, write, skips)
        if covariance is not None:
            covariance = checks.real_tensor(covariance, "covariance").to(skips.device)
            if covariance.ndim != 4 or covariance.shape[:1] + covariance.shape[2:] != skips.shape:
                depth, n, _ = skips.shape
                raise ValueError(f"covariance must be [{depth}, K, {n}, {n}], not {list(covariance.shape)}")
        if sublayers is not None and (read is None or slopes is not None):
            raise ValueError("sublayers need read and write vectors, and cannot be combined with slopes")
        if slopes is not None:
            slopes = checks.real_tensor(slopes, "slopes").to(skips.device)
            width = skips.shape[-1] if read is None else 1
            if covariance is not None or tied is not None or slopes.shape[1:] != (len(skips), width):
                raise ValueError(
                    f"slopes must be [K, L, {width}] = [K, {len(skips)}, {width}], without covariance and tied weights"
                )
        tied = None if tied is None else to_correlations(tied, skips)
        checks.choice(ends, ENDS, "pair of ends")
        tensors = dict(zip(_FIELDS, (skips, variance, read, write, covariance, slopes, tied)))
        for name, value in {**tensors, "sublayers": sublayers, "ends": ends}.items():
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
        """Return a network of `depth` equal layers: skip [n, n], read and write [n], covariance [K, n, n]."""
        skips = to_skips(skip, "skip", checks.whole_number(depth, "depth"))
        if covariance is not None:
            covariance = checks.real_tensor(covariance, "covariance")
            covariance = covariance.expand(len(skips), *covariance.shape)
        return cls(skips, variance, read, write, covariance)

    @classmethod
    def from_mixer(
        cls,
        mixer: str | type[mixers.Mixer],
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
        """Return a network with random skips of a mixer, one skip per layer or one `shared` by all layers.

        Args:
            mixer: A name in `SKIPS` (a mixer, or its random matrices), or a class derived from `Mixer`, also written as
                MODULE:CLASS. The mixer's `sample` draws the skips.
            rank: The dimension of the subspace for "grassmann"; half the number of streams by default.
        """
        depth, streams = checks.whole_number(depth, "depth"), checks.whole_number(streams, "streams")
        count = 1 if shared else depth
        if rank is not None and mixer != "grassmann":
            raise ValueError(f"rank is the dimension of a grassmann skip's subspace; a {mixer} skip has none")
        checks.fits_memory(_ALIVE * 8 * count * streams**2, f"a network of {count} layers and {streams} streams")
        generator = torch.Generator().manual_seed(checks.whole_number(seed, "seed", 0))
        if rank is None:
            skips = mixers.sample_skips(mixer, streams, (count,), generator=generator)
        else:
            skips = grassmann.sample(streams, checks.whole_number(rank, "rank"), (count,), generator=generator)
        return cls(skips.expand(depth, -1, -1), variance, read, write)

    @classmethod
    def from_coefficients(
        cls, layers: Iterable[tuple[Tensor, Tensor, Tensor]], variance: Tensor | Sequence[float] | float
    ) -> Network:
        """Return the network of a trained model at one token, from its layers' `HyperConnection.coefficients(x)`.

        Args:
            layers: For each layer the read vector [n], the write vector [n] and the skip [n, n], in this order.
            variance: The noise variance of the layers: the mean squared singular value of each sublayer's Jacobian.
        """
        layers = list(layers) if isinstance(layers, Iterable) else []
        parts = [tuple(checks.real_tensor(part, "coefficients") for part in layer) for layer in layers]
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
        paths: int | None = None,
    ) -> Network:
        r"""Return the linearisation of layers $x \mapsto A x + \phi(W x + b)$, with noise variances from `propagate`.

        The other arguments are passed to `propagate`.

        Args:
            paths: The number of draws of all layers' slopes over which the spectrum is averaged; time grows with this
                number. The default is smaller for deeper networks, in which slopes matter less. With `paths=1` the mean
                squared slope replaces the slopes, which is right only if each layer's noise is small.
        """
        skips = to_skips(skips, depth=depth)
        signals = propagate(
            activation,
            skips,
            weight_scale,
            input_variance,
            bias_scale=bias_scale,
            read=read,
            write=write,
            form=form,
        )
        paths = max(32, 1024 // len(skips)) if paths is None else checks.whole_number(paths, "paths")
        slopes = draw_slopes(activation, signals, skips.shape[-1] if read is None else 1, paths)
        return cls(skips, signals.variance, read, write, slopes=slopes)

    @classmethod
    def prenorm(
        cls,
        skips: Tensor | Sequence,
        read: Tensor | Sequence,
        write: Tensor | Sequence,
        mlp: MLP | None = None,
        start_variance: float = 1.0,
        *,
        depth: int | None = None,
    ) -> Network:
        r"""Return the network of layers $x \leftarrow H x + w \otimes F(u / \mathrm{rms}(u))$ with $u = r^\top x$.

        Args:
            skips: $H$, [L, n, n], or one [n, n] for `depth` layers.
            read: $r$, [L, n] or [n].
            write: $w$, [L, n] or [n].
            mlp: The sublayer $F$, with random weights; by default GELU with a hidden layer four times as wide. For a
                norm with weights, multiply the first of the MLP's `scales` by the mean square of the norm's weights.
            start_variance: The mean square of the streams at the input, where all streams are equal.
        """
        return cls(**follow_prenorm(skips, read, write, mlp, start_variance, depth)._asdict())

    @classmethod
    def postnorm(
        cls,
        skips: Tensor | Sequence,
        read: Tensor | Sequence,
        write: Tensor | Sequence,
        mlp: MLP | None = None,
        start_variance: float = 1.0,
        *,
        depth: int | None = None,
    ) -> Network:
        r"""Return the network of layers $x \leftarrow \mathrm{norm}(H x + w \otimes F(r^\top x))$.

        Each stream is normalised by itself. The arguments are as in `prenorm`. The returned network's skips and
        write vectors include the division by the norms.
        """
        return cls(**follow_postnorm(skips, read, write, mlp, start_variance, depth)._asdict())

    def end_to_end(self) -> Network:
        r"""Return a network with the same layers for the model's own map, $T = \frac1n 1^\top J 1$ (`ends="model"`)."""
        return replace(self, ends="model")

    def end_moments(self) -> tuple[Tensor, Tensor]:
        r"""Return $E E^\top$ and $R^\top R$ for the maps E into the streams and R out of the streams. [n, n] each

        Both maps are the identity if `ends` is "streams".
        """
        if self.ends == "streams":
            eye = torch.eye(self.streams, dtype=torch.float64, device=self.skips.device)
            return eye, eye
        ones = torch.ones_like(self.skips[0])
        return ones, ones / self.streams**2

    def __repr__(self) -> str:
        given = [name for name in (*_FIELDS[2:], "sublayers") if getattr(self, name) is not None]
        noise = f", with {', '.join(given)}" if given else ""
        mean = float(self.variance.mean())
        ends = ", the model's own map" if self.ends == "model" else ""
        return f"Network({self.depth} layers, {self.streams} streams, mean variance {mean:.3g}{noise}{ends})"

    @property
    def depth(self) -> int:
        """The number of layers, L."""
        return self.skips.shape[0]

    @property
    def streams(self) -> int:
        """The number of streams, n (the paper's q)."""
        return self.skips.shape[-1]

    @property
    def isotropic(self) -> bool:
        """Whether the noise is the same in every direction: no read and write vectors and no covariance."""
        return self.read is None and self.covariance is None

    @property
    def gaussian_streams(self) -> bool:
        """Whether the network has no `sublayers`, `slopes` or `tied` weights, and `ends` is "streams".

        The noise is then Gaussian and independent between layers.
        """
        beyond = (self.sublayers, self.slopes, self.tied)
        return self.ends == "streams" and all(field is None for field in beyond)

    @property
    def identical(self) -> bool:
        """Whether all layers have the same skip, variance, read and write vectors and covariance."""
        fields = (self.skips, self.variance, self.read, self.write, self.covariance)
        return all(bool((field == field[:1]).all()) for field in fields if field is not None)

    def to(self, device: torch.device | str) -> Network:
        """Return a copy of the network with its tensors on a device, "cpu" or "cuda"."""
        names = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        checks.choice(str(device).split(":")[0], names, "available device")
        moved = {name: value.to(device) for name in _FIELDS if (value := getattr(self, name)) is not None}
        return replace(self, **moved)

    def gains(self) -> Tensor:
        r"""Return the factor by which each layer multiplies the mean squared singular value. [L]

        The product of the factors is the exact mean squared singular value; tied weights are treated as independent,
        which is not exact. A factor is the growth of the trace of M in
        $M \leftarrow A_l M A_l^\top + \sigma_l^2 \sum_k B_{lk} M B_{lk}^\top$ from $M = I$. For the ends of the model M
        starts from $1 1^\top$, and the last layer's factor includes the map out of the streams.
        """
        return self._gains.clone()

    @cached_property
    def _gains(self) -> Tensor:
        # NumPy takes a tenth of PyTorch's time for such small matrices.
        skips, variance = self.skips.cpu().numpy(), self.variance.cpu().numpy()
        factors = self.noise_factors().cpu().numpy() if not self.isotropic else None
        first, last = (moment.cpu().numpy() for moment in self.end_moments())
        eye, floor = np.eye(self.streams), _NOTHING * np.square(skips).sum((-2, -1))
        moment, gains = first / self.streams, np.zeros(self.depth)
        for layer, skip in enumerate(skips):
            grown = skip @ moment @ skip.T
            if factors is None:
                grown += variance[layer] / self.streams * eye
            else:
                grown += (factors[layer] @ moment @ factors[layer].transpose(0, 2, 1)).sum(0)
            gain = grown.trace()
            if gain <= floor[layer]:  # rounding errors of a product that is zero
                gain = 0.0
            if layer == self.depth - 1 and self.ends == "model":
                gain = (grown * last).sum() * self.streams
            gains[layer] = gain
            moment = grown / gain if gain > 0 else moment
        return torch.from_numpy(gains).to(self.skips.device)

    @property
    def is_zero(self) -> bool:
        """Whether the network maps everything to zero."""
        return not bool((self.gains() > 0).all())

    def mean_square(self) -> float:
        """Return the mean squared singular value; NaN for tied weights, for which `gains` is not exact."""
        return float(self.gains().log().sum().exp()) if self.tied is None else math.nan

    def rescaled(self) -> tuple[Network, float]:
        """Return the network with all gains scaled to one, and the product g of the gains.

        The Cauchy transforms G of this network and G' of the returned network satisfy G(z) = G'(z / g) / g.
        """
        gains = self.gains()
        gains = torch.where(gains > 0, gains, 1.0)
        total = gains.log().sum().item()
        if abs(total) > 690:
            raise ValueError(f"the network multiplies squared lengths by e^{total:.0f}, beyond what a float64 can hold")
        scaled = replace(self, skips=self.skips / gains.sqrt().view(-1, 1, 1), variance=self.variance / gains)
        return scaled, math.exp(total)

    def noise_factors(self) -> Tensor:
        r"""Return the noise's matrices $\sigma_l B_{lk}$, for $\sigma_l W_l = \sum_k \sigma_l B_{lk} \otimes X_k$.

        The shape is [L, K, n, n].

        For isotropic noise the $B_{lk}$ are all $n^2$ matrices $e_i e_j^\top / \sqrt n$.
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
    """Raise ValueError if the argument is not a `Network`, for example if it is a matrix of skips."""
    if not isinstance(network, Network):
        raise ValueError(
            f"the network must be a Network, not a {type(network).__name__}: make one with Network(skips, variance)"
        )
