"""Record every call of a model's hyper-connections: streams, sublayer input and output, and coefficients.

In a model without hyper-connections, the layers are recorded: the longest list of modules of one class that map a
hidden state to a hidden state of the same shape. Such a plain layer counts as a connection with one stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jpmhc.connections import Coefficients, HyperConnection, HyperConnectionStack, expand_streams
from jpmhc.connections.contract import State
from jpmhc.connections.sublayer import first_of
from jpmhc.diagnose.jacobian import shared_positions


@dataclass
class LayerCall:
    """One call of one connection or plain layer; its tensors are in the model's autograd graph.

    For a plain layer, `before` and `inside` are the layer's input [..., d], `output` and `after` its output [..., d].

    Attributes:
        name: The module's name; after the recording, with the number of the call if there were several calls.
        module: The module.
        before: The streams before the connection. [..., n, d]
        inside: The sublayer's input. [..., d]
        output: The sublayer's output. [..., d]
        after: The streams after the connection. [..., n, d]
        number: The number of recorded calls that began before this call.
        coefficients: The connection's read, write and skip for every token; None for a plain layer.
    """

    name: str
    module: nn.Module
    before: Tensor
    inside: Tensor
    output: Tensor
    after: Tensor
    number: int
    coefficients: Coefficients | None = None

    @property
    def streams(self) -> int:
        """The number of streams: 1 for a plain layer."""
        return 1 if self.coefficients is None else self.before.shape[-2]

    @property
    def positions(self) -> tuple[int, ...]:
        """The leading sizes of the tensors, whose product is the number of tokens."""
        return shared_positions(self.inside, self.output)

    @property
    def post_norm(self) -> str | None:
        """The norm of each stream after the write: "rms", "layer" or None."""
        return getattr(self.module, "post_norm", None)


@dataclass
class Recording:
    """The recorded calls of one run of a model.

    Attributes:
        calls: The calls, in the order in which they ended.
        replacement: The number of a call, and streams to use instead of the streams before that call; with a
            replacement, coefficients are not recorded.
        begun: The number of calls that have begun.
    """

    calls: list[LayerCall] = field(default_factory=list)
    replacement: tuple[int, Tensor] | None = None
    begun: int = 0

    def enter_call(self, streams: Tensor) -> tuple[int, Tensor]:
        """Count one more call; return the call's number and its streams, or their replacement."""
        number, self.begun = self.begun, self.begun + 1
        if self.replacement is not None and self.replacement[0] == number:
            return number, self.replacement[1]
        return number, streams


@contextmanager
def record_layers(model: nn.Module, layers: Sequence[nn.Module], recording: Recording) -> Iterator[Recording]:
    """Record every call of these connections or layers inside the context; only a replacement changes the results."""
    names = {module: name for name, module in model.named_modules()}
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, HyperConnection):
                stack.enter_context(_watch_connection(layer, names[layer], recording))
            else:
                stack.enter_context(_watch_layer(layer, names[layer], recording))
        yield recording
    total, count = Counter(call.name for call in recording.calls), Counter[str]()
    for call in recording.calls:
        module, count[call.name] = call.name, count[call.name] + 1
        if total[module] > 1:
            call.name = f"{module} (call {count[module]})"


class RecordedState(NamedTuple):
    """The state between a connection's read and its write, which records the call when it writes.

    Attributes:
        x: The streams as the read got them: n streams, or one stream that stands for n equal streams.
        streams: The n streams that were read: x, or a replacement (see `Recording`). [..., n, d]
        h: The result of the read, the sublayer's input. [..., d]
        chosen: The state from the implementation ("form") that computed the read and also computes the write.
        recording: The recording to which the write adds the call.
        name: The connection's name in the model.
        number: The number of the call.
    """

    x: Tensor
    streams: Tensor
    h: Tensor
    chosen: State
    recording: Recording
    name: str
    number: int

    def fits(self, block: HyperConnection) -> bool:
        return self.chosen.fits(block)

    def gather(self, x: Tensor) -> Tensor:
        return self.chosen.gather(x)

    def write(self, block: HyperConnection, x: Tensor, y: Tensor, mean: bool) -> Tensor:
        streams = self.streams if x is self.x else x
        after = self.chosen.write(block, streams, y, False)
        coefficients = None
        if self.recording.replacement is None:
            with torch.no_grad():
                parts = block.coefficients(self.streams.detach())
                coefficients = Coefficients(*(part.detach() for part in parts))
        call = LayerCall(self.name, block, self.streams, self.h, y, after, self.number, coefficients)
        self.recording.calls.append(call)
        return after.mean(-2) if mean else after

    def join(self, block: HyperConnection, x: Tensor, following: HyperConnection, delayed: bool = False) -> None:
        return None

    def make_rewrite(
        self, block: HyperConnection, y: Tensor, following: HyperConnection | None
    ) -> Callable[[Tensor], Tensor]:
        return self.chosen.make_rewrite(block, y, None)


def _watch_connection(block: HyperConnection, name: str, recording: Recording) -> AbstractContextManager[None]:
    """Return a context in which every read and write of the connection is recorded."""

    def read(block: HyperConnection, x: Tensor) -> tuple[Tensor, RecordedState]:
        streams = x if x.shape[-2] == block.streams else expand_streams(x.squeeze(-2), block.streams)
        number, streams = recording.enter_call(streams)
        h, chosen = block.read_in_best_form(streams)
        return h, RecordedState(x, streams, h, chosen, recording, name, number)

    return block.computed_by(read)


@contextmanager
def _watch_layer(layer: nn.Module, name: str, recording: Recording) -> Iterator[None]:
    before: list[tuple[int, Tensor]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        position, x = find_hidden_state(args, kwargs)
        if x is None:
            return None
        number, x = recording.enter_call(x)
        before.append((number, x))
        if isinstance(position, int):
            return (*args[:position], x, *args[position + 1 :]), kwargs
        return args, {**kwargs, position: x}

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        number, x = before.pop() if before else (0, None)
        y = first_of(output)
        if x is not None and isinstance(y, Tensor) and y.shape == x.shape:
            recording.calls.append(LayerCall(name, layer, x, x, y, y, number))

    with layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave):
        yield


def find_hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor | None]:
    """Return the position or name, and the value, of a call's first floating-point tensor.

    The keyword argument `attention_mask` does not count. Without such a tensor, return ("", None).
    """
    values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for position, value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and position != "attention_mask":
            return position, value
    return "", None


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's hyper-connections; if there are none, return its longest list of modules of one class.

    A list inside another list does not count: the layers are returned, not the experts inside each layer. Connections
    of stacks with delayed reads are left out, because a sublayer's input there comes from another connection's read.
    """
    connections: list[nn.Module] = [module for module in model.modules() if isinstance(module, HyperConnection)]
    if connections:
        stacks = [m for m in model.modules() if isinstance(m, HyperConnectionStack) and m.delayed]
        delayed = {connection for stack in stacks for connection in stack.connections}
        return [connection for connection in connections if connection not in delayed]
    lists = {
        f"{name}." if name else "": list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    alike = {name: modules for name, modules in lists.items() if len(modules) > 1 and len(set(map(type, modules))) == 1}
    outer = [modules for name, modules in alike.items() if not any(name.startswith(o) for o in alike if o != name)]
    longest = max(outer or lists.values(), key=len, default=[])
    return list(dict.fromkeys(longest))  # a list may repeat a module


def longest_chain(calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Return the longest series of calls in which each call gets the streams that the previous call returned.

    Calls whose output requires no gradient are left out. Of equally long series, the last one is returned.
    """
    runs: list[list[LayerCall]] = []
    for call in calls:
        linked = runs and runs[-1] and _same(runs[-1][-1].after, call.before)
        if linked and call.output.requires_grad:
            runs[-1].append(call)
        elif call.output.requires_grad:
            runs.append([call])
    return max(reversed(runs), key=len, default=[])


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach(), b.detach()))
