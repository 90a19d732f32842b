"""The form of a connection for DTensor streams: each process applies one of the other forms to its own tokens.

Connections compute each token alone. So streams that are sharded along the sequence, such as the outputs of
`SequenceParallel`, need no communication. The sublayer's input is a DTensor with the placements of the streams. Its
output may be a DTensor with any placements, or a plain tensor of this process's tokens.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from jpmhc import dtensors
from jpmhc.connections.contract import State

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from jpmhc.connections.hyper import HyperConnection


class DTensorState(NamedTuple):
    """The state that the read of a DTensor returns."""

    x: "DTensor"
    own: State  # the state of the form that read this process's tokens

    def fits(self, block: "HyperConnection") -> bool:
        return self.own.fits(block)

    def gather(self, x: Any) -> Tensor:
        return spread(self.own.gather(x.to_local()), x)

    def write(self, block: "HyperConnection", x: Any, y: Tensor, mean: bool) -> Tensor:
        out = self.own.write(block, self._own_streams(x), take_own(y, x), mean)
        return spread(out, x)

    def join(
        self, block: "HyperConnection", x: Any, following: "HyperConnection", delayed: bool = False
    ) -> "Callable[[Tensor], tuple[Tensor, Tensor, State]] | None":
        joined = self.own.join(block, self._own_streams(x), following, delayed)
        if joined is None:
            return None

        def write_read(y: Tensor) -> tuple[Tensor, Tensor, State]:
            out, h, own = joined(take_own(y, x))
            out = spread(out, x)
            return out, spread(h, x), DTensorState(out, own)

        return write_read

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        raise TypeError("streams that are DTensors cannot be recomputed")

    def _own_streams(self, x: "DTensor") -> Tensor:
        return self.own.x if x is self.x else x.to_local()


def read(block: "HyperConnection", x: Tensor) -> tuple[Tensor, DTensorState] | None:
    """Read this process's tokens of the DTensor x. Return the sublayer's input and the state; None for a plain x."""
    if not dtensors.is_dtensor(x):
        return None
    own = find_own(x, 2, block.map.tokens_apart)
    h, state = block.read_in_best_form(own)
    return spread(h, x), DTensorState(x, state)


def find_own(x: Any, size_dims: int, tokens_apart: bool) -> Tensor:
    """Return this process's tokens of a DTensor. Raise an error unless the weights were prepared for this sharding.

    Args:
        x: The DTensor. [..., d] or [..., n, d]
        size_dims: The number of dimensions within a token, which are the last ones: 1 or 2.
        tokens_apart: Whether the weights were prepared for different tokens on each process.
    """
    for placement in x.placements:
        if not (placement.is_replicate() or (placement.is_shard() and placement.dim < x.ndim - size_dims)):
            raise ValueError(
                f"streams may be sharded along the batch or the sequence, not within a token: they are {x.placements}"
            )
    if {placement.is_shard() for placement in x.placements} != {tokens_apart}:
        raise ValueError(
            f"the connection's weights are not prepared for streams with the placements {x.placements}: "
            f"call jpmhc.parallelize_connections(model, mesh, sequence_parallel={not tokens_apart})"
        )
    return x.to_local()


def take_own(y: Tensor, x: "DTensor") -> Tensor:
    """Return the part of a sublayer's output y for the tokens of the DTensor x that this process has. [..., d]"""
    if not dtensors.is_dtensor(y):
        return y
    return y.redistribute(x.device_mesh, x.placements).to_local()


def spread(own: Tensor, x: "DTensor", size_dims: int = 2) -> "DTensor":
    """Wrap `own`, this process's tokens, in a DTensor with the mesh and placements of x.

    The last `size_dims` dimensions of x are within a token; the DTensor takes their sizes from `own`.
    """
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*x.shape[:-size_dims], *own.shape[x.ndim - size_dims :]))
    stride = own.new_empty(shape, device="meta").stride()
    return DTensor.from_local(own, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
