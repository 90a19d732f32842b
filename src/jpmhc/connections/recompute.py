r"""Streams that a stack does not keep for the backward pass, but writes again when it gets there.

A stack of L connections keeps L stream tensors, n times as large as a sublayer's input each. The write
$x_{l+1} = H_l x_l + w_l \otimes y_l$ needs only the streams before it, the sublayer's output and the coefficients, and
the last two are kept anyway. So of every k stream tensors one is kept, and the backward pass writes the others again,
k - 1 at a time, without running a sublayer twice. L/k + k tensors are then alive at most. The backward pass begins
after the last kept tensor, so that the streams after that one are not given up in the first place.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from jpmhc import modes
from jpmhc.connections.fused import is_fused
from jpmhc.connections.kept import Kept, keep


def choose_interval(connections: int, streams: int) -> int:
    r"""Return the k that keeps least: $\sqrt{nL/(n+2)}$, as sublayers keep about two of n parts themselves."""
    return max(1, round(math.sqrt(streams * connections / (streams + 2))))


def may_recompute(x: Tensor) -> bool:
    """Say whether this module decides what is kept of the streams, and can tell them apart.

    It does not decide where somebody else takes all saved tensors: activation checkpointing, `save_on_cpu`. Streams are
    told apart by their memory, which empty and transformed ones do not have.
    """
    saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return not saved_elsewhere and x.numel() > 0 and not modes.is_transformed()


class Segment:
    """One kept stream tensor and the writes after it, from which the streams up to the next kept one come back.

    Args:
        first: The streams that are kept.
    """

    def __init__(self, first: Tensor) -> None:
        self.streams: dict[int, Kept] = {0: keep(first)}  # by the number of writes before them
        self.writes: list[Callable[[Tensor], Tensor]] = []

    def forget_streams(self) -> None:
        """Give up all streams but the first ones, now that the forward pass is behind them."""
        self.streams = {0: self.streams[0]}

    def find_streams(self, index: int) -> Tensor:
        """Return the streams after `index` writes. Those beyond the next ones, which the backward pass has left behind,
        are given up.
        """
        for known in [k for k in self.streams if k > index + 1]:
            del self.streams[known]
        return run_untraced()(self._write_again, (index,))

    def _write_again(self, index: int) -> Tensor:
        start = max(k for k in self.streams if k <= index)
        x = self.streams[start].find()
        with torch.enable_grad():  # as they were first written, so that the same code runs; the result is detached
            for k in range(start, index):
                self.streams[k + 1] = keep(self.writes[k](x))
                x = self.streams[k + 1].tensor
        return x


_untraced: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None


def run_untraced() -> Callable[[Callable[..., Any], tuple[Any, ...]], Any]:
    """Return a function that calls another one out of `torch.compile`'s sight; made when it is first needed, as it
    imports all of the compiler.
    """
    global _untraced
    if _untraced is None:
        _untraced = torch.compiler.disable(lambda function, given: function(*given))
    return _untraced


class StreamKeeper:
    """Runs the steps of a stack so that autograd saves, for streams that are not kept, the way to write them again.

    No compiler traces the steps: it would trace those of every connection anew, and nothing of what is replaced here.

    Args:
        interval: Of so many stream tensors, the first is kept.
        first: The streams that come first.
    """

    def __init__(self, interval: int, first: Tensor) -> None:
        self.interval = interval
        self.segment: Segment = run_untraced()(Segment, (first,))
        self.places: dict[int, tuple[Segment, int]] = {}  # of the streams in use, by the address of their memory
        self.saved_shape: tuple[int, ...] | None = None

    def begin(self, x: Tensor) -> None:
        """Keep the streams, and start a segment with them."""
        run_untraced()(self._begin, (x,))

    def read(self, block: Any, x: Tensor) -> tuple[Tensor, Any]:
        """Run a connection's read."""
        return run_untraced()(self._watch, (block.read, (x,), None))

    def write_mean(self, block: Any, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Run the last connection's write, and return the mean of the new streams."""
        return run_untraced()(self._watch, (block.write_mean, (x, y, state), None))

    def write(self, block: Any, x: Tensor, y: Tensor, state: Any, following: Any) -> tuple[Tensor, Any]:
        """Run a connection's write. Return the new streams, and what the connection `following` reads, if it is fused
        with it.
        """
        return run_untraced()(self._write, (block, x, y, state, following))

    def _begin(self, x: Tensor) -> None:
        self.segment.forget_streams()
        self.segment = Segment(x)
        self.places = {}

    def _watch(self, step: Callable[..., Any], given: tuple[Any, ...], saved_shape: tuple[int, ...] | None) -> Any:
        """Run a step. `saved_shape` is the shape of new streams that the step saves by itself."""
        starts_segment = len(self.segment.writes) + 1 == self.interval  # the new streams will be kept
        self.saved_shape = None if starts_segment else saved_shape
        with saved_tensors_hooks(self._pack, _unpack):
            return step(*given)

    def _write(self, block: Any, x: Tensor, y: Tensor, state: Any, following: Any) -> tuple[Tensor, Any]:
        joined = following is not None and is_fused(state) and following.runs_fused(x) and block.layer_norm is None
        write_again, begun = block.make_rewrite(y, state, following if joined else None), None
        if joined:
            shape = (*x.shape[:-2], block.streams, block.dim)
            x, *begun = self._watch(block.write_read, (x, y, state, following), shape)
        else:
            x = self._watch(block.write, (x, y, state), None)
        self.segment.writes.append(write_again)
        if len(self.segment.writes) == self.interval:
            self._begin(x)
        else:
            place = self.segment, len(self.segment.writes)
            self.segment.streams[place[1]] = keep(x)
            self.places = {x.untyped_storage().data_ptr(): place}
        return x, begun

    def _pack(self, tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        place = self.places.get(address)
        first = self.segment.streams[0].tensor.untyped_storage().data_ptr()
        if place is None and self.saved_shape == tensor.shape and address != first:
            place = (self.segment, len(self.segment.writes) + 1)
        return keep(tensor) if place is None else (*place, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Kept):
        return saved.find()
    segment, index, size, stride, offset = saved
    return segment.find_streams(index).as_strided(size, stride, offset)
