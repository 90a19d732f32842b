r"""recommend: rank the mixers for a model of a given depth by the theory of networks with norms.

A connection's skip is the matrix H [n, n] that mixes its n streams, and a mixer is the constraint on H. For random
weights, the theory gives each mixer's numbers at its start and after its skips have drifted from the identity: the
collapsed share of the Jacobian J of all streams (the share of its singular values below 0.1), the gradients of the
model's own map T = reduce ∘ J ∘ expand, the number of layers until differences between streams are lost, and the cost.
"""

from __future__ import annotations

import functools
import html
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import torch
from torch import Tensor

from jpmhc import checks, spectra
from jpmhc.connections.gates import favouring
from jpmhc.machine import use_threads
from jpmhc.mixers import MIXERS, Mixer, make_mixer
from jpmhc.spectra.activations import Activation
from jpmhc.spectra.density import COLLAPSED
from jpmhc.spectra.summary import direct_path, shares_below

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Norm = Literal["pre", "post"]
_SEED = 0
# With these settings, shares of collapsed singular values have an error of about one per cent.
_ARC = 6
_TOLERANCE = 2e-3
# The relative tolerance of the mean distance from the identity.
_DRIFT_TOLERANCE = 1e-3


LEGEND = (
    "J lost: share of singular values below 0.1 (post-norm: below 0.1 times the plain network's geometric mean) of the "
    "streams' Jacobian J, with skips at their start and after a drift that imitates training; T lost: this share of "
    "the model's own map T after the drift; γ: mean square gradient at the first and last sublayer; until lost: layers "
    "until differences between streams fall below 0.1; loss: measured, minus the plain model's. Ranked by J's lost "
    "share after the drift, then by gradients like the plain network's, then by J's geometric mean like the plain "
    "network's; the identity, which learns nothing, comes last, unless it beats all others."
)


class MeasuredLosses(TypedDict):
    """The validation losses of one comparison of trained mixers."""

    model: str  # the trained model, in words
    command: str  # the command that repeats the comparison
    # For each mixer, the validation loss minus the plain model's, both at their best learning rate.
    minus_plain: dict[str, float]


@functools.cache
def read_losses() -> MeasuredLosses:
    """Return the losses in `measured.json`, which `benchmarks/draw_mixers.py` writes from the stored comparison.

    >>> sorted(read_losses())
    ['command', 'minus_plain', 'model']
    """
    return json.loads(files("jpmhc.diagnose").joinpath("measured.json").read_text())


@dataclass(frozen=True, eq=False)
class Candidate:
    r"""The theory's numbers for one mixer.

    J is the Jacobian of all streams. T is the Jacobian of the model's own map, from n equal streams to the mean stream.

    Attributes:
        mixer: The mixer's name.
        drift: The mean distance of the drifted skips from the identity, $\|H - 1\|_F / \sqrt n$.
        collapsed_at_start: The share of J's singular values below 0.1 with the skips of a fresh connection. With
            post-norms, which shrink all directions alike, the limit is 0.1 times the plain network's geometric mean.
        collapsed: The share of J's singular values below the same limit, with drifted skips.
        collapsed_model: The share of T's singular values below the same limit, with drifted skips.
        geometric_mean: The geometric mean of J's singular values with drifted skips.
        direct_path: $1^\top H_L \cdots H_1 1/n$ with drifted skips H: without sublayers, T is this multiple of the
            identity.
        gradient_gains: The mean squared singular value of the derivative of the final mean stream with respect to each
            sublayer's output, with drifted skips. [L]
        layers_until_collapse: The number of drifted layers after which differences between streams are below 0.1.
        parameters: The number of parameters of one connection whose coefficients depend on the token.
        flops: The number of operations of one connection per token, without its sublayer.
        bytes: The smallest memory traffic of one connection per token, in 16 bits, without its sublayer.
        network: The drifted network: `spectra.density(candidate.network)` is J's spectrum, and
            `spectra.density(candidate.network.end_to_end())` is T's.
        fresh_network: The network with the skips of fresh connections.
    """

    mixer: str
    drift: float
    collapsed_at_start: float
    collapsed: float
    collapsed_model: float
    geometric_mean: float
    direct_path: float
    gradient_gains: Tensor = field(repr=False)
    layers_until_collapse: float
    parameters: int
    flops: int
    bytes: int
    network: spectra.Network = field(repr=False)
    fresh_network: spectra.Network = field(repr=False)

    @property
    def measured_loss(self) -> float | None:
        """The measured loss on text minus the plain model's loss; None if no model with this mixer was trained."""
        return read_losses()["minus_plain"].get(self.mixer)


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The ranked mixers, the best first; the identity, which mixes nothing, comes last.

    Attributes:
        candidates: The mixers, ranked by the theory and not by the loss of trained models: by the collapsed share of J
            with drifted skips, then by the distance of T's gradients from the plain residual network's, then by the
            distance of J's geometric mean from the plain network's, then by cost. The first mixer is Pareto-optimal in
            the first three numbers.
        assumptions: The assumptions behind the numbers, in words.
    """

    candidates: tuple[Candidate, ...]
    assumptions: str

    @property
    def best(self) -> Candidate:
        """The first mixer of the ranking."""
        return self.candidates[0]

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a matplotlib figure with the collapsed share, gradients and layers until collapse of each mixer.

        Args:
            path: A file to write the figure to as well: PNG, SVG or PDF by its ending.

        >>> import jpmhc
        >>> len(jpmhc.recommend(depth=4, mixers=["cayley", "sinkhorn"]).plot().axes)
        3
        """
        from jpmhc.report.recommendation import plot_recommendations
        from jpmhc.report.style import save_and_return

        return save_and_return(plot_recommendations([(len(self.best.gradient_gains), self)]), path)

    def _repr_html_(self) -> str:
        table, text = "\n".join(self._table()), f"{LEGEND} {self.assumptions}"
        return f"<pre style='font-family: monospace'>{html.escape(table)}</pre><p>{html.escape(text)}</p>"

    def __repr__(self) -> str:
        return f"Recommendation({', '.join(candidate.mixer for candidate in self.candidates)})"

    def __str__(self) -> str:
        lines = self._table()
        return "\n".join([*lines, *(textwrap.fill(text, len(lines[0])) for text in (LEGEND, self.assumptions))])

    def _table(self) -> list[str]:
        heads = ("mixer", "J lost start", "J lost drift", "T lost", "γ first", "γ last", "until lost", "loss")
        longest = max(len(row.mixer) for row in self.candidates)
        rows: list[tuple[str, ...]] = [heads]
        for row in self.candidates:
            shares = (f"{share:.1%}" for share in (row.collapsed_at_start, row.collapsed, row.collapsed_model))
            rest = (*row.gradient_gains[[0, -1]].tolist(), row.layers_until_collapse)
            loss = "–" if row.measured_loss is None else f"{row.measured_loss:+.3f}"
            rows.append((row.mixer, *shares, *(f"{value:.3g}" for value in rest), loss))
        return [f"{name:>{max(longest, 14)}}" + "".join(f"{cell:>14}" for cell in cells) for name, *cells in rows]


@use_threads(1)
def recommend(
    depth: int,
    streams: int = 4,
    activation: str | Activation = "gelu",
    *,
    norm: Norm = "pre",
    drift: float = 0.1,
    dim: int = 1024,
    ratio: float = 4.0,
    scales: tuple[float, float] = (1.0, 1.0),
    gated: bool = False,
    start_variance: float = 1.0,
    mixers: Sequence[str | Mixer] | None = None,
) -> Recommendation:
    r"""Rank the mixers for a model by the theory of their Jacobians and gradients.

    Args:
        depth: The number of sublayers, L: two for each block of a transformer.
        streams: The number of streams, n.
        activation: The sublayers' activation: a name in `spectra.activations.ACTIVATIONS`, or a `spectra.Activation`.
        norm: "pre" for a norm before each sublayer, "post" for a norm of every stream after each write.
        drift: The distance $\|H - 1\|_F / \sqrt n$ by which skips are moved from the identity to imitate training,
            at most 1. A mixer whose start is farther away keeps its start.
        dim: The number of features per stream, for the costs.
        ratio: The number of hidden features of a sublayer divided by its number of features.
        scales: For each of a sublayer's two weight matrices, the variance of an entry times the number of columns;
            PyTorch's default is (1/3, 1/3).
        gated: Whether sublayers are gated, such as SwiGLU.
        start_variance: The mean square of the entries of the model's embeddings.
        mixers: Mixers, names in `MIXERS`, or MODULE:CLASS for a mixer of your own; by default all names that allow
            this number of streams.

    Example:
        >>> import jpmhc
        >>> recommendation = jpmhc.recommend(depth=8, streams=4, mixers=["identity", "sinkhorn", "cayley"])
        >>> [candidate.mixer for candidate in recommendation.candidates]  # the identity mixes nothing and comes last
        ['cayley', 'sinkhorn', 'identity']
    """
    depth, streams, dim = (
        checks.whole_number(depth, "depth"),
        checks.whole_number(streams, "streams"),
        checks.whole_number(dim, "dim"),
    )
    checks.fits_memory(100 * 8 * depth * streams**2, f"the theory of {depth} layers with {streams} streams")
    checks.choice(norm, get_args(Norm), "norm")
    if streams == 1:
        raise ValueError("one stream has nothing to mix: streams must be at least 2")
    checks.inside(drift, "(0, 1]", "drift")
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        raise ValueError(f"scales must be two numbers, one for each matrix of a sublayer, not {scales!r}")
    if mixers is None:
        mixers = [name for name in MIXERS if MIXERS[name].why_not(streams) is None]
    if isinstance(mixers, str) or not mixers:
        raise ValueError(f"mixers must be one or more names in a list, such as ['cayley', 'rotation'], not {mixers!r}")
    chosen = {_name(mixer): make_mixer(mixer, streams).double() for mixer in mixers}
    model = _Model(depth, streams, norm, spectra.MLP(activation, scales, ratio, gated), start_variance)
    plain = float(spectra.gradient_gains(model.plain).log()[0])
    skips = [drift_skips(mixer, depth, drift) for mixer in chosen.values()]
    fresh, drifted = ([model.network(pair[when]) for pair in skips] for when in (0, 1))
    own = [model.own_map(after, network) for (_, after), network in zip(skips, drifted)]
    shares = model.shares_collapsed([*fresh, *drifted, *own])
    candidates = [
        _describe_mixer(name, 2 * streams + chosen[name].logits, dim, after, networks, shares[number :: len(chosen)])
        for number, (name, (_, after), networks) in enumerate(zip(chosen, skips, zip(fresh, drifted)))
    ]

    def losses(candidate: Candidate) -> tuple[float, float, float]:
        """Return the three numbers that rank a candidate (smaller is better), rounded to relevant differences."""
        gains = abs(float(candidate.gradient_gains[0].log()) - plain)
        mean = candidate.geometric_mean / model.scale
        lost = abs(math.log(mean)) if mean > 0 else math.inf
        return round(candidate.collapsed, 2), round(gains, 1), round(lost, 1)

    def rank(candidate: Candidate) -> tuple[bool, tuple[float, float, float], int]:
        return chosen[candidate.mixer].logits == 0, losses(candidate), candidate.flops

    ranked = sorted(candidates, key=rank)

    def is_dominated(candidate: Candidate) -> bool:
        own = losses(candidate)
        others = (losses(other) for other in ranked)
        return any(other != own and all(a <= b for a, b in zip(other, own)) for other in others)

    best = next(candidate for candidate in ranked if not is_dominated(candidate))
    ranked = [best, *(candidate for candidate in ranked if candidate is not best)]
    word = activation if isinstance(activation, str) else activation.name
    measured = read_losses()
    assumptions = (
        f"{depth} {norm}-norm sublayers with independent random weights ({word}, scales {scales[0]:g} and "
        f"{scales[1]:g}, hidden {ratio:g} times as wide) in the limit of many features; reads that favour stream l mod "
        f"{streams}, writes of one, drifted skips at distance {drift:g} from the identity in random directions; costs "
        f"at width {dim}. "
        "This ranks what random layers lose, not the loss of trained models. Training adds the same few matrices to "
        "all layers, which changes the whole spectrum: measure a trained model with jpmhc diagnose. "
        f"The measured loss is the validation loss minus the plain model's of {measured['model']} "
        f"({measured['command']})."
    )
    return Recommendation(tuple(ranked), assumptions)


class _Model:
    """The settings of the theory's networks that do not depend on the mixer."""

    def __init__(self, depth: int, streams: int, norm: str, mlp: spectra.MLP, start_variance: float) -> None:
        self.make = spectra.Network.prenorm if norm == "pre" else spectra.Network.postnorm
        self.read = torch.stack([favouring(layer, streams) for layer in range(depth)])
        self.write = torch.ones(depth, streams, dtype=torch.float64)
        self.mlp, self.start_variance = mlp, start_variance
        self.plain = self.network(torch.eye(streams, dtype=torch.float64).expand(depth, -1, -1))
        # The plain network's geometric mean: 1, or the factor by which post-norms shrink all directions.
        self.scale = math.exp(float(torch.linalg.slogdet(self.plain.skips).logabsdet.sum()) / streams)

    def network(self, skips: Tensor) -> spectra.Network:
        """Return the theory's network with the skips [L, n, n] and this model's other settings."""
        return self.make(skips, self.read, self.write, self.mlp, self.start_variance)

    def own_map(self, skips: Tensor, network: spectra.Network) -> spectra.Network:
        """Return the network of the model's own map T; skips whose rows all sum to one give the plain network's T."""
        plain = float((skips.sum(-1) - 1).abs().max()) < 1e-6
        return (self.plain if plain else network).end_to_end()

    def shares_collapsed(self, networks: Sequence[spectra.Network]) -> list[float]:
        """Return the collapsed share of each network; networks with equal skips (to six decimals) are solved once."""
        keys = [(one.ends, one.skips.mul(1e6).round().long().numpy().tobytes()) for one in networks]
        unique = dict(zip(keys, networks))
        shares = shares_below(list(unique.values()), COLLAPSED * self.scale, points=_ARC, tolerance=_TOLERANCE)
        share_by_key = dict(zip(unique, shares))
        return [share_by_key[key] for key in keys]


def _name(mixer: str | Mixer) -> str:
    """Return a mixer's name for tables; for a mixer without a name, return the name of its class."""
    return mixer if isinstance(mixer, str) else getattr(mixer, "name", type(mixer).__name__)


def _describe_mixer(
    name: str,
    logits: int,
    dim: int,
    drifted: Tensor,
    networks: tuple[spectra.Network, spectra.Network],
    shares: Sequence[float],
) -> Candidate:
    """Return the candidate of a mixer with `logits` logits per connection and the drifted skips [L, n, n].

    `networks` are the fresh and the drifted network, `shares` the collapsed shares of fresh J, drifted J and drifted T.
    """
    fresh, network = networks
    n = network.streams
    return Candidate(
        mixer=name,
        drift=_distance(drifted),
        collapsed_at_start=shares[0],
        collapsed=shares[1],
        collapsed_model=shares[2],
        geometric_mean=spectra.geometric_mean(network),
        direct_path=direct_path(network),
        gradient_gains=spectra.gradient_gains(network),
        layers_until_collapse=spectra.layers_until_collapse(drifted),
        parameters=logits * (n * dim + 1),
        # the projection of all streams to the logits, the skip, and read and write
        flops=2 * logits * n * dim + 2 * n * n * dim + 4 * n * dim,
        # all streams in and out once, and the sublayer's input and output once
        bytes=2 * (2 * n * dim + 2 * dim),
        network=network,
        fresh_network=fresh,
    )


def drift_skips(mixer: Mixer, depth: int, drift: float) -> tuple[Tensor, Tensor]:
    r"""Return a mixer's skips from its initial logits, and from these logits plus random numbers. [L, n, n] each

    Bisection chooses the size of the random numbers so that the mean of $\|H - 1\|_F / \sqrt n$ over the layers is
    `drift`. If the initial skips are already farther away, they are returned twice. If no numbers reach `drift`, the
    farthest skips are returned.
    """
    generator = torch.Generator().manual_seed(_SEED)
    start = mixer.start().double().expand(depth, -1)
    direction = torch.randn(depth, mixer.logits, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        first = mixer(start)
        if _distance(first) >= drift or mixer.logits == 0:
            return first, first
        low, high = 0.0, 1.0
        while _distance(mixer(start + high * direction)) < drift and high < 1e3:
            low, high = high, 2 * high
        drifted = mixer(start + high * direction)
        while abs(_distance(drifted) / drift - 1) > _DRIFT_TOLERANCE and high - low > 1e-6 * high:
            middle = (low + high) / 2
            drifted = mixer(start + middle * direction)
            low, high = (middle, high) if _distance(drifted) < drift else (low, middle)
    return first, drifted


def _distance(skips: Tensor) -> float:
    n = skips.shape[-1]
    away = skips - torch.eye(n, dtype=skips.dtype)
    return float(away.square().sum((-2, -1)).mean()) ** 0.5 / math.sqrt(n)
