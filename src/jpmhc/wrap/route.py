"""Which operations carry the residual stream through a layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class StreamStep(NamedTuple):
    """One operation that carries the residual stream on: the `number`-th one of this name on the state before it."""

    name: str
    number: int


class Route:
    """The way of the residual stream through one call of a layer.

    Args:
        steps: The operations that carry it, from the layer's input to its output.
        connections: One for each step named "add".
        onward: The first connection of the next layer, if it may read before that layer is called.
        reduces: Whether nothing but the mean of the streams is wanted at the end.
    """

    def __init__(
        self, steps: tuple[StreamStep, ...], connections: Sequence[Any], onward: Any = None, reduces: bool = False
    ) -> None:
        self.steps, self.connections, self.onward, self.reduces = steps, connections, onward, reduces

    def carries(self, trail: tuple[StreamStep, ...], step: StreamStep) -> bool:
        """Whether the residual stream goes on with this step, after these."""
        return len(trail) < len(self.steps) and self.steps[len(trail)] == step

    def connection(self, trail: tuple[StreamStep, ...]) -> Any:
        """Return the connection of the next addition after these steps; None after the last."""
        done = sum(step.name == "add" for step in trail)
        return self.connections[done] if done < len(self.connections) else None

    def following(self, trail: tuple[StreamStep, ...]) -> Any:
        """Return the connection that reads what the addition at the end of these steps has written, if it is known."""
        if len(trail) == len(self.steps):
            return self.onward
        return self.connection(trail) if self.steps[len(trail)].name == "add" else None

    def note(self, complaint: str) -> None:
        """Take note of something that cannot be followed; only the probing run minds."""
