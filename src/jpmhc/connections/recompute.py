r"""Streams that a stack does not keep for the backward pass, but writes again when it gets there.

A stack of L connections keeps L stream tensors, n times as large as a sublayer's input each. The write
$x_{l+1} = H_l x_l + w_l \otimes y_l$ needs only the streams before it, the sublayer's output and the coefficients, and
the last two are kept anyway. So of every k stream tensors one is kept, and the backward pass writes the others again,
k - 1 at a time, without running a sublayer twice. L/k + k tensors are then alive at most.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


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

    def find_streams(self, index: int) -> Tensor:
        """Return the streams after so many writes. Of those after the next ones, nothing is needed any more."""
        for known in [k for k in self.streams if k > index + 1]:
            del self.streams[known]
        start = max(k for k in self.streams if k <= index)
        x = self.streams[start]
        with (
            torch.enable_grad()
        ):  # as when they were first written, so that the same code runs; nothing asks for gradients
            for k in range(start, index):
                x = self.streams[k + 1] = self.writes[k](x)
        return x


class StreamKeeper:
    """Sees what autograd saves in a stack's steps, and replaces streams that are not kept by the way to write them.

    Args:
        interval: Of so many stream tensors, the first is kept.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.segment: Segment
        self.places: dict[int, tuple[Segment, int]] = {}  # of the streams in use, by the address of their memory
        self.new: tuple[int, ...] | None = None

    def begin(self, x: Tensor) -> None:
        """Keep the streams, and start a segment with them."""
        self.segment = Segment(x)
        self.places = {}

    def note_write(self, write: Callable[[Tensor], Tensor], x: Tensor) -> None:
        """Note the write that made the streams x; after `interval` of them, x is kept and a segment starts anew."""
        self.segment.writes.append(write)
        if len(self.segment.writes) == self.interval:
            self.begin(x)
        else:
            self.places = {x.untyped_storage().data_ptr(): (self.segment, len(self.segment.writes))}

    def watch(self, new: tuple[int, ...] | None = None) -> saved_tensors_hooks:
        """Return the context for a step. `new` is the shape of streams that the step makes and saves by itself."""
        last = len(self.segment.writes) + 1 == self.interval  # these are kept
        self.new = None if last else new
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        place = self.places.get(address)
        if place is None and self.new == tensor.shape and address != self._first_address():
            place = (self.segment, len(self.segment.writes) + 1)
        # Detached: what autograd saves must not hold autograd's graph.
        return tensor.detach() if place is None else (*place, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _first_address(self) -> int:
        return self.segment.streams[0].untyped_storage().data_ptr()


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    segment, index, size, stride, offset = saved
    return segment.find_streams(index).as_strided(size, stride, offset)
