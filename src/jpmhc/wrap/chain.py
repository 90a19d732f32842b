"""Layers that hand streams to each other: the hooks that make their hidden state streams and turn it back."""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.connections import HyperConnection, reduce_streams
from jpmhc.connections.ahead import ReadAhead, keep_read, may_read_ahead, use_read
from jpmhc.connections.hyper import first_of
from jpmhc.wrap.layers import CHILD, Args, Kwargs, LayerConnections, LayerPlan, connections_of
from jpmhc.wrap.streams import Read, Route, StreamModule, Streams

CHECKPOINT = "_gradient_checkpointing_func"  # the attribute by which transformers recomputes a layer

NESTED = "use_nested_tensor"  # the attribute by which PyTorch's encoder may give its layers a nested tensor


class Chain:
    """A run of layers in which each gets the streams that the one before returned, and their hooks.

    A layer may read ahead for the next one: its last write and the next layer's first read are then one pass. What was
    read is used only if the next layer gets the same streams.

    Args:
        plans: The layers' plans, in the order of their calls.
        layers: The layers.
        streams: The number of streams.
    """

    def __init__(self, plans: Sequence[LayerPlan], layers: Sequence[nn.Module], streams: int) -> None:
        self.names, self.length = f"{plans[0].name} to {plans[-1].name}", len(plans)
        self.shape = (plans[0].ndim + 1, streams, plans[0].dim)  # the number of dimensions and the last two sizes
        self.following = {
            plan.name: layer
            for (plan, after), layer in zip(itertools.pairwise(plans), layers[1:])
            if after.steps[0].name == "add"
        }
        self.ahead: tuple[nn.Module, ReadAhead] | None = None
        self.warned = False

    def begin(self, layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Before a layer: make its hidden state streams."""
        plan, connections = connections_of(layer).plan, connections_of(layer).connections
        x = plan.entering(args, kwargs)
        if not isinstance(x, Tensor):
            raise RuntimeError(f"{plan.name}: its hidden state was not given as when it was wrapped")
        if plan.first:
            x = x.unsqueeze(-2)  # equal streams are held once
        elif (x.ndim, *x.shape[-2:]) != self.shape:
            raise RuntimeError(
                f"{plan.name}: expected the {self.shape[1]} streams of the layer before it, got {list(x.shape)}: "
                "the layers were not called as when the model was wrapped"
            )
        follow_recomputing(layer)
        if plan.first and layer.training and torch.is_grad_enabled() and not self.warned:
            self.warn_of_frozen(layer, plan)
        route = Route(plan.steps, connections, self.find_onward(plan, x), reduces=plan.last)
        return plan.with_entering(args, kwargs, Streams(x, route, begun=self.take_read(layer, x)))

    def end(self, layer: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """After a layer: make its streams a tensor [..., n, d], or after the last layer a hidden state."""
        plan, streams = connections_of(layer).plan, leaving_streams(layer, output)
        if streams.onward is not None:
            self.ahead = (self.following[plan.name], keep_read(streams.x, streams.onward))
        x = reduce_streams(streams.x) if plan.last else streams.x
        return plan.with_leaving(output, x)

    def warn_of_frozen(self, layer: nn.Module, plan: LayerPlan) -> None:
        """Warn once if a layer is trained and its connections are frozen, as PEFT freezes them."""
        if torch.compiler.is_compiling() or any(p.requires_grad for p in connections_of(layer).parameters()):
            return
        if any(parameter.requires_grad for parameter in layer.parameters()):
            self.warned = True
            warnings.warn(
                f"the hyper-connections of {plan.name} are frozen while other parameters of the layer are trained: "
                'with PEFT, train and save them by modules_to_save=["hyper_connections"]',
                stacklevel=2,
            )

    def find_onward(self, plan: LayerPlan, x: Tensor) -> HyperConnection | None:
        """Return the next layer's first connection, if it may read before that layer is called."""
        if plan.name not in self.following:
            return None
        connection = connections_of(self.following[plan.name]).connections[0]
        return connection if may_read_ahead(connection, x) else None

    def take_read(self, layer: nn.Module, x: Tensor) -> Read | None:
        """Return the mixture that was read for this layer from these streams, with its state; None if there is none."""
        if torch.compiler.is_compiling() or self.ahead is None:
            return None
        (reader, ahead), self.ahead = self.ahead, None
        return use_read(ahead, x) if reader is layer else None

    def reduce_hidden_states(self, module: nn.Module, args: Args, output: Any) -> Any:
        """After a module that contains layers: reduce the hidden states that it returns.

        Args:
            module: The module.
            args: Its arguments.
            output: Its output: a tuple, or a dict, whose names say which entries are hidden states.
        """
        if isinstance(output, dict):
            for key, value in output.items():
                if "hidden_states" in key:
                    output[key] = self._reduce_entries(value, named=True)
            return output
        if type(output) is tuple:
            return tuple(self._reduce_entries(value, named=False) for value in output)
        return output

    def _reduce_entries(self, value: Any, named: bool) -> Any:
        """Reduce the streams in a tuple of hidden states; without a name, only beside hidden states of their shape."""
        if type(value) not in (tuple, list):
            return value
        states = [reduce_streams(entry.x) if isinstance(entry, Streams) else entry for entry in value]
        shapes = [tuple(entry.shape) for entry in states if isinstance(entry, Tensor)]

        def is_streams(entry: object) -> bool:
            if not isinstance(entry, Tensor) or (entry.ndim, *entry.shape[-2:]) != self.shape:
                return False
            return named or (*entry.shape[:-2], entry.shape[-1]) in shapes

        return type(value)(reduce_streams(entry) if is_streams(entry) else entry for entry in states)

    def refuse_streams(self, module: nn.Module, args: Args, output: Any) -> None:
        """After the module that calls the layers: raise an error if it returns streams as its hidden state.

        Args:
            module: The module.
            args: Its arguments.
            output: Its output: a hidden state, or a tuple or dict whose first entry is one.
        """
        first = next(iter(output.values()), None) if isinstance(output, dict) else first_of(output)
        if isinstance(first, Tensor) and (first.ndim, *first.shape[-2:]) == self.shape:
            raise RuntimeError(
                f"{type(module).__name__} returned streams {list(first.shape)}, because not all of its layers "
                f"{self.names} were called, as they were when the model was wrapped: unwrap the model before you run "
                "fewer of them"
            )


def install(model: nn.Module, connections: Sequence[LayerConnections]) -> None:
    """Give each layer its connections and hooks, and the modules around the layers a hook on their hidden states."""
    for members in _split_chains(connections):
        names = [member.plan.name for member in members]
        layers = [model.get_submodule(name) for name in names]
        chain = Chain([member.plan for member in members], layers, members[0].recipe.streams)
        for member, layer in zip(members, layers):
            layer.add_module(CHILD, member)
            layer.register_forward_pre_hook(chain.begin, with_kwargs=True)
            layer.register_forward_hook(chain.end, with_kwargs=True)
            for inner in member.plan.modules:
                StreamModule(inner).register(layer.get_submodule(inner))
        for outer in sorted({outer for name in names for outer in _names_around(name)}):
            module = model.get_submodule(outer)
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                module.register_forward_hook(chain.reduce_hidden_states)
            if isinstance(module, nn.TransformerEncoder) and getattr(module, NESTED):
                # False, and known to be ours by its type: a nested tensor cannot become streams.
                setattr(module, NESTED, None)
        if len(members) > 1:
            _find_caller(model, names).register_forward_hook(chain.refuse_streams)


def uninstall(model: nn.Module) -> None:
    """Remove all connections and hooks."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), Chain | StreamModule):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
        if CHILD in module._modules:
            delattr(module, CHILD)
        if isinstance(module, nn.TransformerEncoder) and getattr(module, NESTED) is None:
            setattr(module, NESTED, True)
        forget_recomputing(module)


def _split_chains(connections: Sequence[LayerConnections]) -> list[list[LayerConnections]]:
    """Return the runs of layers that hand streams to each other."""
    chains: list[list[LayerConnections]] = []
    for member in connections:
        if member.plan.first or not chains:
            chains.append([])
        chains[-1].append(member)
    return chains


def _names_around(name: str) -> list[str]:
    """Return the names of the modules that contain this one: "" and "a" for "a.b", none for ""."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts)) if name]


def _find_caller(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the innermost module that contains all these layers and is more than a list of them."""
    parts = [name.split(".")[:-1] for name in names]
    common = list(itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts)))
    path = [level[0] for level in common]
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path.pop()
    return model.get_submodule(".".join(path))


def follow_recomputing(layer: nn.Module) -> None:
    """Make a layer that transformers recomputes inside its hooks hand over its streams as a tensor.

    Before version 5.23 such layers had a `__call__` of their own, which recomputes the hooks too, and needs nothing.
    """
    checkpoint = vars(layer).get(CHECKPOINT)
    if checkpoint is not None and not _is_ours(checkpoint) and type(layer).__call__ is nn.Module.__call__:
        setattr(layer, CHECKPOINT, functools.partial(recompute_streams, checkpoint))


def forget_recomputing(layer: nn.Module) -> None:
    """Give a layer its own checkpoint function back."""
    checkpoint: Any = vars(layer).get(CHECKPOINT)
    if _is_ours(checkpoint):
        setattr(layer, CHECKPOINT, checkpoint.args[0])


def _is_ours(checkpoint: object) -> bool:
    return isinstance(checkpoint, functools.partial) and checkpoint.func is recompute_streams


def recompute_streams(checkpoint: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
    """Run a layer so that it can be recomputed: each run begins with a streams object of its own.

    Nothing is read ahead, into the layer or out of it, because the checkpoint keeps only the layer's arguments.

    Args:
        checkpoint: The layer's checkpoint function.
        run: The layer's forward, bound to the layer and its keyword arguments; any other function is left alone.
        args: The layer's positional arguments.
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
        return plan.with_leaving(output, leaving_streams(layer, output).x)

    output = checkpoint(run_streams, *args)
    return plan.with_leaving(output, Streams(plan.leaving(output), route, plan.steps))


def leaving_streams(layer: nn.Module, output: Any) -> Streams:
    """Return the streams in a layer's output; raise an error if they took another way than the planned one."""
    plan = connections_of(layer).plan
    streams = plan.leaving(output)
    if not isinstance(streams, Streams) or streams.trail != plan.steps:
        steps = "an unknown computation"
        if isinstance(streams, Streams):
            steps = ", ".join(step.name for step in streams.trail) or "nothing"
        raise RuntimeError(
            f"{plan.name} ({type(layer).__name__}) did not compute as when it was wrapped: its hidden state went "
            f"through {steps}, not {', '.join(step.name for step in plan.steps)}"
        )
    return streams
