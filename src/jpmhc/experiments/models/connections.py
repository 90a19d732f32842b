"""The configuration of a model's hyper-connections, and the function that builds them from it."""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc import checks, mixers
from jpmhc.checks import Count, Positive
from jpmhc.connections import HyperConnection
from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.experiments.models.layers import PositionSwiGLU, rms_norm
from jpmhc.files import read_json
from jpmhc.mixers import Mixer, make_mixer

Gate = Literal["softmax_matrix", "softmax", "sigmoid"]
PostNorm = Literal["rms", "layer"]
_SPREAD = 0.1  # standard deviation of initial weights if no static logits distinguish the streams
# The norm after every write, for each value of `stream_norm`.
POST_NORMS: dict[str, PostNorm | None] = {"stream": "rms", "layer": "layer", "call": None}


@dataclass(frozen=True)
class ConnectionConfig:
    """Width, streams and mixers of a model's residual connections."""

    dim: Count = 512  # Width of a stream.
    mixer: str = "identity"
    """Mixer of the hyper-connections: a name in jpmhc.MIXERS or MODULE:CLASS. The identity with one stream is the plain
    residual connection."""
    streams: Count = 1  # Number of parallel residual streams.
    mixer_dynamic: bool = True  # Whether mixing coefficients depend on the token; otherwise they are parameters.
    mixer_form: Literal["exact", "paper", "counted"] = "exact"
    """Defaults of the mixer's options. exact: exact projections, and the same norm and constraints for all mixers;
    paper: as in the paper's table of variants; counted: as paper, with the parameters of the paper's table of
    counts."""
    mixer_iterations: int | None = None
    """Iterations of the projection, T of sinkhorn or s of cayley. None: as mixer-form says (exact: 20 for sinkhorn, the
    exact inverse for cayley)."""
    mixer_tolerance: float | None = None
    """For sinkhorn: stop iterating on matrices whose row sums differ from one by at most this much; None: never."""
    mixer_gradient: Literal["direct", "gauss_seidel", "unrolled"] | None = None
    """For sinkhorn: the gradient, exact (direct), by the paper's iteration (gauss_seidel) or through the recorded
    iterations (unrolled). None: as mixer-form says (exact: direct)."""
    mixer_gradient_iterations: int | None = None
    """For sinkhorn: iterations k of gauss_seidel. None: from the paper's formula, 16 for four streams."""
    mixer_scale: float | None = None
    """For cayley (the paper's α), rotation and orthostochastic: factor of the logits. None: the mixer's default."""
    mixer_rank: int | None = None  # For grassmann: rank p of the frames. None: half the streams.
    mixer_size: int | None = None  # For permutation: number of permutations K. None: two more than streams.
    mixer_basis: tuple[tuple[int, ...], ...] | None = None  # For permutation: the permutations themselves.
    mixer_frames: Literal["dynamic", "static"] | None = None
    """For grassmann: frames that depend on the token (dynamic), or parameters that a Riemannian optimiser moves
    (static). None: as mixer-dynamic says."""
    mixer_norm: Literal["layer", "rms"] | None = None
    """Norm before the projection to mixing coefficients. None: as mixer-form says (exact: rms)."""
    mixer_read: Gate | None = None  # Constraint of the read coefficients. None: as mixer-form says (exact: softmax).
    mixer_write: Gate | None = None  # Constraint of the write coefficients. None: as mixer-form says (exact: sigmoid).
    mixer_temperature: Positive = 1.0  # Temperature of the read and write softmax.
    mixer_equal_start: bool = False
    """Whether every connection reads all streams alike at the start, instead of mostly one of them. The streams then
    stay equal, up to rounding: a control that shows what different streams are worth."""
    mixer_write_scale: Positive = 1.0
    """Factor of a sublayer's output before it is written to the streams: the paper's output scale s."""
    mixer_eps: Positive = 1e-6
    """Added under the root of the connections' norms (the plain recursive model's norms have 1e-5)."""
    kernels: Literal["auto", "fused", "reference"] = "auto"  # Implementation of the hyper-connections.

    def __post_init__(self) -> None:
        checks.fields(self)
        mixers.get_mixer(self.mixer)
        if self.mixer != "identity" and self.streams == 1:
            raise ValueError(
                f"the mixer {self.mixer!r} needs at least 2 streams, such as 4; streams=1 is the plain model"
            )
        if self.plain:
            self._refuse_options_of_connections()
        else:
            make_connection(self, nn.Identity(), 0, device="meta")  # raises an error for options that do not fit

    def mixer_settings(self) -> dict[str, object]:
        """Return the mixer's arguments that this configuration sets, by their names in the mixer's constructor.

        >>> ConnectionConfig(mixer="sinkhorn", streams=4, mixer_iterations=5).mixer_settings()
        {'iterations': 5}
        """
        values = {name: getattr(self, f"mixer_{name}") for name in MIXER_SETTINGS}
        return {name: value for name, value in values.items() if value is not None}

    def _refuse_options_of_connections(self) -> None:
        """Raise a ValueError if an option without effect on the plain model is set, except `mixer_form`."""
        for option in fields(self):
            value = getattr(self, option.name)
            if is_for_connections(option.name) and option.name != "mixer_form" and value != option.default:
                raise ValueError(
                    f"{option.name}={value} has no effect on the plain model (mixer identity, one stream): "
                    f"leave it at {option.default}, or ask for streams"
                )

    @property
    def unmixed(self) -> bool:
        """Whether there are several streams and the skip path does not mix them."""
        return self.mixer == "identity" and self.streams > 1

    @property
    def plain(self) -> bool:
        """Whether the connections are plain residual connections, without streams and mixers."""
        return self.mixer == "identity" and self.streams == 1


# Arguments of mixers; the configuration's fields for them have the prefix `mixer_`.
MIXER_SETTINGS = ("iterations", "tolerance", "gradient", "gradient_iterations", "scale", "rank", "size", "basis")


def read_basis(path: Path) -> tuple[tuple[int, ...], ...]:
    """Read permutations from a JSON file: the output of `jpmhc generators --json`, or a list of permutations."""
    content = read_json(path)
    perms = content.get("perms") if isinstance(content, dict) else content
    rows = perms if isinstance(perms, list) else []
    whole = all(isinstance(row, list) and len(row) == len(rows[0]) and all(type(i) is int for i in row) for row in rows)
    if not rows or not whole:
        raise ValueError(f"{path} has no list of permutations: jpmhc generators --json writes one under perms")
    return tuple(map(tuple, rows))


def is_for_connections(option: str) -> bool:
    """Return whether an option of the configuration affects only hyper-connections, not the plain model."""
    return option.startswith(("mixer_", "stream_")) or option == "kernels"


class CountedParameters(NamedTuple):
    """The parameters of one of the paper's variants, except the map from streams to logits (Table param-counts).

    The table's totals for n = 4 streams of d = 512 features contain constants that the paper does not explain: 36, 28
    and 22. Each is the number of static logits (biases that do not depend on the token, one per logit) plus the number
    of learned scales (one per stream for the read, the write and the rows of the skip): Sinkhorn 24 + 3 · 4, Grassmann
    16 + 3 · 4, and Perm Mix 14 + 2 · 4, because its skip has one logit per permutation and none per stream. Cayley has
    no static logits and no scales, but a layer norm with weights and biases (2 · n d) and three full n × n matrices.
    """

    static: bool = True  # one static logit per output
    scales: tuple[str, ...] = ("read", "write", "skip")  # coefficients with one learned scale per stream
    norm_weights: bool = False  # weights and biases of the norm
    full_skew: bool = False  # the skip has n × n logits, and only the skew part of their matrix is used


class Form(NamedTuple):
    """Default settings of a mixer and its connection, used if the configuration does not set them."""

    options: dict[str, Any]  # arguments of the mixer
    norm: Literal["layer", "rms"]
    read: Gate
    write: Gate
    counted: CountedParameters | None = None  # the parameters that the paper counts; None: the usual parameters


EXACT_FORM = Form({}, "rms", "softmax", "sigmoid")

_SINKHORN: dict[str, Any] = {"iterations": 20, "gradient": "gauss_seidel"}
_CAYLEY: dict[str, Any] = {"scale": 0.1, "iterations": 2}
_FULL = CountedParameters(static=False, scales=(), norm_weights=True, full_skew=True)

# "paper" is Table variant-hparams; "counted" adds the parameters of Table param-counts. Other mixers have EXACT_FORM.
# Table param-counts has n + n logits for Grassmann's softmax gates, so these gates are vectors in "counted".
FORMS: dict[str, dict[str, Form]] = {
    "exact": {},
    "paper": {
        "sinkhorn": Form(_SINKHORN, "rms", "sigmoid", "sigmoid"),
        "cayley": Form(_CAYLEY, "layer", "softmax_matrix", "softmax_matrix"),
        "grassmann": Form({}, "layer", "softmax_matrix", "softmax_matrix"),
    },
    "counted": {
        "sinkhorn": Form(_SINKHORN, "rms", "sigmoid", "sigmoid", CountedParameters()),
        "cayley": Form(_CAYLEY, "layer", "softmax_matrix", "softmax_matrix", _FULL),
        "grassmann": Form({}, "layer", "softmax", "softmax", CountedParameters()),
        "permutation": Form({}, "rms", "softmax", "sigmoid", CountedParameters(scales=("read", "write"))),
    },
}


class PositionNormConnection(HyperConnection):
    """A connection whose sublayer mixes positions; each stream of its output is normalised over positions."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return rms_norm(super().forward(x, *args, **kwargs), dim=-3)


def make_connection(
    config: ConnectionConfig,
    sublayer: nn.Module,
    index: int,
    post_norm: PostNorm | None = None,
    device: str | None = None,
) -> HyperConnection:
    """Return the hyper-connection number `index` of a stack, around `sublayer`.

    `post_norm` is the norm of each output stream. It is over features, except that "rms" is over positions if the
    sublayer mixes positions.
    """
    over_positions = isinstance(sublayer, PositionSwiGLU) and post_norm == "rms"
    form = FORMS[config.mixer_form].get(config.mixer, EXACT_FORM)
    connection = (PositionNormConnection if over_positions else HyperConnection)(
        sublayer,
        config.dim,
        streams=config.streams,
        mixer=_make_mixer(config, form),
        index=index,
        norm=config.mixer_norm or form.norm,
        read=config.mixer_read or form.read,
        write=config.mixer_write or form.write,
        temperature=config.mixer_temperature,
        dynamic=config.mixer_dynamic,
        post_norm=None if over_positions else post_norm,
        write_scale=config.mixer_write_scale,
        kernels=config.kernels,
        eps=config.mixer_eps,
        device=device,
    )
    if form.counted is not None:
        _count_parameters_as_the_paper(connection, form.counted)
    if config.mixer_equal_start:
        connection.map.favoured = None
        connection.map.reset_parameters()
    return connection


def _make_mixer(config: ConnectionConfig, form: Form) -> Mixer:
    """Return the configuration's mixer; `form` has the settings that the configuration does not set."""
    kind: Any = mixers.get_mixer(config.mixer)
    options = {**form.options, **config.mixer_settings()}
    known = inspect.signature(kind).parameters
    if unknown := [name for name in options if name not in known]:
        taken = ", ".join(f"mixer_{name}" for name in MIXER_SETTINGS if name in known) or "none of these settings"
        raise ValueError(f"the mixer {config.mixer} has no mixer_{unknown[0]}: it has {taken}")
    if "size" in options and "basis" in options:
        raise ValueError("mixer_size is the number of permutations in mixer_basis: leave one of the two away")
    if "basis" in options:
        options["basis"] = torch.tensor(options["basis"], device="cpu")
    if config.mixer_frames is not None and "static" not in known:
        raise ValueError(
            f"mixer_frames={config.mixer_frames} is for mixers with Grassmann frames, not for {config.mixer}"
        )
    if config.mixer_frames == "dynamic" and not config.mixer_dynamic:
        raise ValueError("mixer_frames=dynamic needs mixer_dynamic: dynamic frames depend on the token")
    if "static" in known:
        options["static"] = config.mixer_frames == "static" if config.mixer_frames else not config.mixer_dynamic
    return kind(config.streams, **options) if options else make_mixer(config.mixer, config.streams)


def _count_parameters_as_the_paper(connection: HyperConnection, counted: CountedParameters) -> None:
    usual = connection.map
    if usual.weight is None or usual.mixer.grassmann_frames:
        raise ValueError(
            "mixer_form=counted is for coefficients that all depend on the token: leave mixer_dynamic on, and "
            "mixer_frames dynamic"
        )
    connection.map = CountedMap(
        counted,
        *(usual.dim, usual.mixer, True, usual.favoured, usual.bias.device),
        norm=usual.norm,
        read=usual.read,
        write=usual.write,
        temperature=usual.temperature,
        eps=usual.eps,
    )


class CountedMap(CoefficientMap):
    """A coefficient map that turns streams x into the logits scale · (W (g · norm(x) + b)) + bias, with a matrix W.

    The norm's weights g and biases b, and the scales, are combined with W and bias into one matrix and one bias, so
    that kernels can treat this map like a `CoefficientMap`.
    """

    def __init__(self, counted: CountedParameters, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.weight is not None
        self.counted = counted
        n, like = self.mixer.streams, self.bias.detach()
        if counted.full_skew:
            self.weight = nn.Parameter(like.new_empty(sum(self.sizes[:2]) + n * n, self.weight.shape[1]))
        if not counted.static:
            del self.bias
            self.register_buffer("bias", torch.zeros_like(like), persistent=False)
        self.scales = nn.ParameterDict({name: nn.Parameter(like.new_empty(n)) for name in counted.scales})
        self.norm_weight, self.norm_bias = (
            nn.Parameter(like.new_empty(self.weight.shape[1])) if counted.norm_weights else None for _ in range(2)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise like `CoefficientMap`; without static logits, start from small random weights instead."""
        super().reset_parameters()
        if not hasattr(self, "scales"):
            return  # called by the base class's constructor, before the other parameters exist
        with torch.no_grad():
            if not self.counted.static:
                self.bias.zero_()
                assert self.weight is not None
                self.weight.normal_(std=_SPREAD)
            for scale in self.scales.values():
                scale.fill_(1.0)
            if self.norm_weight is not None and self.norm_bias is not None:
                self.norm_weight.fill_(1.0)
                self.norm_bias.zero_()

    def parameters_in_use(self) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        weight: Tensor = self._skew_rows(self.weight) if self.counted.full_skew else self.weight
        bias: Tensor = self.bias
        if self.scales:
            weight = weight * self._logit_scales()[:, None]
        if self.norm_weight is not None and self.norm_bias is not None:
            bias = bias + self.scale * (weight @ self.norm_bias)
            weight = weight * self.norm_weight
        return weight, bias

    def _logit_scales(self) -> Tensor:
        """Return the factor of each of the K logits: its stream's scale, or one if there are no scales. [K]"""
        parts = []
        for name, size in zip(("read", "write", "skip"), self.sizes):
            scale = self.scales[name] if name in self.scales else self.bias.new_ones(1)
            parts.append(scale.repeat_interleave(size // len(scale)))
        return torch.cat(parts)

    def _skew_rows(self, weight: Tensor) -> Tensor:
        """Return the weight with the skip's n² rows replaced by fewer rows (eq. skew-sym).

        The n² rows form an n × n matrix M; the new rows are the upper triangle of M - Mᵀ.
        """
        n = self.mixer.streams
        gates, matrix = weight.split([sum(self.sizes[:2]), n * n])
        rows = matrix.unflatten(0, (n, n))
        upper = torch.triu_indices(n, n, 1, device=weight.device)
        return torch.cat([gates, rows[upper[0], upper[1]] - rows[upper[1], upper[0]]])
