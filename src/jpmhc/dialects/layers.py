"""A decoder layer of `transformers` with two of our connections, which reads ahead for the next layer."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from jpmhc.connections import HyperConnection
from jpmhc.connections.stack import ReadAhead, keep_read, may_read_ahead, use_read
from jpmhc.dialects.mhc import make_scaled_connection


class Runner(Protocol):
    """An object with a new forward for a module of `transformers`."""

    forward: Callable[..., Any]


# For the names of classes in `transformers`: makes the runner of a module, from its name in the model and `kernels`.
Runners = dict[str, Callable[[Any, str, str], Runner]]


class ConnectedLayer:
    """A layer and its two connections, which use the layer's parameters. Subclasses have its forward.

    Args:
        layer: The layer of `transformers`.
        name: Its name in the model, for messages.
        kernels: As in `HyperConnection`.

    Attributes:
        attention: The connection around its attention.
        feedforward: The connection around its MLP.
        following: The layer after this one, if there is one.
        ahead: The read that the layer before has made for this one.
    """

    forward: Callable[..., Any]

    def __init__(self, layer: Any, name: str, kernels: str) -> None:
        self.layer = layer
        self.attention = self.borrow(layer.attn_hc, f"{name}.attn_hc", kernels)
        self.feedforward = self.borrow(layer.ffn_hc, f"{name}.ffn_hc", kernels)
        self.following: ConnectedLayer | None = None
        self.ahead: ReadAhead | None = None

    @staticmethod
    def borrow(connection: Any, name: str, kernels: str) -> HyperConnection:
        """Make our connection from a connection of `transformers` with DeepSeek-V4's parameters and settings."""
        return make_scaled_connection(
            connection,
            connection.hc_mult,
            connection.hc_sinkhorn_iters,
            connection.hc_eps,
            connection.input_norm.eps,
            borrowed=True,
            what=name,
            kernels=kernels,
        )

    def begin(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the attention's input and the state, which the layer before may have read."""
        ahead = None
        if not torch.compiler.is_compiling():
            ahead, self.ahead = self.ahead, None
        return use_read(ahead, x) or self.attention.read(x)

    def end(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Write the MLP's output, and read ahead for the next layer if that is one pass over the streams."""
        following = self.following
        if following is None or not may_read_ahead(following.layer.attn_hc, x):
            return self.feedforward.write(x, y, state)
        x, *read = self.feedforward.write_read(x, y, state, following.attention)
        following.ahead = keep_read(x, tuple(read))
        return x


def link_layers(runners: Sequence[tuple[str, Runner]]) -> None:
    """Give each layer the next one in the same list of modules, by the layers' names."""
    by_name = {name: runner for name, runner in runners if isinstance(runner, ConnectedLayer)}
    for name, runner in by_name.items():
        path, _, number = name.rpartition(".")
        if number.isdigit():
            runner.following = by_name.get(f"{path}.{int(number) + 1}")
