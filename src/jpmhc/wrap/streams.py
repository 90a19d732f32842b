"""Streams: an object that stands for a layer's hidden state while it is n residual streams."""

from typing import Any

import torch
from torch import Tensor

from jpmhc.connections import reduce_streams
from jpmhc.wrap.operations import ADDITIONS, CHANNELS_FIRST, FUNCTIONS, METHODS, OPERATIONS, PRODUCTS
from jpmhc.wrap.route import Route, StreamStep


class Streams:
    """n residual streams on their way through a layer, in the place of its hidden state.

    Whatever computes with the object sees the mixture that the next connection reads [..., d]. Adding to it writes to
    the streams. The few other operations that carry the residual stream on, such as the norm of a post-norm layer, act
    on each stream alike. The route says which ones do.

    Args:
        x: The streams. [..., n, d]
        route: Which operations carry the residual stream.
        trail: The steps that have been taken.
        begun: What the next connection has read from these streams already, and its state.

    Attributes:
        onward: The same for the first connection of the next layer.
    """

    def __init__(self, x: Tensor, route: Route, trail: tuple[StreamStep, ...] = (), begun: Any = None) -> None:
        self.x, self.route, self.trail, self.begun = x, route, trail, begun
        self.onward: Any = None
        self.counts: dict[str, int] = {}
        self.differentiable = torch.is_grad_enabled()

    def read(self) -> Tensor:
        """Return the mixture of streams that the next connection reads; after the last one, their mean. [..., d]"""
        return self._begin()[0]

    def _begin(self) -> tuple[Tensor, Any]:
        # What was read where gradients are switched off is of no use where they are needed.
        if self.begun is None or (torch.is_grad_enabled() and not self.differentiable):
            connection = self.route.connection(self.trail)
            self.begun = (reduce_streams(self.x), None) if connection is None else connection.read(self.x)
            self.differentiable = torch.is_grad_enabled()
        return self.begun

    def take_step(self, name: str) -> StreamStep | None:
        """Count one more operation of this name, and return it if it carries the residual stream."""
        step = StreamStep(name, self.counts.get(name, 0))
        self.counts[name] = step.number + 1
        return step if self.route.carries(self.trail, step) else None

    def after(self, step: StreamStep, x: Tensor) -> "Streams":
        """Return the streams that a step has led to."""
        return Streams(x, self.route, (*self.trail, step))

    def apply(self, name: str, *args: Any, **kwargs: Any) -> "Streams | None":
        """Return the streams after an operation, or None where it does not carry the residual stream."""
        step = self.take_step(name)
        x = None if step is None else OPERATIONS[name](self.x, *args, **kwargs)
        return None if x is None or step is None else self.after(step, x)

    def add(self, other: Any, *, alpha: float = 1) -> Any:
        """Write to the streams, if this is an addition to the residual stream."""
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
            result = None if step is None else self._write(other, step)
        return self.read() + other if result is None else result

    def _bends(self) -> int:
        """Count what has happened beside additions: of two streams that are added, the straighter is the residual."""
        return sum(step.name != "add" for step in self.trail)

    def _write(self, y: Tensor, step: StreamStep) -> "Streams":
        x, connection, (h, state) = self.x, self.route.connection(self.trail), self._begin()
        if (y.shape, y.dtype) != (h.shape, x.dtype):
            shape, dtype = torch.broadcast_shapes(y.shape, h.shape), torch.promote_types(x.dtype, y.dtype)
            if (shape, dtype) != (h.shape, x.dtype):  # the sum is larger or more precise than the hidden state
                x = x.to(dtype).expand(*shape[:-1], *x.shape[-2:])
                _, state = connection.read(x)
            y = y.expand(shape)
        trail = (*self.trail, step)
        if self.route.reduces and trail == self.route.steps:
            return self.after(step, connection.write_mean(x, y, state).unsqueeze(-2))  # a mean is its own mean
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
        """Add in place: everyone who holds this object sees the sum."""
        result = self.add(other, alpha=alpha)
        if not isinstance(result, Streams):
            return result
        self.__dict__.update(vars(result))
        return self

    def mul(self, other: Any) -> Any:
        """Scale each stream, or the mixture."""
        other = bare(other)
        scaled = self.apply("mul", other)
        return self.read() * other if scaled is None else scaled

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast each stream, or the mixture; most calls change nothing, and are no step."""
        empty = self.x.new_empty(0).to(*bare(args), **kwargs)
        if (empty.dtype, empty.device) == (self.x.dtype, self.x.device):
            return self
        moved = self.apply("to", *args, **kwargs)
        return self.read().to(*args, **kwargs) if moved is None else moved

    __add__ = __radd__ = add
    __iadd__ = add_
    __mul__ = __rmul__ = multiply = mul

    def __truediv__(self, other: Any) -> Any:
        return self.div(bare(other))

    def __sub__(self, other: Any) -> Any:
        return self.read() - bare(other)

    def __rsub__(self, other: Any) -> Any:
        return bare(other) - self.read()

    def __matmul__(self, other: Any) -> Any:
        return self.read() @ bare(other)

    def __neg__(self) -> Tensor:
        return -self.read()

    def __pow__(self, other: Any) -> Any:
        return self.read() ** bare(other)

    def __getitem__(self, index: Any) -> Any:
        taken = self.apply("getitem", index)
        return self.read()[index] if taken is None else taken

    def __len__(self) -> int:
        return len(self.x)

    # What can be said of the hidden state without reading it.
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
        """Do whatever else a tensor can do with the mixture."""
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


def bare(value: Any) -> Any:
    """Return the same value with the mixture that is read in the place of streams."""
    if isinstance(value, Streams):
        return value.read()
    if type(value) in (list, tuple):
        return type(value)(bare(entry) for entry in value)
    if type(value) is dict:
        return {key: bare(entry) for key, entry in value.items()}
    return value


def _method(method: str, name: str) -> Any:
    """Make the method of this name: an operation on each stream where it carries the residual, else on the mixture."""

    def run(self: Streams, *args: Any, **kwargs: Any) -> Any:
        carried = self.apply(name, *args, **kwargs)
        return getattr(self.read(), method)(*args, **kwargs) if carried is None else carried

    return run


for _called, _name in METHODS.items():
    setattr(Streams, _called, _method(_called, _name))
