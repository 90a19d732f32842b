r"""Recompute most of a stack's streams in the backward pass, instead of keeping them in memory.

Without recomputation, a stack of L connections keeps L stream tensors, each n times as large as a sublayer's input. The
write $x_{l+1} = H_l x_l + w_l \otimes y_l$ needs only the streams before it, the sublayer's output and the
coefficients, and autograd keeps the output and the coefficients anyway. So only some stream tensors are kept. Each of
them starts a segment of connections. When the backward pass reaches a segment, it repeats the segment's writes to
recompute the other streams, without running a sublayer twice. The backward pass begins in the last segment, so that the
streams of this segment are not freed at all.

The peak of memory is at the beginning of the backward pass: all sublayers' activations are then in memory, and the
backward pass of each connection frees some. So the last segments of the stack are short, and earlier segments are
longer, because more memory is free for recomputed streams. Let the j-th segment consist of the connections a to b - 1.
During its backward pass the memory contains, in units of one stream tensor, j kept tensors, b - a - 1 recomputed ones,
and 4/n for each of the b sublayers up to its end: a sublayer keeps at least four hidden states, which are its input,
the normed input, an inner state and the output. The segments minimise the largest of the sums
$j + (b - a - 1) + 4b/n$. A checkpointed sublayer counts 2/n instead of 4/n.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from jpmhc import dtensors, modes

if TYPE_CHECKING:
    from jpmhc.connections.contract import State
    from jpmhc.connections.hyper import HyperConnection

SUBLAYER_KEEPS = 4  # hidden states, at least: the input, its norm, an inner state and the output
CHECKPOINTED_KEEPS = 2  # the input and the output


@torch._disable_dynamo
def count_saved_states(sublayer: object) -> int:
    """Return a lower bound on the number of hidden states that autograd keeps for a sublayer.

    A sublayer is known to be checkpointed if it contains PyTorch's `checkpoint_wrapper` or, in training, a layer of
    `transformers` with gradient checkpointing.
    """
    for module in sublayer.modules() if isinstance(sublayer, nn.Module) else ():
        settings = vars(module)
        if "_checkpoint_wrapped_module" in settings["_modules"]:
            return CHECKPOINTED_KEEPS
        if settings.get("gradient_checkpointing") is True and module.training:
            return CHECKPOINTED_KEEPS
    return SUBLAYER_KEEPS


@torch._disable_dynamo
@functools.cache
def choose_starts(sublayer_states: tuple[int, ...], streams: int) -> frozenset[int]:
    """Return the indices of the connections whose input streams are kept, for the lowest peak of memory.

    For a given limit of memory, each segment is as long as the limit allows, because a longer segment lets the next one
    reach further. The limit grows until the segments reach the end of the stack. Other choices may have the same peak;
    this one keeps few streams, which is best if sublayers keep more hidden states than `sublayer_states` says.

    Args:
        sublayer_states: The number of hidden states that autograd keeps for each connection's sublayer.
    """
    totals = [0, *itertools.accumulate(sublayer_states)]
    for limit in itertools.count(streams + totals[-1]):  # in hidden states; one kept tensor is needed in any case
        starts = [0]
        while starts[-1] < len(sublayer_states):
            first = streams * (len(starts) - starts[-1] - 1)
            ends = range(starts[-1] + 1, len(sublayer_states) + 1)
            last = max((end for end in ends if first + streams * end + totals[end] <= limit), default=None)
            if last is None:
                break
            starts.append(last)
        else:
            return frozenset(starts[:-1])
    raise AssertionError("no limit is enough")


class SavedTensor(NamedTuple):
    """A tensor saved for the backward pass, detached so that it does not keep autograd's graph in memory."""

    tensor: Tensor
    version: int  # the number of its changes in place

    def find(self) -> Tensor:
        """Return the tensor. Raise an error if it was changed in place after it was saved, as autograd does."""
        if _count_changes(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass of a stack needs was changed in "
                "place after the forward pass: change a copy instead"
            )
        return self.tensor


def save_tensor(tensor: Tensor) -> SavedTensor:
    """Save a tensor for the backward pass, with the number of its changes in place so far."""
    return SavedTensor(tensor.detach(), _count_changes(tensor))


def _count_changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no version


@torch._disable_dynamo
def may_recompute(x: Tensor) -> bool:
    """Return whether a stack may recompute the streams x in the backward pass.

    The answer is no inside other hooks on saved tensors, such as the hooks of activation checkpointing and
    `save_on_cpu`. The answer is also no for DTensors and for empty or transformed streams, because streams are
    identified by their memory address.
    """
    saved_elsewhere = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return not (saved_elsewhere or x.numel() == 0 or modes.is_transformed() or dtensors.is_dtensor(x))


class Segment:
    """A stream tensor in memory, and the writes after it, which are repeated to recompute the streams that follow."""

    def __init__(self, first: Tensor) -> None:
        self.streams: dict[int, SavedTensor] = {0: save_tensor(first)}  # by the number of writes before them
        self.writes: list[Callable[[Tensor], Tensor]] = []

    def forget_streams(self) -> None:
        """Free all streams of the segment except the first stream tensor, after the forward pass has used them."""
        self.streams = {0: self.streams[0]}

    @torch._disable_dynamo
    def find_streams(self, index: int) -> Tensor:
        """Return the streams after the first `index` writes. Free streams that the backward pass no longer needs."""
        for known in [k for k in self.streams if k > index + 1]:
            del self.streams[known]
        start = max(k for k in self.streams if k <= index)
        x = self.streams[start].find()
        with torch.enable_grad():  # so that the code of the forward pass runs; `save_tensor` detaches the result
            for k in range(start, index):
                self.streams[k + 1] = save_tensor(self.writes[k](x))
                x = self.streams[k + 1].tensor
        return x


class StreamKeeper:
    """An object that runs a stack's steps such that autograd saves only a few stream tensors and recomputes the others.

    No compiler traces the steps (`_disable_dynamo` is `torch.compiler.disable` without the import of the compiler): a
    compiler would trace every connection anew, and keep all streams.

    Args:
        starts: The indices of the connections whose input streams are kept, 0 among them. In a stack of L connections,
            the index L means the output of the last connection.
    """

    @torch._disable_dynamo
    def __init__(self, starts: Container[int], first: Tensor) -> None:
        self.starts = starts
        self.passed = 0  # the number of connections that have written
        self.segment = Segment(first)
        self.numbers: dict[int, tuple[Segment, int]] = {}  # {memory address of streams in use: their segment and index}
        self.saved_shape: tuple[int, ...] | None = None

    @torch._disable_dynamo
    def begin(self, x: Tensor) -> None:
        """Start a segment with the kept streams x, the output of a connection that was called as a whole."""
        self.passed += 1
        self.segment.forget_streams()
        self.segment = Segment(x)
        self.numbers = {}

    @torch._disable_dynamo
    def read(self, block: "HyperConnection", x: Tensor) -> "tuple[Tensor, State]":
        """Run a connection's read, and return its results."""
        return self._watch(block.read, (x,), None)

    @torch._disable_dynamo
    def write_mean(self, block: "HyperConnection", x: Tensor, y: Tensor, state: "State") -> Tensor:
        """Run the last connection's write, and return the mean of the new streams."""
        return self._watch(block.write_mean, (x, y, state), None)

    def _watch(self, step: Callable[..., Any], arguments: tuple[Any, ...], saved_shape: tuple[int, ...] | None) -> Any:
        """Run a step under the hook on saved tensors.

        `saved_shape` is the shape of the new streams if the step itself saves them for its backward pass, else None.
        """
        starts_segment = self.passed + 1 in self.starts  # the new streams will be kept
        self.saved_shape = None if starts_segment else saved_shape
        # Autograd keeps the hook as long as the graph. A weak reference in the hook lets the last streams be freed.
        pack: Any = weakref.WeakMethod(self._pack)
        with saved_tensors_hooks(lambda tensor: pack()(tensor), _unpack):
            return step(*arguments)

    @torch._disable_dynamo
    def write(
        self, block: "HyperConnection", x: Tensor, y: Tensor, state: "State", following: "HyperConnection | None"
    ) -> "tuple[Tensor, tuple[Tensor, State] | None]":
        """Run a write. Return the new streams, and the read of `following` if it is fused with the write."""
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
            self.begin(x)
        else:
            self.passed += 1
            number = len(self.segment.writes)
            self.segment.streams[number] = save_tensor(x)
            self.numbers = {x.untyped_storage().data_ptr(): (self.segment, number)}
        return x, begun

    def _pack(self, tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        streams = self.numbers.get(address)
        first = self.segment.streams[0].tensor.untyped_storage().data_ptr()
        if streams is None and self.saved_shape == tensor.shape and address != first:
            streams = (self.segment, len(self.segment.writes) + 1)
        return (
            save_tensor(tensor)
            if streams is None
            else (*streams, tensor.size(), tensor.stride(), tensor.storage_offset())
        )


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, SavedTensor):
        return saved.find()
    segment, index, size, stride, offset = saved
    return segment.find_streams(index).as_strided(size, stride, offset)
