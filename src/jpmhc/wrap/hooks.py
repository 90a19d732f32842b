"""The hooks that make a layer's hidden state streams and turn it back, and what a wrapped layer carries."""

import functools
import itertools
from typing import Any

from torch import Tensor, nn

from jpmhc.connections import reduce_streams
from jpmhc.connections.hyper import first_of
from jpmhc.wrap.modules import StreamModule
from jpmhc.wrap.onward import connection_onward, hand_onward, link_layers, take_onward, unlink_layer
from jpmhc.wrap.recipe import CHILD, LayerConnections
from jpmhc.wrap.recomputing import follow_recomputing, forget_recomputing, leaving_streams
from jpmhc.wrap.route import Route
from jpmhc.wrap.streams import Streams


def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a wrapped layer: its hidden state becomes streams."""
    held: Any = getattr(layer, CHILD)
    plan, connections = held.plan, held.additions
    x = plan.entering(args, kwargs)
    if not isinstance(x, Tensor):
        raise RuntimeError(f"{plan.name}: its hidden state was not given as when it was wrapped")
    if plan.first:
        x = x.unsqueeze(-2)  # equal streams are held once
    elif x.ndim != plan.ndim + 1 or x.shape[-2] != connections[0].streams:
        raise RuntimeError(
            f"{plan.name}: expected the {connections[0].streams} streams of the layer before it, got {list(x.shape)}: "
            "the layers were not called as when the model was wrapped"
        )
    follow_recomputing(layer)
    route = Route(plan.steps, connections, None if plan.last else connection_onward(layer, x), reduces=plan.last)
    return plan.with_entering(args, kwargs, Streams(x, route, begun=take_onward(layer, x)))


def end(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """After a wrapped layer: its streams become a tensor [..., n, d], or after the last layer a hidden state."""
    plan, streams = getattr(layer, CHILD).plan, leaving_streams(layer, output)
    if streams.onward is not None:
        hand_onward(layer, streams)
    x = reduce_streams(streams.x) if plan.last else streams.x
    return plan.with_leaving(output, x)


def reduce_hidden_states(wide: frozenset[tuple[int, ...]], module: nn.Module, args: Any, output: Any) -> Any:
    """After a module that contains layers: the hidden states it returns are reduced ones.

    Args:
        wide: The number of dimensions and the last two sizes of each kind of streams.
        module: The module.
        args: Its arguments.
        output: Its output: a tuple, or a dict, whose names say which entries are hidden states.
    """
    if isinstance(output, dict):
        for key, value in output.items():
            if "hidden_states" in key:
                output[key] = _reduce_entries(value, wide, named=True)
        return output
    if type(output) is tuple:
        return tuple(_reduce_entries(value, wide, named=False) for value in output)
    return output


def _reduce_entries(value: Any, wide: frozenset[tuple[int, ...]], named: bool) -> Any:
    """Reduce the streams in a tuple of hidden states; without a name, only beside hidden states they may belong to."""
    if type(value) not in (tuple, list):
        return value
    states = [reduce_streams(entry.x) if isinstance(entry, Streams) else entry for entry in value]
    shapes = [tuple(entry.shape) for entry in states if isinstance(entry, Tensor)]

    def is_streams(entry: Any) -> bool:
        if not isinstance(entry, Tensor) or (entry.ndim, *entry.shape[-2:]) not in wide:
            return False
        return named or (*entry.shape[:-2], entry.shape[-1]) in shapes

    return type(value)(reduce_streams(entry) if is_streams(entry) else entry for entry in states)


def refuse_streams(shape: tuple[int, ...], names: str, module: nn.Module, args: Any, output: Any) -> None:
    """After the module that calls a chain of layers: refuse streams in the place of its hidden state.

    Args:
        shape: The number of dimensions and the last two sizes of the chain's streams.
        names: The first and the last layer of the chain.
        module: The module.
        args: Its arguments.
        output: Its output: a hidden state, or a tuple or dict whose first entry is one.
    """
    first = next(iter(output.values()), None) if isinstance(output, dict) else first_of(output)
    if isinstance(first, Tensor) and (first.ndim, *first.shape[-2:]) == shape:
        raise RuntimeError(
            f"{type(module).__name__} returned streams {list(first.shape)}, because not all of its layers {names} were "
            "called, as they were when the model was wrapped: unwrap the model before you run fewer of them"
        )


def _list_chains(layers: list[LayerConnections]) -> list[list[LayerConnections]]:
    """Return the runs of layers that hand streams to each other."""
    chains: list[list[LayerConnections]] = []
    for held in layers:
        if held.plan.first or not chains:
            chains.append([])
        chains[-1].append(held)
    return chains


def _find_caller(model: nn.Module, names: list[str]) -> nn.Module:
    """Return the innermost module that contains all these layers and is no mere list of them."""
    parts = [name.split(".")[:-1] for name in names]
    common = list(itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts)))
    path = [level[0] for level in common]
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path.pop()
    return model.get_submodule(".".join(path))


def install(model: nn.Module, layers: list[LayerConnections]) -> None:
    """Give each layer its connections and hooks, and the modules around the layers a hook on their hidden states."""
    around = set()
    wide = frozenset((held.plan.ndim + 1, held.recipe.streams, held.plan.dim) for held in layers)
    for held in layers:
        name = held.plan.name
        layer = model.get_submodule(name)
        layer.add_module(CHILD, held)
        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end, with_kwargs=True)
        for inner in held.plan.modules:
            StreamModule(inner).register(layer.get_submodule(inner))
        parts = name.split(".")
        around |= {".".join(parts[:depth]) for depth in range(len(parts)) if name}
    for name in around:
        module = model.get_submodule(name)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.register_forward_hook(functools.partial(reduce_hidden_states, wide))
    for chain in _list_chains(layers):
        names = [held.plan.name for held in chain]
        if len(chain) > 1:
            shape = (chain[0].plan.ndim + 1, chain[0].recipe.streams, chain[0].plan.dim)
            check = functools.partial(refuse_streams, shape, f"{names[0]} to {names[-1]}")
            _find_caller(model, names).register_forward_hook(check)
    link_layers(model, [held.plan for held in layers])


def uninstall(model: nn.Module) -> None:
    """Take all connections and hooks off again."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                ours = getattr(hook, "func", hook) in (begin, end, reduce_hidden_states, refuse_streams)
                if ours or isinstance(getattr(hook, "__self__", None), StreamModule):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
        if CHILD in module._modules:
            delattr(module, CHILD)
        unlink_layer(module)
        forget_recomputing(module)


def wrapped_layers(model: nn.Module) -> dict[str, Any]:
    """The connections of each wrapped layer of a model, by the layer's name."""
    return {name: getattr(module, CHILD) for name, module in model.named_modules() if CHILD in module._modules}
