"""The configuration of the recursive model."""

from dataclasses import dataclass
from typing import Literal

from jpmhc import checks
from jpmhc.experiments.models.connections import ConnectionConfig
from jpmhc.experiments.models.layers import Attend, inner_width

# Fields that count something.
_COUNTS = ["dim", "heads", "layers", "inner_multiple", "puzzle_slots", "h_cycles", "l_cycles", "halt_max_steps"]


@dataclass(frozen=True)
class RecursiveConfig(ConnectionConfig):
    """Size, recursion and connections of the model; by default as the public TRM on ARC."""

    heads: int = 8
    """Attention heads."""
    layers: int = 2
    """Blocks of the weight-tied network, each with a layer between positions and a feed-forward layer."""
    between_positions: Literal["attention", "mlp"] = "attention"
    """The layer between positions: rotary attention, or a feed-forward layer over all positions of a row."""
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
    stream_norm: Literal["stream", "layer", "call"] = "stream"
    """Where streams are normalised: each after every write, without weights or by a layer norm with weights as in the
    paper's figure; or once when a call ends."""
    stream_span: Literal["call", "recursion"] = "call"
    """The time that streams stay apart: one call of the network, or the whole recursion, in which states carry them."""
    attend: Attend = "auto"
    """Attention kernel; auto leaves the choice to PyTorch."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights are float32 in either case."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            checks.whole_number(getattr(self, name), name)
        checks.positive_number(self.expansion, "expansion")
        checks.inside(self.halting_weight, "[0, inf)", "halting_weight")
        checks.inside(self.halt_exploration, "[0, 1]", "halt_exploration")
        if not inner_width(self.dim, self.expansion, self.inner_multiple):
            raise ValueError(f"expansion {self.expansion} leaves no inner width at dim {self.dim}: choose a larger one")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads = {2 * self.heads}, not {self.dim}")
        super().__post_init__()
