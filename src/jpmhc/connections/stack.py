"""Fuse each connection's write with the read of the next connection: in a stack, or in layers that read ahead."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from jpmhc import checks, modes
from jpmhc.connections.contract import State
from jpmhc.connections.hyper import HyperConnection
from jpmhc.connections.recompute import StreamKeeper, choose_starts, count_saved_states, may_recompute
from jpmhc.connections.streams import check_hidden_state, check_streams, reduce_streams
from jpmhc.connections.sublayer import first_of, route_keywords


class HyperConnectionStack(nn.Module):
    """A sequence of connections. If a sublayer returns a tuple, its first item is written to the streams.

    An extra keyword argument, such as attention's mask, goes to the sublayers that accept its name. An extra positional
    argument goes to all sublayers.

    If two neighbours use the fused kernels, the write of the first and the read of the second are one pass over the
    streams, with the same result. A connection with hooks, or of a subclass with its own steps, is called as a whole.

    Args:
        connections: One or more connections with the same `dim` and `streams`, also wrapped in `checkpoint_wrapper`.
        expand: True takes a hidden state [..., dim] and copies it into all streams; with `reduce`, streams then exist
            only inside the stack. False takes streams [..., streams, dim]. None takes streams too, and warns at the
            first call if they may be tokens: [batch, n, dim] with different streams.
        reduce: Return the mean over the streams [..., dim] instead of the streams. The fused kernels take the mean
            while they write, and do not store the last streams.
        delayed: Let each sublayer read with the read weights of the connection before it, as DeepSeek-V4.1 does, so
            that a sublayer need not wait for its own connection's coefficients. The first sublayer reads stream 0, and
            `reduce` reads with the last connection's weights. The fused kernels then need one pass instead of two.
        recompute: The number of connections per stream tensor in memory, or "auto". The backward pass recomputes other
            streams from the sublayers' outputs; no sublayer runs twice, and the results are the same bits. "auto" gives
            the lowest peak of memory: kept tensors are close together at the end of the stack, and further apart
            towards its beginning. Under `torch.compile` each sublayer is then compiled by itself. Nothing is recomputed
            inside other hooks on saved tensors (`torch.utils.checkpoint` of the whole stack, `save_on_cpu`), under
            `torch.func` transforms and under export.
    """

    def __init__(
        self,
        connections: Iterable[HyperConnection],
        reduce: bool = False,
        *,
        expand: bool | None = None,
        delayed: bool = False,
        recompute: int | str | None = None,
    ) -> None:
        super().__init__()
        lone = isinstance(connections, nn.Module) and not isinstance(connections, nn.ModuleList | nn.Sequential)
        if lone or isinstance(connections, dict) or not isinstance(connections, Iterable):
            raise ValueError(f"a stack is made of a list of HyperConnections, got one {type(connections).__name__}")
        blocks = list(connections)
        for block in blocks:
            # A wrapper, such as activation checkpointing's, has the connection's attributes and is called as a whole.
            if not all(hasattr(block, name) for name in ("streams", "dim", "sublayer", "map")):
                raise ValueError(f"a stack is made of HyperConnections, got {type(block).__name__}")
        self.connections = nn.ModuleList(blocks)
        checks.switch(reduce, "reduce")
        if expand is not None:
            checks.switch(expand, "expand")
        checks.switch(delayed, "delayed")
        if recompute is not None and recompute != "auto":
            checks.whole_number(recompute, 'recompute, unless it is "auto" or None,')  # type: ignore[arg-type]
        if recompute is not None and delayed:
            raise ValueError("a stack with delayed=True keeps all its streams: leave recompute out")
        self.reduce, self.expand, self.delayed, self.recompute = reduce, expand, delayed, recompute
        if not self.connections:
            raise ValueError("a stack needs at least one HyperConnection, got none")
        shapes = sorted({(block.streams, block.dim) for block in self.connections})
        if len(shapes) > 1:
            sizes = " and ".join(f"{streams} streams of {dim}" for streams, dim in shapes)
            raise ValueError(f"the connections of a stack must have the same streams and dim, got {sizes}")
        if expand is not None:  # the caller says that x is streams, or the stack makes the streams
            for module in self.modules():
                if isinstance(module, HyperConnection):
                    module._begins = False

    def __len__(self) -> int:
        return len(self.connections)

    def __getitem__(self, index: int) -> nn.Module:
        return self.connections[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.connections)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        blocks: list[Any] = list(self.connections)
        if self.expand:
            check_hidden_state(x, blocks[0].dim)
            x = x.unsqueeze(-2)  # n equal streams may be given once
        else:
            check_streams(x, blocks[0].streams, blocks[0].dim)
            if isinstance(blocks[0], HyperConnection):
                blocks[0].look_at_first_streams(x)
        named = route_keywords(blocks, args, kwargs)
        if self.delayed:
            return self._forward_delayed(x, args, named)
        if self.recompute is not None and torch.is_grad_enabled() and not modes.is_exported():
            return self._forward_recomputing(x, args, named)
        return self._forward_keeping(x, args, named)

    def _forward_keeping(self, x: Tensor, args: tuple[Any, ...], named: list[dict[str, Any]]) -> Tensor:
        """Run the connections in order; autograd saves all streams."""
        blocks: list[Any] = list(self.connections)
        begun: tuple[Tensor, State] | None = None  # this block's read, if the block before did it
        separable = [_may_take_apart(block) for block in blocks] + [False]
        for k, block in enumerate(blocks):
            if not separable[k]:
                x = first_of(block(x, *args, **named[k]))
                continue
            h, state = begun or block.read(x)
            begun = None
            y = first_of(block.sublayer(h, *args, **named[k]))
            if k + 1 == len(blocks) and self.reduce:
                return block.write_mean(x, y, state)
            if separable[k + 1]:
                x, h, state = block.write_read(x, y, state, blocks[k + 1])
                begun = h, state
            else:
                x = block.write(x, y, state)
        return reduce_streams(x) if self.reduce else x

    @torch._disable_dynamo(recursive=False)
    def _forward_recomputing(self, x: Tensor, args: tuple[Any, ...], named: list[dict[str, Any]]) -> Tensor:
        """Run the connections in order; autograd saves the input streams of only some connections."""
        if not may_recompute(x):
            return self._forward_keeping(x, args, named)
        blocks: list[Any] = list(self.connections)
        starts: Container[int]
        if self.recompute == "auto":
            saved = tuple(count_saved_states(block.sublayer) for block in blocks)
            starts = choose_starts(saved, blocks[0].streams)
        else:
            starts = range(0, len(blocks) + 1, int(self.recompute or 1))
        keeper = StreamKeeper(starts, x)
        begun: tuple[Tensor, State] | None = None
        separable = [_may_take_apart(block) for block in blocks] + [False]
        for k, block in enumerate(blocks):
            if not separable[k]:
                x = first_of(block(x, *args, **named[k]))
                keeper.begin(x)
                continue
            h, state = begun or keeper.read(block, x)
            y = first_of(block.sublayer(h, *args, **named[k]))
            if k + 1 == len(blocks) and self.reduce:
                return keeper.write_mean(block, x, y, state)
            x, begun = keeper.write(block, x, y, state, blocks[k + 1] if separable[k + 1] else None)
        return reduce_streams(x) if self.reduce else x

    def _forward_delayed(self, x: Tensor, args: tuple[Any, ...], named: list[dict[str, Any]]) -> Tensor:
        """Run the connections in order, each sublayer with the read weights of the connection before it."""
        blocks: list[Any] = list(self.connections)
        h, (_, state) = x[..., 0, :], blocks[0].read(x)
        for k, block in enumerate(blocks):
            y = first_of(block.sublayer(h, *args, **named[k]))
            if k + 1 == len(blocks):
                x = block.write(x, y, state)
            else:
                x, h, state = block.write_read(x, y, state, blocks[k + 1], delayed=True)
        return state.gather(x) if self.reduce else x


def _may_take_apart(block: HyperConnection) -> bool:
    """Return whether a stack may run the block's steps one by one: no hook or subclass changes its forward."""
    if not isinstance(block, HyperConnection):
        return False
    own = "forward" in vars(block) or any(
        getattr(type(block), name) is not getattr(HyperConnection, name) for name in ("forward", "read", "write")
    )
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    return not own and not any(hooks) and not _has_any_global_hook() and block.sublayer is not None


# the streams, their version, whether gradients were on, and the read's result
ReadAhead = tuple[Tensor, int, bool, tuple[Tensor, State]]


def may_read_ahead(parameter: Tensor, x: Tensor) -> bool:
    """Return whether the next layer's connection may read the streams x before that layer is called.

    The answer is no if a compiler, another process or a recomputation decides when that layer runs and when its
    parameters are available. The answer is also no if the layer is on another device.

    Args:
        parameter: A parameter that the connection uses.
    """
    return not (
        torch.compiler.is_compiling()
        or x.is_inference()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or _may_be_recomputed()
        or parameter.device != x.device
    )


def _may_be_recomputed() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keep_read(x: Tensor, read: tuple[Tensor, State]) -> ReadAhead:
    """Return a read's result with the facts that `use_read` checks: the streams x, their version, the gradient mode."""
    return x, x._version, torch.is_grad_enabled(), read


def use_read(ahead: ReadAhead | None, x: Tensor) -> tuple[Tensor, State] | None:
    """Return the result in `ahead` if that read was of the streams x, and x has not changed since; else None.

    A layer that is recomputed reads for itself, because the earlier result does not exist when the layer runs again.
    """
    if ahead is None or _may_be_recomputed():
        return None
    streams, version, differentiable, read = ahead
    fits = streams is x and version == x._version and (differentiable or not torch.is_grad_enabled())
    return read if fits else None
