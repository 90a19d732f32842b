"""A decoder layer of `transformers` with two connections of ours, each layer reading ahead for the next."""

from typing import Any

import torch
from torch import Tensor

from jpmhc.connections import HyperConnection
from jpmhc.connections.ahead import ReadAhead, keep_read, may_read_ahead, use_read
from jpmhc.dialects.mhc import make_scaled_connection


class ConnectedLayer:
    """Holds a layer and its two connections, which borrow the layer's parameters. Subclasses run it.

    Args:
        layer: The layer of `transformers`.
        name: Its name in the model, for messages.
        kernels: As in `HyperConnection`.

    Attributes:
        attention: The connection around its attention.
        feedforward: The connection around its MLP.
        following: The layer after this one, if there is one.
    """

    def __init__(self, layer: Any, name: str, kernels: str) -> None:
        self.layer = layer
        self.attention = self.borrow(layer.attn_hc, f"{name}.attn_hc", kernels)
        self.feedforward = self.borrow(layer.ffn_hc, f"{name}.ffn_hc", kernels)
        self.following: ConnectedLayer | None = None
        self.ahead: ReadAhead | None = None

    @staticmethod
    def borrow(connection: Any, name: str, kernels: str) -> HyperConnection:
        """Make our connection on the parameters and settings of one of `transformers`, as DeepSeek-V4 has them."""
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
        """Read for the attention, unless the layer before has done so. Return its input and the state."""
        kept = None
        if not torch.compiler.is_compiling():
            kept, self.ahead = self.ahead, None
        return use_read(kept, x) or self.attention.read(x)

    def end(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Write the MLP's output, and read ahead for the next layer where that is one pass over the streams."""
        following = self.following
        if following is None or not may_read_ahead(following.layer.attn_hc, x):
            return self.feedforward.write(x, y, state)
        x, *read = self.feedforward.write_read(x, y, state, following.attention)
        following.ahead = keep_read(x, tuple(read))
        return x


def link_layers(made: list[tuple[str, Any]]) -> None:
    """Tell each layer which one comes after it in the same list of modules. made: names and what runs the layers."""
    by_name = {name: runner for name, runner in made if isinstance(runner, ConnectedLayer)}
    for name, runner in by_name.items():
        path, _, number = name.rpartition(".")
        if number.isdigit():
            runner.following = by_name.get(f"{path}.{int(number) + 1}")
