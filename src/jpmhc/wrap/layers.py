"""The plan of a wrapped layer, and the connections that the layer carries."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import HyperConnection
from jpmhc.mixers import Mixer
from jpmhc.wrap.streams import Streams, Trail, bare

CHILD = "hyper_connections"  # the name of a wrapped layer's child module that holds its connections
# The options of a connection that leave a fresh connection equal to the plain residual addition.
OPTIONS = ("norm", "read", "write", "temperature", "dynamic", "kernels", "eps", "read_eps")

Args = tuple[Any, ...]  # the positional arguments of a model's or a layer's call
Kwargs = dict[str, Any]  # the keyword arguments of such a call


@dataclass(frozen=True)
class LayerPlan:
    """The path of the residual stream through one layer, recorded in a probing run.

    Args:
        name: The layer's name in the model.
        position: The position of the hidden state among the layer's arguments, if it is given by position.
        keyword: The name of the hidden state among the layer's arguments, if it is given by name.
        ndim: The number of dimensions of the hidden state.
        dim: The width of the hidden state.
        steps: The operations that carry the residual stream from the layer's input to its output.
        leaves: The index or key of the hidden state in the layer's output; None if the output is the hidden state.
        modules: The names, inside the layer, of modules outside torch.nn that take the hidden state.
        first: Whether the layer expands a hidden state into streams; other layers get streams.
        last: Whether the layer reduces its streams to a hidden state; other layers hand streams to the next layer.
        kind: The name of the layer's class.
    """

    name: str
    position: int | None
    keyword: str | None
    ndim: int
    dim: int
    steps: Trail = ()
    leaves: int | str | None = None
    modules: tuple[str, ...] = ()
    first: bool = True
    last: bool = True
    kind: str = ""

    @property
    def additions(self) -> int:
        """The number of connections that the layer needs."""
        return sum(step.name == "add" for step in self.steps)

    def entering(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the hidden state among the layer's arguments."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.keyword or "")

    def with_entering(self, args: Args, kwargs: Kwargs, value: Tensor | Streams) -> tuple[Args, Kwargs]:
        """Return the layer's arguments with the hidden state replaced by `value`."""
        if self.position is not None and self.position < len(args):
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, str(self.keyword): value}

    def leaving(self, output: Any) -> Any:
        """Return the hidden state in the layer's output."""
        if self.leaves is None:
            return output
        if isinstance(self.leaves, int):
            return output[self.leaves] if isinstance(output, tuple | list) and self.leaves < len(output) else None
        return output.get(self.leaves) if isinstance(output, dict) else None

    def with_leaving(self, output: Any, value: Tensor | Streams) -> Any:
        """Return the layer's output with `value` as the hidden state, and without other `Streams` objects."""
        return value if self.leaves is None else replace_entries(output, {self.leaves: value})


def replace_entries(output: Any, values: dict[Any, Tensor | Streams]) -> Any:
    """Return a layer's output with `values` as its entries by index or key; other `Streams` objects become tensors."""
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = values[key] if key in values else bare(value)
        return output
    if isinstance(output, tuple | list):
        entries = [values[index] if index in values else bare(value) for index, value in enumerate(output)]
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    return bare(output)


@dataclass(frozen=True)
class Recipe:
    """The arguments of `HyperConnection` that all connections of a model share.

    Args:
        streams: The number of streams.
        mixer: A name from `MIXERS`, or a mixer, which is copied for every connection.
        options: All other arguments.
    """

    streams: int
    mixer: str | Mixer
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.options:
            checks.choice(name, OPTIONS, "option of wrap")

    def make_connection(self, dim: int, index: int) -> HyperConnection:
        """Return a fresh connection of width `dim`, which is number `index` in the model."""
        return HyperConnection(None, dim, self.streams, copy.deepcopy(self.mixer), index=index, **self.options)

    def make_connections(self, model: nn.Module, plans: Sequence[LayerPlan]) -> list["LayerConnections"]:
        """Return fresh connections for each plan, on the layer's device; the numbers run through the whole model."""
        connections: list[LayerConnections] = []
        index = 0
        modules = dict(model.named_modules())
        for plan in plans:
            if plan.name not in modules:
                kind = type(model).__name__
                raise ValueError(f"{kind} has no module {plan.name}, which was wrapped: load the class that was saved")
            parameters = modules[plan.name].parameters()
            like = next((parameter for parameter in parameters if parameter.is_floating_point()), torch.empty(0))
            connections.append(LayerConnections(plan, self, index).to(like.device, like.dtype))
            index += plan.additions
        return connections


class LayerConnections(nn.Module):
    """The connections of one wrapped layer, one for each of its residual additions.

    Args:
        plan: The path of the residual stream through the layer.
        index: The number of the first connection in the model.
    """

    def __init__(self, plan: LayerPlan, recipe: Recipe, index: int) -> None:
        super().__init__()
        self.plan, self.recipe, self.index = plan, recipe, index
        self.additions = nn.ModuleList(recipe.make_connection(plan.dim, index + k) for k in range(plan.additions))

    @property
    def connections(self) -> list[HyperConnection]:
        """The connections, in the order of the additions."""
        return [*self.additions]

    def first_changed(self) -> int | None:
        """Return the number of the first connection that differs from a fresh one; None if no connection does."""
        for number, connection in enumerate(self.additions):
            fresh = self.recipe.make_connection(self.plan.dim, self.index + number).state_dict()
            if any(
                not torch.equal(value.cpu().to(fresh[key].dtype), fresh[key])
                for key, value in connection.state_dict().items()
            ):
                return number
        return None


def connections_of(layer: nn.Module) -> LayerConnections:
    """Return the connections of a wrapped layer, or PEFT's module around these connections."""
    return cast(LayerConnections, getattr(layer, CHILD))


def wrapped_layers(model: nn.Module) -> dict[str, LayerConnections]:
    """Return the connections of each wrapped layer of a model, by the layer's name."""
    return {name: connections_of(module) for name, module in model.named_modules() if CHILD in module._modules}
