"""Adjacent connections, the write of one fused with the read of the next: a stack, or modules that read ahead."""

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from jpmhc import checks, modes
from jpmhc.connections import reference
from jpmhc.connections.contract import State
from jpmhc.connections.hyper import HyperConnection
from jpmhc.connections.recompute import StreamKeeper, choose_starts, may_recompute, run_untraced
from jpmhc.connections.streams import check_hidden_state, check_streams, flatten_streams, reduce_streams
from jpmhc.connections.sublayer import check_sublayer_output, first_of, route_keywords


class HyperConnectionStack(nn.Module):
    """Adjacent connections, applied in order; of a tuple that a sublayer returns, the first is written.

    An extra argument with a name goes to the sublayers that take that name, such as attention's mask; one without a
    name goes to all of them.

    Where two neighbours run on the fused kernels, the write of one and the read of the next are one pass over the
    streams; the result is the same. A connection with hooks, or of a subclass with its own steps, is called as a whole.

    Args:
        connections: One or more, all of the same `dim` and `streams`; also wrapped ones (`checkpoint_wrapper`).
        expand: Take a hidden state [..., dim] and copy it into all streams, in place of streams [..., streams, dim].
            With `reduce`, streams exist inside the stack alone, and there is nothing to forget at its ends. None takes
            streams too, and warns at the first call if they may be tokens: [batch, n, dim] with different streams.
        reduce: Return the mean over the streams [..., dim] instead of the streams; the fused kernels then take it
            while they write, and the last streams never reach memory.
        delayed: Let each sublayer read with the weights that the connection before it computed, as DeepSeek-V4.1 does,
            so that a sublayer need not wait for its connection's coefficients. The first sublayer reads stream 0, and
            `reduce` is the read of the last connection. This form runs in PyTorch, without the fused kernels.
        recompute: Keep for the backward pass only the streams of every so many connections, and write those between
            again from the sublayers' outputs; no sublayer runs twice, and the results are the same bits. "auto" chooses
            the connections so that the peak of memory is lowest: close together at the end of the stack, further and
            further apart towards its beginning. Under `torch.compile` the sublayers are then compiled each by itself.
            Where all saved tensors are in other hands (`torch.utils.checkpoint` of the whole stack, `save_on_cpu`), and
            under `torch.func` transforms and export, nothing is recomputed.
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
            # A wrapper, such as activation checkpointing's, shows what it wraps and is called as a whole.
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
        if recompute is not None:  # here, and not as a decorator, because it imports all of the compiler
            torch.compiler.disable(HyperConnectionStack._forward_recomputing, recursive=False)
            run_untraced()
        self.reduce, self.expand, self.delayed, self.recompute = reduce, expand, delayed, recompute
        if not self.connections:
            raise ValueError("a stack needs at least one HyperConnection, got none")
        shapes = sorted({(block.streams, block.dim) for block in self.connections})
        if len(shapes) > 1:
            sizes = " and ".join(f"{streams} streams of {dim}" for streams, dim in shapes)
            raise ValueError(f"the connections of a stack must have the same streams and dim, got {sizes}")
        if expand is not None:  # the streams are said to be streams, or made here
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
        """Run the connections one after the other; autograd keeps what it needs."""
        blocks: list[Any] = list(self.connections)
        begun: tuple[Tensor, State] | None = None  # what the block before has already read for this one
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

    def _forward_recomputing(self, x: Tensor, args: tuple[Any, ...], named: list[dict[str, Any]]) -> Tensor:
        """Run the connections so that autograd keeps the streams before some of them alone."""
        if not run_untraced()(may_recompute, (x,)):
            return self._forward_keeping(x, args, named)
        blocks: list[Any] = list(self.connections)
        starts: Container[int]
        if self.recompute == "auto":
            starts = run_untraced()(choose_starts, (len(blocks), blocks[0].streams))
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
        """Run the sublayers, each on the read weights of the connection before it."""
        lead, read = x.shape[:-2], None
        blocks: list[Any] = list(self.connections)
        for block, keywords in zip(blocks, named):
            flat = flatten_streams(x, block.streams, block.dim)
            h = flat[:, 0] if read is None else reference.gather(flat, read)
            (read, write, skip), _ = block.map(flat)
            y = first_of(block.sublayer(h.reshape(*lead, block.dim), *args, **keywords))
            y = reference.scale_output(block, check_sublayer_output(y, x)).reshape(-1, block.dim)
            x = reference.scatter(flat, y, write, skip).reshape(*lead, block.streams, block.dim)
            x = reference.normalise(block, x)
        if not self.reduce:
            return x
        assert read is not None
        return reference.gather(x.reshape(-1, *x.shape[-2:]), read).reshape(*lead, x.shape[-1])


def _may_take_apart(block: HyperConnection) -> bool:
    """Say whether a stack may run the block's steps itself: nobody else has a say in its forward."""
    if not isinstance(block, HyperConnection):
        return False
    own = "forward" in vars(block) or any(
        getattr(type(block), name) is not getattr(HyperConnection, name) for name in ("forward", "read", "write")
    )
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    return not own and not any(hooks) and not _has_any_global_hook() and block.sublayer is not None


ReadAhead = tuple[Tensor, int, bool, Any]  # the streams, their version, whether gradients were on, what was read


def may_read_ahead(owner: nn.Module, x: Tensor) -> bool:
    """Say whether the next layer's connection may read these streams before that layer is called.

    It may not where a compiler, another process, device or recomputation has a say in when that layer runs and its
    parameters are there.

    Args:
        owner: The module whose parameters the connection uses.
        x: The streams.
    """
    return not (
        torch.compiler.is_compiling()
        or x.is_inference()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or _may_be_recomputed()
        or next(owner.parameters()).device != x.device
    )


def _may_be_recomputed() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def keep_read(x: Tensor, read: Any) -> ReadAhead:
    """Return what was read, with the streams it was read from."""
    return x, x._version, torch.is_grad_enabled(), read


def use_read(ahead: ReadAhead | None, x: Tensor) -> Any:
    """Return what was read ahead, if it was read from these streams as they are now; else None.

    A layer that is recomputed reads for itself: what was read before it began is not there when it runs again.
    """
    if ahead is None or torch.compiler.is_compiling() or _may_be_recomputed():
        return None
    streams, version, differentiable, read = ahead
    fits = streams is x and version == x._version and (differentiable or not torch.is_grad_enabled())
    return read if fits else None
