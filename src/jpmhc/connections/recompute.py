r"""Recomputed streams: the backward pass of a stack writes most of them again, instead of keeping them.

A stack of L connections keeps L stream tensors, n times as large as a sublayer's input each. The write
$x_{l+1} = H_l x_l + w_l \otimes y_l$ needs only the streams before it, the sublayer's output and the coefficients, and
the last two are kept anyway. So only some stream tensors are kept. Each starts a segment of connections, and when the
backward pass reaches a segment, it writes the other streams there again, without running a sublayer twice. It begins in
the last segment, whose streams are therefore not freed at all.

Memory is fullest when the backward pass begins: the activations of all sublayers are then alive, and every connection
that it has passed frees some. So the segments at the end of the stack are short, and those before them longer and
longer, as there is more and more room to write streams again. Counted in stream tensors, while the j-th segment is
differentiated, whose connections are a to b - 1, there are alive j kept tensors, b - a - 1 that were written again, and
4/n for each of the b sublayers that are still to come, which keep four hidden states at least: the input, its norm, an
inner state and the output. The segments are chosen so that the largest of the sums $j + (b - a - 1) + 4b/n$ is as small
as it can be.
"""

import functools
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from jpmhc import dtensors, modes

if TYPE_CHECKING:
    from jpmhc.connections.contract import State
    from jpmhc.connections.hyper import HyperConnection

SUBLAYER_KEEPS = 4  # hidden states, at least: the input, its norm, an inner state and the output


@functools.cache
def choose_starts(connections: int, streams: int) -> frozenset[int]:
    """Return the numbers of the connections before which streams are kept, so that the peak of memory is lowest.

    For a given limit of memory, each segment from the first one on is as long as the limit allows: the further one
    reaches, the further the next can. The limit grows until the segments reach the end of the stack. Other choices may
    have the same peak; this one keeps few streams, which is best if sublayers keep more than is assumed.
    """
    limit = streams + SUBLAYER_KEEPS * connections  # in hidden states; one kept tensor is needed in any case
    while True:
        starts, end = [0], 0
        while end < connections:
            end = (limit + streams * (starts[-1] + 1 - len(starts))) // (streams + SUBLAYER_KEEPS)
            if end <= starts[-1]:  # no room for another connection
                break
            starts.append(end)
        else:
            return frozenset(starts[:-1])
        limit += 1


class Kept(NamedTuple):
    """A detached tensor for the backward pass: autograd holds it, and it must not hold the graph in turn."""

    tensor: Tensor
    version: int  # counts the changes in place

    def find(self) -> Tensor:
        """Return the tensor. Raise an error if it was changed in place, as autograd does."""
        if _count_changes(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass of a stack needs was changed in "
                "place after the forward pass: change a copy instead"
            )
        return self.tensor


def keep(tensor: Tensor) -> Kept:
    """Keep a tensor as it is now."""
    return Kept(tensor.detach(), _count_changes(tensor))


def _count_changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count


def may_recompute(x: Tensor) -> bool:
    """Say whether a stack may write these streams again in the backward pass.

    It may not where other hooks take all saved tensors, as activation checkpointing and `save_on_cpu` do. And it tells
    streams apart by their memory, which empty and transformed ones and DTensors do not have.
    """
    saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return not (saved_elsewhere or x.numel() == 0 or modes.is_transformed() or dtensors.is_dtensor(x))


class Segment:
    """One kept stream tensor and the writes after it, from which the streams up to the next kept one come back.

    Args:
        first: The streams that are kept.
    """

    def __init__(self, first: Tensor) -> None:
        self.streams: dict[int, Kept] = {0: keep(first)}  # by the number of writes before them
        self.writes: list[Callable[[Tensor], Tensor]] = []

    def forget_streams(self) -> None:
        """Free all streams but the first ones, which the forward pass has left behind."""
        self.streams = {0: self.streams[0]}

    def find_streams(self, index: int) -> Tensor:
        """Return the streams after `index` writes. Free the streams that the backward pass no longer needs."""
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
    """Return a function that calls another one, untraced by `torch.compile`.

    It is made when it is first needed, because that imports all of the compiler.
    """
    global _untraced
    if _untraced is None:
        _untraced = torch.compiler.disable(lambda function, given: function(*given))
    return _untraced


class StreamKeeper:
    """Runs the steps of a stack. In place of streams that are not kept, autograd saves how to write them again.

    No compiler traces the steps: it would trace every connection anew, without what is replaced here.

    Args:
        starts: Numbers of the connections before which streams are kept, the first being 0; with the number of all
            connections, the streams after the last one are kept too.
        first: The streams that come first.
    """

    def __init__(self, starts: Container[int], first: Tensor) -> None:
        self.starts = starts
        self.passed = 0  # connections that have written
        self.segment: Segment = run_untraced()(Segment, (first,))
        self.numbers: dict[int, tuple[Segment, int]] = {}  # of the streams in use, by their memory's address
        self.saved_shape: tuple[int, ...] | None = None

    def begin(self, x: Tensor) -> None:
        """Keep the streams that a connection returned as a whole, and start a segment with them."""
        run_untraced()(self._begin, (x,))

    def read(self, block: "HyperConnection", x: Tensor) -> "tuple[Tensor, State]":
        """Run a connection's read."""
        return run_untraced()(self._watch, (block.read, (x,), None))

    def write_mean(self, block: "HyperConnection", x: Tensor, y: Tensor, state: "State") -> Tensor:
        """Run the last connection's write, and return the mean of the new streams."""
        return run_untraced()(self._watch, (block.write_mean, (x, y, state), None))

    def write(
        self, block: "HyperConnection", x: Tensor, y: Tensor, state: "State", following: "HyperConnection | None"
    ) -> "tuple[Tensor, tuple[Tensor, State] | None]":
        """Run a write. Return the new streams, and the read of `following` if it is fused with the write."""
        return run_untraced()(self._write, (block, x, y, state, following))

    def _begin(self, x: Tensor) -> None:
        self.passed += 1
        self.segment.forget_streams()
        self.segment = Segment(x)
        self.numbers = {}

    def _watch(self, step: Callable[..., Any], given: tuple[Any, ...], saved_shape: tuple[int, ...] | None) -> Any:
        """Run a step. `saved_shape` is the shape of new streams that the step saves by itself."""
        starts_segment = self.passed + 1 in self.starts  # the new streams will be kept
        self.saved_shape = None if starts_segment else saved_shape
        # Autograd holds the hook as long as the graph; the hook must not hold this keeper and so the last streams.
        pack: Any = weakref.WeakMethod(self._pack)
        with saved_tensors_hooks(lambda tensor: pack()(tensor), _unpack):
            return step(*given)

    def _write(
        self, block: "HyperConnection", x: Tensor, y: Tensor, state: "State", following: "HyperConnection | None"
    ) -> "tuple[Tensor, tuple[Tensor, State] | None]":
        joined = following is not None and state.join(block, x, following) is not None
        write_again, begun = state.make_rewrite(block, y, following if joined else None), None
        if joined:
            shape = (*x.shape[:-2], block.streams, block.dim)
            x, h, following_state = self._watch(block.write_read, (x, y, state, following), shape)
            begun = h, following_state
        else:
            x = self._watch(block.write, (x, y, state), None)
        self.segment.writes.append(write_again)
        if self.passed + 1 in self.starts:
            self._begin(x)
        else:
            self.passed += 1
            number = len(self.segment.writes)
            self.segment.streams[number] = keep(x)
            self.numbers = {x.untyped_storage().data_ptr(): (self.segment, number)}
        return x, begun

    def _pack(self, tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        streams = self.numbers.get(address)
        first = self.segment.streams[0].tensor.untyped_storage().data_ptr()
        if streams is None and self.saved_shape == tensor.shape and address != first:
            streams = (self.segment, len(self.segment.writes) + 1)
        return keep(tensor) if streams is None else (*streams, tensor.size(), tensor.stride(), tensor.storage_offset())


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Kept):
        return saved.find()
    segment, index, size, stride, offset = saved
    return segment.find_streams(index).as_strided(size, stride, offset)
