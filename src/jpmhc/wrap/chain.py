"""Hooks on a chain of layers, which turn the hidden state into streams before the chain and back after it.

The hidden state [..., d] is the tensor that a plain model hands from layer to layer. Streams [..., n, d] are expanded
from a hidden state as n copies, and reduced to a hidden state by their mean. A read ahead is a layer's first read,
computed by the layer before it.
"""

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from jpmhc.connections import HyperConnection, reduce_streams
from jpmhc.connections.stack import ReadAhead, keep_read, may_read_ahead, use_read
from jpmhc.connections.sublayer import first_of
from jpmhc.modes import is_transformed
from jpmhc.wrap.layers import CHILD, Args, Kwargs, LayerPlan, connections_of
from jpmhc.wrap.streams import Read, Route, Streams

CHECKPOINT = "_gradient_checkpointing_func"  # a layer's attribute with the function that recomputes the layer
Sent = tuple[StorageWeakRef, Tensor | None]  # the storage of streams, and the hidden state if gradients flow through it


def _is_traced() -> bool:
    """Return whether a compiler or a transform traces the computation, so that tensors have no storage."""
    return torch.compiler.is_compiling() or is_transformed()


def _is_no_container(value: object) -> bool:
    """Return whether a value is no dict, list or tuple: for example a tensor, or a cache of keys and values."""
    return not isinstance(value, dict | list | tuple)


class GradientThroughState(torch.autograd.Function):
    """Return the streams x [..., n, d] unchanged, and send part of their gradient through their mean, `state` [..., d].

    In the backward pass, `state` gets the sum of the streams' gradients, so that code that uses the hidden state sees a
    gradient. x gets the streams' gradients minus their mean. Because `state` is the mean of x, the total gradient of x
    is the same as without this function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad - grad.mean(-2, keepdim=True), grad.sum(-2)


class Calls(threading.local):
    """The running calls of one thread; several threads may call a model at the same time.

    Attributes:
        modules: The modules in a running call: the owner, or modules that contain the owner.
        unfinished: Whether the first layer was called, but the last layer not yet.
        sent: The streams that the layers have returned inside the running calls.
        ahead: The next layer, and the result of the read made ahead for this layer; None without such a read.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.unfinished = False
        self.sent: list[Sent] = []
        self.ahead: tuple[nn.Module, ReadAhead] | None = None


class Chain:
    """The hooks of a chain of layers, in which each layer gets the streams that the layer before returned.

    Inside a call of the owner (the module that contains the layers), the layers return streams, and streams in the
    owner's output are reduced to hidden states. If other code calls the layers, such as a method
    `forward_intermediates`, each layer returns its hidden state, and the next layer looks up the streams that belong to
    this hidden state.

    A layer may read ahead for the next layer: one pass then computes the layer's last write and the next layer's first
    read. The result of this read is used only if the next layer gets the same streams.

    Args:
        plans: The layers' plans, in the order of their calls.
        layers: The layers.
        owner: The innermost module that contains the layers and is not a list of modules.
        streams: The number of streams.

    Attributes:
        staged: Whether some of the layers are a stage of a pipeline: such layers always return streams.
        calls: The running calls of the current thread.
        gives_states: Whether the latest calls return the layers' hidden states, so that gradients must flow through
            these states. All threads share this flag, because autograd recomputes in a thread of its own.
        apart: The streams of each hidden state that a layer has returned outside a call of the owner.
    """

    def __init__(self, plans: Sequence[LayerPlan], layers: Sequence[nn.Module], owner: nn.Module, streams: int) -> None:
        self.owner = owner
        self.names, self.length = f"{plans[0].name} to {plans[-1].name}", len(plans)
        self.shape = (plans[0].ndim + 1, streams, plans[0].dim)  # the number of dimensions and the last two sizes
        self.following = {
            plan.name: layer
            for (plan, after), layer in zip(itertools.pairwise(plans), layers[1:])
            if after.steps[0].name == "add"
        }
        self.warned = self.warned_of_hooks = self.staged = False
        self._forget_calls()

    def _forget_calls(self) -> None:
        self.calls = Calls()
        self.gives_states = False
        self.apart = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        passing = ("calls", "gives_states", "apart")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_calls()

    def begin(self, layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return a layer's arguments with the hidden state as a `Streams` object (a hook before the layer)."""
        held = connections_of(layer)
        plan, x = held.plan, held.plan.entering(args, kwargs)
        if not isinstance(x, Tensor):
            raise RuntimeError(f"the hidden state of {plan.name} was another argument when the model was wrapped")
        hidden = x
        if not plan.first and not _is_traced():
            x = self.apart.get(x, x)
        if plan.first:
            x = x.unsqueeze(-2)  # n equal streams are stored as one stream
            self.calls.unfinished = True
        elif (x.ndim, *x.shape[-2:]) != self.shape:
            raise RuntimeError(
                f"{plan.name}: expected the {self.shape[1]} streams of the layer before it, got {list(x.shape)}: "
                "the layers were not called as when the model was wrapped"
            )
        follow_recomputing(layer)
        if plan.first and layer.training and torch.is_grad_enabled() and not self.warned:
            self.warn_of_frozen(layer, plan)
        if layer._backward_hooks and not self.warned_of_hooks:
            self.warn_of_backward_hooks(plan)
        route = Route(plan.steps, held.connections, self.find_onward(plan, x), reduces=plan.last)
        entering = Streams(x, route, begun=self.take_read(layer, x))
        entering.hidden = hidden if plan.first else None
        return plan.with_entering(args, kwargs, entering)

    def end(self, layer: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Return a layer's output with the `Streams` object in it replaced by a tensor (a hook after the layer).

        After the last layer, the tensor is the hidden state [..., d]. After the other layers, it is the result of
        `send`: the streams [..., n, d], or their mean outside a call of the owner.
        """
        plan = connections_of(layer).plan
        streams = leaving_streams(layer, plan, output)
        if streams.onward is not None:
            self.calls.ahead = (self.following[plan.name], keep_read(streams.x, streams.onward))
        if plan.last:
            self.calls.unfinished = False
            if streams.hidden is None:  # set, because other code may have kept these streams
                streams.hidden = reduce_streams(streams.x)
            return plan.with_leaving(output, streams.hidden)
        return plan.with_leaving(output, self.send(streams.x))

    def send(self, x: Tensor) -> Tensor:
        """Return the streams x for the next layer; outside a call of the owner, return their mean."""
        if self.staged or _is_traced():
            return x
        called = self.owner in self.calls.modules
        if not called and torch._C._current_graph_task_id() == -1:  # outside recomputation too
            state = reduce_streams(x)
            self.apart[state] = x
            return state
        anchor = None
        if self.gives_states and x.requires_grad:
            anchor = reduce_streams(x)
            x = GradientThroughState.apply(x, anchor)
        if called:
            self.calls.sent.append((StorageWeakRef(x.untyped_storage()), anchor))
        return x

    def enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note that a call of the owner, or of a module around the owner, begins (a hook before that module)."""
        if self.staged or _is_traced():
            return
        if not self.calls.modules:
            self.gives_states = self.calls.unfinished = False
            self.calls.sent.clear()
        self.calls.modules.append(module)
        setting = getattr(getattr(module, "config", None), "output_hidden_states", False)
        self.gives_states |= bool(setting) or bool(kwargs.get("output_hidden_states"))

    def leave(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Return the output of the owner, or of a module around it, with all streams reduced (a hook after it)."""
        if self.staged:
            return output
        if _is_traced():
            return self.reduce_by_name(module, output)
        if module in self.calls.modules:
            del self.calls.modules[self.calls.modules.index(module) :]
        if self.calls.unfinished and output is not None:
            self.calls.unfinished = False
            self.refuse_unfinished(module)
        if any(self.find_state(value) is not None for value in tree_leaves(output, is_leaf=_is_no_container)):

            def reduce(value: Any) -> Any:
                state = self.find_state(value)
                return value if state is None else state

            output = tree_map(reduce, output, is_leaf=_is_no_container)
        if not self.calls.modules:
            self.calls.sent.clear()
        return output

    def find_state(self, value: object) -> Tensor | None:
        """Return the hidden state if the value is the streams of a layer, else None."""
        if isinstance(value, Streams):
            return reduce_streams(value.x) if value.hidden is None else value.hidden
        if not self.calls.sent or not isinstance(value, Tensor) or (value.ndim, *value.shape[-2:]) != self.shape:
            return None
        storage = StorageWeakRef(value.untyped_storage())
        for sent, state in self.calls.sent:
            if storage == sent:
                return state if state is not None and value.shape[:-2] == state.shape[:-1] else reduce_streams(value)
        return None

    def reduce_by_name(self, module: nn.Module, output: Any) -> Any:
        """Return the output of a traced call with its streams reduced, which are known by their names and shapes.

        Args:
            module: The called module: the owner, or a module that contains the owner.
            output: A tuple, or a dict whose keys name the hidden states.
        """
        first = next(iter(output.values()), None) if isinstance(output, dict) else first_of(output)
        if self.length > 1 and isinstance(first, Tensor) and (first.ndim, *first.shape[-2:]) == self.shape:
            self.refuse_unfinished(module)
        if isinstance(output, dict):
            for key, value in output.items():
                if "hidden_states" in key:
                    output[key] = self._reduce_entries(value, named=True)
            return output
        if type(output) is tuple:
            return tuple(self._reduce_entries(value, named=False) for value in output)
        return output

    def refuse_unfinished(self, module: nn.Module) -> None:
        """Raise the error for a call that did not reach all layers, so that streams would leave the module."""
        raise RuntimeError(
            f"{type(module).__name__} did not call all of its layers {self.names}, as it did when the model was "
            "wrapped: unwrap the model before you run fewer of them"
        )

    def warn_of_frozen(self, layer: nn.Module, plan: LayerPlan) -> None:
        """Warn once if a layer is trained while its connections are frozen, for example by PEFT."""
        if torch.compiler.is_compiling() or any(p.requires_grad for p in connections_of(layer).parameters()):
            return
        if any(parameter.requires_grad for parameter in layer.parameters()):
            self.warned = True
            warnings.warn(
                f"the hyper-connections of {plan.name} are frozen while other parameters of the layer are trained: "
                'with PEFT, train and save them by modules_to_save=["hyper_connections"]',
                stacklevel=2,
            )

    def warn_of_backward_hooks(self, plan: LayerPlan) -> None:
        """Warn once that a layer's full backward hook gets no gradient of the streams from PyTorch."""
        self.warned_of_hooks = True
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"full backward hooks of {plan.name} get None as grad_input, because its hidden state is streams: "
                "register them on a module inside it, or a hook on the hidden state's tensor",
                stacklevel=2,
            )

    def find_onward(self, plan: LayerPlan, x: Tensor) -> HyperConnection | None:
        """Return the next layer's first connection if it may read before the next layer is called, else None."""
        if plan.name not in self.following:
            return None
        connection = connections_of(self.following[plan.name]).connections[0]
        return connection if may_read_ahead(connection.map.bias, x) else None

    def take_read(self, layer: nn.Module, x: Tensor) -> Read | None:
        """Return the sublayer input and the state that the previous layer has read from x for this layer, or None."""
        if torch.compiler.is_compiling() or self.calls.ahead is None:
            return None
        (reader, ahead), self.calls.ahead = self.calls.ahead, None
        return use_read(ahead, x) if reader is layer else None

    def _reduce_entries(self, value: Any, named: bool) -> Any:
        """Return a tuple of hidden states with its streams reduced.

        Args:
            value: The tuple; any other value is returned unchanged.
            named: Whether the tuple is known to contain hidden states. Otherwise a tensor counts as streams only if the
                tuple also contains a hidden state of matching shape.
        """
        if type(value) not in (tuple, list):
            return value
        states = [reduce_streams(entry.x) if isinstance(entry, Streams) else entry for entry in value]
        shapes = [tuple(entry.shape) for entry in states if isinstance(entry, Tensor)]

        def is_streams(entry: object) -> bool:
            if not isinstance(entry, Tensor) or (entry.ndim, *entry.shape[-2:]) != self.shape:
                return False
            return named or (*entry.shape[:-2], entry.shape[-1]) in shapes

        return type(value)(reduce_streams(entry) if is_streams(entry) else entry for entry in states)


def follow_recomputing(layer: nn.Module) -> None:
    """Replace the checkpoint function of a layer, so that recomputation gets the layer's streams as a tensor.

    Before transformers 5.23, such layers had a `__call__` of their own that also recomputes the hooks; these layers
    stay unchanged.
    """
    checkpoint = vars(layer).get(CHECKPOINT)
    if checkpoint is not None and not _is_ours(checkpoint) and type(layer).__call__ is nn.Module.__call__:
        setattr(layer, CHECKPOINT, functools.partial(recompute_streams, checkpoint))


def forget_recomputing(layer: nn.Module) -> None:
    """Restore a layer's original checkpoint function."""
    checkpoint: Any = vars(layer).get(CHECKPOINT)
    if _is_ours(checkpoint):
        setattr(layer, CHECKPOINT, checkpoint.args[0])


def _is_ours(checkpoint: object) -> bool:
    return isinstance(checkpoint, functools.partial) and checkpoint.func is recompute_streams


def recompute_streams(checkpoint: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
    """Run a layer under its checkpoint function, and return its output; every run makes its own `Streams` object.

    Neither this layer nor the next one uses a read ahead, because the checkpoint saves only the layer's arguments.

    Args:
        checkpoint: The layer's checkpoint function.
        run: The layer's forward as a `functools.partial` with the layer and its keyword arguments. Any other
            function is passed to the checkpoint function unchanged.
    """
    layer = run.args[0] if isinstance(run, functools.partial) and run.args else None
    if not isinstance(run, functools.partial) or not isinstance(layer, nn.Module) or CHILD not in layer._modules:
        return checkpoint(run, *args)
    plan, connections = connections_of(layer).plan, connections_of(layer).connections
    entered = plan.entering(args, run.keywords)
    if not isinstance(entered, Streams):
        return checkpoint(run, *args)
    route = Route(plan.steps, connections, reduces=plan.last)
    args, kwargs = plan.with_entering(args, run.keywords, entered.x)

    def run_streams(*args: Any) -> Any:
        streams = Streams(plan.entering(args, kwargs), route)
        inner_args, inner_kwargs = plan.with_entering(args, kwargs, streams)
        output = run.func(*run.args, *inner_args, **inner_kwargs)
        return plan.with_leaving(output, leaving_streams(layer, plan, output).x)

    output = checkpoint(run_streams, *args)
    return plan.with_leaving(output, Streams(plan.leaving(output), route, plan.steps))


def leaving_streams(layer: nn.Module, plan: LayerPlan, output: Any) -> Streams:
    """Return the streams in a layer's output; raise an error if their operations differ from the layer's plan."""
    streams = plan.leaving(output)
    if not isinstance(streams, Streams) or streams.trail != plan.steps:
        steps = "an unknown computation"
        if isinstance(streams, Streams):
            steps = ", ".join(step.name for step in streams.trail) or "nothing"
        raise RuntimeError(
            f"{plan.name} ({type(layer).__name__}) did not compute as when it was wrapped: its hidden state went "
            f"through {steps}, not {', '.join(step.name for step in plan.steps)}; give wrap inputs with which the "
            "model computes as it will be used, cross-attention included"
        )
    return streams
