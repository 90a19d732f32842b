"""Run a decoder layer of `transformers` with two of this package's connections, and read ahead for the next layer."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from jpmhc.connections import HyperConnection
from jpmhc.connections.contract import State
from jpmhc.connections.stack import ReadAhead, keep_read, may_read_ahead, use_read
from jpmhc.dialects.mhc import make_scaled_connection


class Runner(Protocol):
    """An object whose forward replaces the forward of a module of `transformers`."""

    forward: Callable[..., Any]


# {class name in `transformers`: function from a module, its name in the model and `kernels` to the module's runner}
Runners = dict[str, Callable[[Any, str, str], Runner]]


class ConnectedLayer:
    """A layer of `transformers` with two connections that use the layer's parameters; subclasses define `forward`.

    Attributes:
        settings: A connection's settings, {argument of `make_scaled_connection`: attribute of the module in
            `transformers`}, besides the number of streams and both eps.
        attention: The connection around the layer's attention.
        feedforward: The connection around the layer's MLP.
        following: The layer after this one, or None.
        ahead: The result of the read that the previous layer has made for this layer's attention, or None.
    """

    forward: Callable[..., Any]
    settings: ClassVar[dict[str, str]] = {"iterations": "hc_sinkhorn_iters"}

    def __init__(self, layer: Any, name: str, kernels: str) -> None:
        self.layer = layer
        self.attention = self.borrow(layer.attn_hc, f"{name}.attn_hc", kernels)
        self.feedforward = self.borrow(layer.ffn_hc, f"{name}.ffn_hc", kernels)
        self.following: ConnectedLayer | None = None
        self.ahead: ReadAhead | None = None

    def borrow(self, connection: Any, name: str, kernels: str) -> HyperConnection:
        """Make a `HyperConnection` from a connection of `transformers`; it shares the parameters."""
        streams, eps, norm_eps = connection.hc_mult, connection.hc_eps, connection.input_norm.eps
        settings = {key: getattr(connection, attribute) for key, attribute in self.settings.items()}
        return make_scaled_connection(connection, streams, eps, norm_eps, name, True, kernels=kernels, **settings)

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return the attention's input and the state for its write, from the read in `ahead` or from a new read."""
        ahead = None
        if not torch.compiler.is_compiling():
            ahead, self.ahead = self.ahead, None
        return use_read(ahead, x) or self.attention.read(x)

    def end(self, x: Tensor, y: Tensor, state: State) -> Tensor:
        """Write the MLP's output y to x and return the new streams. Also read them for the next layer if possible."""
        following = self.following
        if following is None or not may_read_ahead(following.layer.attn_hc.base, x):
            return self.feedforward.write(x, y, state)
        x, h, state = self.feedforward.write_read(x, y, state, following.attention)
        following.ahead = keep_read(x, (h, state))
        return x


def link_layers(runners: Sequence[tuple[str, Runner]]) -> None:
    """Set `following` of each `ConnectedLayer` to the layer whose name has the next number.

    Args:
        runners: Pairs of a module's name in the model and the module's runner.
    """
    by_name = {name: runner for name, runner in runners if isinstance(runner, ConnectedLayer)}
    for name, runner in by_name.items():
        path, _, number = name.rpartition(".")
        if number.isdigit():
            runner.following = by_name.get(f"{path}.{int(number) + 1}")
