"""What wrapping found out about one layer: where its hidden state enters and leaves, and what carries it between."""

from dataclasses import dataclass
from typing import Any

from jpmhc.wrap.route import StreamStep
from jpmhc.wrap.streams import bare


@dataclass(frozen=True)
class LayerPlan:
    """How the residual stream runs through one layer.

    Args:
        name: The layer's name in the model.
        position: Which positional argument the hidden state is, if it is given by position.
        keyword: The name that the hidden state is given by, if it is given by name.
        ndim: How many dimensions the hidden state has.
        dim: Its width.
        steps: The operations that carry the residual stream from the layer's input to its output.
        leaves: The index or key of the hidden state in the layer's output; None where it is the output itself.
        modules: The names in the layer of modules that take the hidden state and are not PyTorch's own.
        first: Whether the layer expands a hidden state into streams; other layers are given the streams.
        last: Whether the layer reduces its streams to a hidden state; other layers hand them to the next.
    """

    name: str
    position: int | None
    keyword: str | None
    ndim: int
    dim: int
    steps: tuple[StreamStep, ...] = ()
    leaves: int | str | None = None
    modules: tuple[str, ...] = ()
    first: bool = True
    last: bool = True

    @property
    def additions(self) -> int:
        """How many connections the layer needs."""
        return sum(step.name == "add" for step in self.steps)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument of the layer that is its hidden state."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.keyword or "")

    def with_entering(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        """Return the layer's arguments with another hidden state."""
        if self.position is not None and self.position < len(args):
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, str(self.keyword): value}

    def leaving(self, output: Any) -> Any:
        """Return what of the layer's output is its hidden state."""
        if self.leaves is None:
            return output
        if isinstance(self.leaves, int):
            return output[self.leaves] if isinstance(output, tuple | list) and self.leaves < len(output) else None
        return output.get(self.leaves) if isinstance(output, dict) else None

    def with_leaving(self, output: Any, value: Any) -> Any:
        """Return the layer's output with another hidden state, and no streams anywhere else."""
        return value if self.leaves is None else replace_entries(output, {self.leaves: value})


def replace_entries(output: Any, new: dict[Any, Any]) -> Any:
    """Return a layer's output with these entries, and with mixtures in the place of streams in all others."""
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = new[key] if key in new else bare(value)
        return output
    if isinstance(output, tuple | list):
        entries = [new[place] if place in new else bare(value) for place, value in enumerate(output)]
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    return bare(output)
