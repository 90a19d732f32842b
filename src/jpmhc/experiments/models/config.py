"""The configuration of the recursive model."""

from dataclasses import dataclass
from typing import Literal

from jpmhc import checks
from jpmhc.experiments.models.connections import ConnectionConfig
from jpmhc.experiments.models.layers import Attend, inner_width

# Fields that must be positive whole numbers.
_COUNTS = ["dim", "heads", "layers", "inner_multiple", "puzzle_slots", "h_cycles", "l_cycles", "halt_max_steps"]


@dataclass(frozen=True)
class RecursiveConfig(ConnectionConfig):
    """Size, recursion and connections of the model; the defaults are those of the public TRM on ARC."""

    heads: int = 8
    """Number of attention heads."""
    layers: int = 2
    """Number of blocks of the weight-tied network; each has a layer between positions and a feed-forward layer."""
    between_positions: Literal["attention", "mlp"] = "attention"
    """The layer between positions: rotary attention, or a feed-forward layer over all positions of a row."""
    expansion: float = 4.0
    """Expansion of feed-forward layers: their gated inner width is two thirds of expansion · dim."""
    inner_multiple: int = 256
    """Number to whose multiples the inner width is rounded up."""
    puzzle_slots: int = 16
    """Number of positions before the grid; the first gets the puzzle's vector, the others zeros."""
    h_cycles: int = 3
    """Outer cycles per supervision step; gradients pass through the last cycle only."""
    l_cycles: int = 4
    """Inner cycles per outer cycle."""
    halt_max_steps: int = 16
    """Largest number of supervision steps per row; evaluation always takes this number."""
    halt_exploration: float = 0.1
    """Probability that a row may not halt before a random number of steps (from 2 to the maximum)."""
    halting_weight: float = 0.5
    """Weight of the halting head's loss."""
    stream_norm: Literal["stream", "layer", "call"] = "stream"
    """Normalisation of the streams. stream: each stream after every write, by an RMS norm without weights; layer: the
    same by a layer norm with weights, as in the paper's figure; call: once at the end of a call of the network."""
    stream_span: Literal["call", "recursion"] = "call"
    """How long streams stay separate: during one call of the network, or during the whole recursion, whose states then
    have streams."""
    attend: Attend = "auto"
    """Attention kernel; auto leaves the choice to PyTorch."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights are always float32."""

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
