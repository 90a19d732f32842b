r"""Streams that a stack does not keep for the backward pass, but writes again when it gets there.

A stack of L connections keeps L stream tensors, n times as large as a sublayer's input each. The write
$x_{l+1} = H_l x_l + w_l \otimes y_l$ needs only the streams before it, the sublayer's output and the coefficients, and
the last two are kept anyway. So of every k stream tensors one is kept, and the backward pass writes the others again,
k - 1 at a time, without running a sublayer twice. L/k + k tensors are then alive at most. The backward pass begins
with the last k, so that these are not given up in the first place.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from jpmhc.connections.fused import is_fused


def choose_interval(connections: int, streams: int) -> int:
    r"""Return the k that keeps least: $\sqrt{nL/(n+2)}$, as sublayers keep about two of n parts themselves."""
    return max(1, round(math.sqrt(streams * connections / (streams + 2))))


class Segment:
    """One kept stream tensor and the writes after it, from which the streams up to the next kept one come back.

    Args:
        first: The streams that are kept.
    """

    def __init__(self, first: Tensor) -> None:
        # Detached throughout: autograd holds the segment, so a segment that held autograd's graph would never die.
        self.streams: dict[int, Tensor] = {0: first.detach()}
        self.writes: list[Callable[[Tensor], Tensor]] = []

    def forget_streams(self) -> None:
        """Give up all streams but the first ones, now that the forward pass is behind them."""
        self.streams = {0: self.streams[0]}

    def find_streams(self, index: int) -> Tensor:
        """Return the streams after so many writes. Of those after the next ones, nothing is needed any more."""
        for known in [k for k in self.streams if k > index + 1]:
            del self.streams[known]
        return run_untraced()(self._write_again, (index,))

    def _write_again(self, index: int) -> Tensor:
        start = max(k for k in self.streams if k <= index)
        x = self.streams[start]
        with torch.enable_grad():  # as they were first written, so that the same code runs; nothing asks for gradients
            for k in range(start, index):
                x = self.streams[k + 1] = self.writes[k](x)
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
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.segment: Segment | None = None
        self.places: dict[int, tuple[Segment, int]] = {}  # of the streams in use, by the address of their memory
        self.new: tuple[int, ...] | None = None

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
        if self.segment is not None:
            self.segment.forget_streams()
        self.segment = Segment(x)
        self.places = {}

    def _watch(self, step: Callable[..., Any], given: tuple[Any, ...], new: tuple[int, ...] | None) -> Any:
        """Run a step. `new` is the shape of streams that the step makes and saves by itself."""
        assert self.segment is not None
        last = len(self.segment.writes) + 1 == self.interval  # these are kept
        self.new = None if last else new
        with saved_tensors_hooks(self._pack, _unpack):
            return step(*given)

    def _write(self, block: Any, x: Tensor, y: Tensor, state: Any, following: Any) -> tuple[Tensor, Any]:
        assert self.segment is not None
        joined = following is not None and is_fused(state) and following.runs_fused(x)
        write_again, begun = block.make_rewrite(y, state, following if joined else None), None
        if joined:
            new = (*x.shape[:-2], block.streams, block.dim)
            x, *begun = self._watch(block.write_read, (x, y, state, following), new)
        else:
            x = self._watch(block.write, (x, y, state), None)
        self.segment.writes.append(write_again)
        if len(self.segment.writes) == self.interval:
            self._begin(x)
        else:
            place = self.segment, len(self.segment.writes)
            self.segment.streams[place[1]] = x.detach()
            self.places = {x.untyped_storage().data_ptr(): place}
        return x, begun

    def _pack(self, tensor: Tensor) -> Any:
        assert self.segment is not None
        address = tensor.untyped_storage().data_ptr()
        place = self.places.get(address)
        first = self.segment.streams[0].untyped_storage().data_ptr()
        if place is None and self.new == tensor.shape and address != first:
            place = (self.segment, len(self.segment.writes) + 1)
        # Detached: what autograd saves must not hold autograd's graph.
        return tensor.detach() if place is None else (*place, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    segment, index, size, stride, offset = saved
    return segment.find_streams(index).as_strided(size, stride, offset)
