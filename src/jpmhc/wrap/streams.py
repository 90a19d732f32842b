"""The object that replaces a layer's hidden state while the layer computes with n residual streams."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jpmhc.connections import HyperConnection, reduce_streams
from jpmhc.wrap.operations import ADDITIONS, CHANNELS_FIRST, FUNCTIONS, METHODS, OPERATIONS, PRODUCTS, TYPE_CHANGES


class StreamStep(NamedTuple):
    """One operation that carries the residual stream.

    Attributes:
        number: The number of earlier operations with this name on the same hidden state.
    """

    name: str
    number: int


Trail = tuple[StreamStep, ...]
Read = tuple[Tensor, Any]  # the result of a connection's `read`: the mixture [..., d] and the state


class Route:
    """The planned path of the residual stream through one call of a layer.

    Args:
        steps: The operations that carry the stream from the layer's input to its output, in order. The first steps of
            a route, up to the current operation, are a trail.
        connections: A connection for each step named "add".
        onward: The first connection of the next layer, if it may read before that layer is called.
        reduces: Whether only the mean of the streams is needed after the last step.
    """

    def __init__(
        self,
        steps: Trail,
        connections: Sequence[HyperConnection],
        onward: HyperConnection | None = None,
        reduces: bool = False,
    ) -> None:
        self.steps, self.connections, self.onward, self.reduces = steps, connections, onward, reduces

    def carries(self, trail: Trail, step: StreamStep) -> bool:
        """Return whether `step` is the planned step after the steps in `trail`."""
        return len(trail) < len(self.steps) and self.steps[len(trail)] == step

    def connection(self, trail: Trail) -> HyperConnection | None:
        """Return the connection of the next addition after the steps in `trail`; None after the last addition."""
        done = [step.name for step in trail].count("add")
        return self.connections[done] if done < len(self.connections) else None

    def following(self, trail: Trail) -> HyperConnection | None:
        """Return the connection that reads directly after the addition at the end of `trail`, or None."""
        if len(trail) == len(self.steps):
            return self.onward
        return self.connection(trail) if self.steps[len(trail)].name == "add" else None

    def note(self, complaint: str) -> None:
        """Note an operation that cannot be followed; only the probing run uses this."""

    def note_read(self) -> None:
        """Note that the layer computes something from its hidden state; only the probing run uses this."""


class Streams:
    """The n residual streams inside a layer, in place of the layer's hidden state.

    Operations in the route carry the residual stream: an addition writes to the streams, and any other, for example
    the norm of a post-norm layer, acts on each stream. All other computations use the mixture of streams that
    the next connection reads [..., d].

    Args:
        x: The streams. [..., n, d]
        route: The operations that carry the residual stream.
        trail: The steps so far.
        begun: The mixture that the next connection has already read from these streams, and its state.

    Attributes:
        hidden: The hidden state from which these streams were made, at the beginning of a chain, or the mean of the
            streams at its end; None otherwise.
        onward: The mixture that the next layer's first connection has already read, and its state.
        counts: The number of times that each operation was applied to these streams.
        differentiable: Whether gradients were recorded when the streams were read.
    """

    def __init__(self, x: Tensor, route: Route, trail: Trail = (), begun: Read | None = None) -> None:
        self.x, self.route, self.trail, self.begun = x, route, trail, begun
        self.onward: Read | None = None
        self.hidden: Tensor | None = None
        self.counts: dict[str, int] = {}
        self.differentiable = torch.is_grad_enabled()

    def read(self) -> Tensor:
        """Return the mixture that the next connection reads; after the last connection, the mean. [..., d]"""
        self.route.note_read()
        return self._begin()[0]

    def _begin(self) -> Read:
        # A mixture that was read without gradients cannot be used where gradients are recorded.
        if self.begun is None or (torch.is_grad_enabled() and not self.differentiable):
            connection = self.route.connection(self.trail)
            self.begun = (reduce_streams(self.x), None) if connection is None else connection.read(self.x)
            self.differentiable = torch.is_grad_enabled()
        return self.begun

    def take_step(self, name: str) -> StreamStep | None:
        """Count one more operation of this name. Return its step if it carries the residual stream, else None."""
        step = StreamStep(name, self.counts.get(name, 0))
        self.counts[name] = step.number + 1
        return step if self.route.carries(self.trail, step) else None

    def after(self, step: StreamStep, x: Tensor) -> "Streams":
        """Return the streams x as a `Streams` object whose trail has one more step."""
        return Streams(x, self.route, (*self.trail, step))

    def apply(self, name: str, *args: Any, **kwargs: Any) -> "Streams | None":
        """Return the streams after an operation on each stream; None if it does not carry the residual stream."""
        if name in TYPE_CHANGES:
            return ChangedStreams(self, lambda x: TYPE_CHANGES[name](x, *args, **kwargs))
        step = self.take_step(name)
        x = None if step is None else OPERATIONS[name](self.x, *args, **kwargs)
        return None if x is None or step is None else self.after(step, x)

    def add(self, other: Any, *, alpha: float = 1) -> Any:
        """Write `other`, times alpha, to the streams if this addition is residual, else add it to the mixture."""
        if isinstance(other, Streams):
            if alpha == 1 and other._bends() < self._bends():
                return other.add(self)
            other = other.read()
        if alpha != 1:
            other = alpha * other
        if not isinstance(other, Tensor) or other.ndim < 2:
            result: Any = self.apply("shift", other)
        else:
            step = self.take_step("add")
            connection = self.route.connection(self.trail)
            result = None if step is None or connection is None else self._write(other, step, connection)
        return self.read() + other if result is None else result

    def _bends(self) -> int:
        """Return the number of steps other than additions; the term with fewer such steps is the residual stream."""
        return sum(step.name != "add" for step in self.trail)

    def _write(self, y: Tensor, step: StreamStep, connection: HyperConnection) -> "Streams":
        x, (h, state) = self.x, self._begin()
        if (y.shape, y.dtype) != (h.shape, x.dtype):
            shape, dtype = torch.broadcast_shapes(y.shape, h.shape), torch.promote_types(x.dtype, y.dtype)
            if (shape, dtype) != (h.shape, x.dtype):  # the sum is larger or more precise than the hidden state
                x = x.to(dtype).expand(*shape[:-1], *x.shape[-2:])
                _, state = connection.read(x)
            y = y.expand(shape)
        trail = (*self.trail, step)
        if self.route.reduces and trail == self.route.steps:
            mean = connection.write_mean(x, y, state)
            reduced = self.after(step, mean.unsqueeze(-2))  # one stream
            reduced.hidden = mean
            return reduced
        following = self.route.following(trail)
        if following is None:
            return self.after(step, connection.write(x, y, state))
        x, h, state = connection.write_read(x, y, state, following)
        written = self.after(step, x)
        if trail == self.route.steps:
            written.onward = (h, state)
        else:
            written.begun = (h, state)
        return written

    def add_(self, other: Any, *, alpha: float = 1) -> Any:
        """Add `other` to this object in place, so that every reference to the object sees the sum."""
        result = self.add(other, alpha=alpha)
        if not isinstance(result, Streams):
            return result
        self.__dict__.update(vars(result))
        return self

    def mul(self, other: Any) -> Any:
        """Return scaled streams if this product carries the residual stream; else the scaled mixture."""
        other = bare(other)
        scaled = self.apply("mul", other)
        return self.read() * other if scaled is None else scaled

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the streams on another device or in another type; this object if nothing changes."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device).to(*bare(args), **kwargs)
        if (empty.dtype, empty.device) == (self.dtype, self.device):
            return self
        return self.apply("to", *bare(args), **kwargs)

    __add__ = __radd__ = add
    __iadd__ = add_
    __mul__ = __rmul__ = multiply = mul

    def __truediv__(self, other: Any) -> Any:
        return self.div(bare(other))

    def __getitem__(self, index: Any) -> Any:
        taken = self.apply("getitem", index)
        return self.read()[index] if taken is None else taken

    def __len__(self) -> int:
        return len(self.x)

    # Properties of the hidden state that need no read.
    shape = property(lambda self: torch.Size((*self.x.shape[:-2], self.x.shape[-1])))
    ndim = property(lambda self: self.x.ndim - 1)
    dtype = property(lambda self: self.x.dtype)
    device = property(lambda self: self.x.device)
    is_cuda = property(lambda self: self.x.is_cuda)
    requires_grad = property(lambda self: self.x.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self, **_: Any) -> "Streams":
        return self

    def float(self) -> Any:
        return self.to(torch.float32)

    def type(self, dtype: Any = None) -> Any:
        return self.read().type() if dtype is None else self.to(dtype)

    def type_as(self, other: Any) -> Any:
        return self.to(other.dtype)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the mixture, a tensor."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {key: value for key, value in kwargs.items() if key != "input"}
        first = args[0] if args else None
        if func in ADDITIONS and kwargs.keys() <= {"alpha"}:
            if isinstance(first, Streams):
                return first.add(args[1], **kwargs)
            if not kwargs:
                return args[1].add(first)
        elif func in PRODUCTS and not kwargs:
            return first.mul(args[1]) if isinstance(first, Streams) else args[1].mul(first)
        elif isinstance(first, Streams):
            if func in CHANNELS_FIRST:
                first.route.note(f"calls {func.__name__} on its hidden state, whose last dimension is not its channels")
            carried = first.apply(FUNCTIONS[func], *bare(args[1:]), **bare(kwargs)) if func in FUNCTIONS else None
            if carried is not None:
                return carried
        return func(*bare(args), **bare(kwargs))


class ChangedStreams(Streams):
    """Streams after a cast or clamp (the change), which is applied to all streams only when `x` is first needed.

    Until then, a read mixes the unchanged streams and applies the change to the mixture.

    Args:
        source: The streams before the change.
        change: The cast or clamp, applicable to streams and to a mixture.
    """

    def __init__(self, source: Streams, change: Callable[[Tensor], Tensor]) -> None:
        self.source, self.change = source, change
        self.route, self.trail, self.counts = source.route, source.trail, source.counts
        self.begun = self.onward = self.hidden = None
        self.differentiable = torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        if name == "x":
            self.x = self.change(self.source.x)
            return self.x
        return super().__getattr__(name)

    def read(self) -> Tensor:
        return super().read() if "x" in vars(self) else self.change(self.source.read())

    shape = property(lambda self: self.source.shape)
    ndim = property(lambda self: self.source.ndim)
    dtype = property(lambda self: self.change(torch.empty(0, dtype=self.source.dtype)).dtype)
    device = property(lambda self: self.change(torch.empty(0, device=self.source.device)).device)


def bare(value: Any) -> Any:
    """Return the value with each `Streams` object, also in lists, tuples and dicts, replaced by its `read()`."""
    if isinstance(value, Streams):
        return value.read()
    if type(value) in (list, tuple):
        return type(value)(bare(entry) for entry in value)
    if type(value) is dict:
        return {key: bare(entry) for key, entry in value.items()}
    return value


def _make_method(method: str, name: str) -> Callable[..., Any]:
    """Return a method that acts on each stream if it carries the residual stream, and otherwise on the mixture."""

    def run(self: Streams, *args: Any, **kwargs: Any) -> Any:
        carried = self.apply(name, *args, **kwargs)
        return getattr(self.read(), method)(*args, **kwargs) if carried is None else carried

    return run


def _make_operator(name: str) -> Callable[..., Any]:
    """Return an operator that computes with the mixture."""
    return lambda self, *others: getattr(self.read(), name)(*bare(others))


for _called, _name in METHODS.items():
    setattr(Streams, _called, _make_method(_called, _name))
for _name in ("sub", "rsub", "matmul", "rmatmul", "rtruediv", "pow", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Streams, f"__{_name}__", _make_operator(f"__{_name}__"))


def register_with_einops() -> None:
    """Let einops rearrange streams like tensors, if einops has been imported."""
    if "einops" in sys.modules:
        with contextlib.suppress(ImportError):  # other versions of einops raise their own error
            _make_einops_backend()


@functools.cache
def _make_einops_backend() -> type:
    """Return einops' backend for `Streams`, defined once; einops finds it among the subclasses of its backends."""
    from einops._backends import TorchBackend

    class StreamsBackend(TorchBackend):
        framework_name = "jpmhc"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, Streams)

    return StreamsBackend
