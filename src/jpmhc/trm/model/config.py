"""The configuration of the recursive model, and the hyper-connection that it describes."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from torch import nn

from jpmhc import checks, mixers
from jpmhc.connections import HyperConnection
from jpmhc.mixers import Mixer
from jpmhc.trm.model.layers import Attend, inner_width

Gate = Literal["softmax_matrix", "softmax", "sigmoid"]

# Fields that count something.
_COUNTS = [
    "dim",
    "heads",
    "layers",
    "inner_multiple",
    "puzzle_slots",
    "h_cycles",
    "l_cycles",
    "halt_max_steps",
    "streams",
]


@dataclass(frozen=True)
class RecursiveConfig:
    """Size, recursion and connections of the model; the defaults are those of the public TRM on ARC."""

    dim: int = 512
    """Width of a stream."""
    heads: int = 8
    """Attention heads."""
    layers: int = 2
    """Blocks of the weight-tied network, each with attention and feed-forward."""
    expansion: float = 4.0
    """Feed-forward expansion; the gated inner width is two thirds of it."""
    inner_multiple: int = 256
    """The inner width is rounded up to a multiple of this."""
    puzzle_slots: int = 16
    """Positions before the grid; the first holds the puzzle's vector, the others start empty."""
    h_cycles: int = 3
    """Outer cycles of a supervision step; the last one carries gradient."""
    l_cycles: int = 4
    """Inner cycles of each outer cycle."""
    halt_max_steps: int = 16
    """Supervision steps after which a row halts in any case; evaluation always takes this many."""
    halt_exploration: float = 0.1
    """Probability that a row must take at least a random number (2 to the maximum) of steps."""
    halting_weight: float = 0.5
    """Weight of the halting head's loss."""
    mixer: str = "identity"
    """Residual mixer of the hyper-connections: a key of jpmhc.MIXERS; identity with one stream is the plain model."""
    streams: int = 1
    """Parallel residual streams."""
    mixer_dynamic: bool = True
    """Mixing coefficients depend on the token; otherwise they are parameters."""
    mixer_form: Literal["exact", "paper"] = "exact"
    """Exact projections with one norm and constraint for all mixers, or each as in the paper's table of variants."""
    mixer_norm: Literal["layer", "rms"] | None = None
    """Norm before the projection to mixing coefficients; None: the form's (exact: rms)."""
    mixer_read: Gate | None = None
    """Constraint of the read coefficients; None: the form's (exact: softmax)."""
    mixer_write: Gate | None = None
    """Constraint of the write coefficients; None: the form's (exact: sigmoid)."""
    mixer_temperature: float = 1.0
    """Temperature of the read and write softmax."""
    stream_norm: Literal["stream", "call"] = "stream"
    """Where streams are normalised: each after every write, or once when a call ends."""
    stream_span: Literal["call", "recursion"] = "call"
    """How long streams stay apart: expanded and collapsed in each call, or carried by the states between calls."""
    kernels: Literal["auto", "fused", "reference"] = "auto"
    """Which implementation of the hyper-connection's steps."""
    attend: Attend = "auto"
    """Attention kernel; auto leaves the choice to PyTorch."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights are float32 in either case."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.at_least_one(getattr(self, name), name)
        checks.positive(self.expansion, "expansion")
        checks.inside(self.halting_weight, "[0, inf)", "halting_weight")
        checks.inside(self.halt_exploration, "[0, 1]", "halt_exploration")
        if not inner_width(self.dim, self.expansion, self.inner_multiple):
            raise ValueError(f"expansion {self.expansion} leaves no inner width at dim {self.dim}: choose a larger one")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads = {2 * self.heads}, not {self.dim}")
        checks.require_choice(self.mixer, "mixer", mixers.MIXERS)
        if self.mixer != "identity" and self.streams == 1:
            raise ValueError(f"the mixer {self.mixer!r} needs at least 2 streams; streams=1 is the plain model")
        checks.positive(self.mixer_temperature, "mixer_temperature")
        if self.plain:
            self._refuse_options_of_connections()
        else:
            make_connection(self, nn.Identity(), 0)  # refuses what does not go together

    def _refuse_options_of_connections(self) -> None:
        """Refuse options that the plain model would ignore, but for `mixer_form`, which some mixers ignore as well."""
        for option in fields(self):
            value = getattr(self, option.name)
            ours = option.name in ("stream_norm", "stream_span", "kernels") or option.name.startswith("mixer_")
            if ours and option.name != "mixer_form" and value != option.default:
                raise ValueError(
                    f"{option.name}={value} has no effect on the plain model (mixer identity, one stream): "
                    f"leave it at {option.default}, or ask for streams"
                )

    @property
    def plain(self) -> bool:
        """Whether the connections are plain residual ones, without streams and mixers."""
        return self.mixer == "identity" and self.streams == 1


class Form(NamedTuple):
    """The settings of a mixer that the configuration leaves open."""

    mixer: Callable[[int, bool], Mixer] | None  # from (streams, dynamic); None: what the name stands for
    norm: Literal["layer", "rms"]
    read: Gate
    write: Gate


EXACT_FORM = Form(None, "rms", "softmax", "sigmoid")

_SIGMOID: tuple[Gate, Gate] = ("sigmoid", "sigmoid")
_SOFTMAX: tuple[Gate, Gate] = ("softmax_matrix", "softmax_matrix")

# Table variant-hparams; mixers it does not have are set up as elsewhere.
PAPER_FORMS = {
    "sinkhorn": Form(lambda n, _: mixers.Sinkhorn(n, iterations=20, gradient="gauss_seidel"), "rms", *_SIGMOID),
    "cayley": Form(lambda n, _: mixers.Cayley(n, scale=0.1, iterations=2), "layer", *_SOFTMAX),
    "grassmann": Form(lambda n, dynamic: mixers.Grassmann(n, 2, static=not dynamic), "layer", *_SOFTMAX),
}


def make_connection(config: RecursiveConfig, sublayer: nn.Module, index: int) -> HyperConnection:
    """Put a hyper-connection around one sublayer."""
    form = PAPER_FORMS.get(config.mixer, EXACT_FORM) if config.mixer_form == "paper" else EXACT_FORM
    return HyperConnection(
        sublayer,
        config.dim,
        streams=config.streams,
        mixer=config.mixer if form.mixer is None else form.mixer(config.streams, config.mixer_dynamic),
        index=index,
        norm=config.mixer_norm or form.norm,
        read=config.mixer_read or form.read,
        write=config.mixer_write or form.write,
        temperature=config.mixer_temperature,
        dynamic=config.mixer_dynamic,
        post_norm="rms" if config.stream_norm == "stream" else None,
        kernels=config.kernels,
    )
