"""How a wrapped layer reads ahead for the next one, which it knows by a reference outside its modules."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.connections.ahead import keep_read, may_read_ahead, use_read
from jpmhc.wrap.plan import LayerPlan
from jpmhc.wrap.recipe import CHILD
from jpmhc.wrap.streams import Streams

NEXT, READ = "_hyper_connections_next", "_hyper_connections_read"


def link_layers(model: nn.Module, plans: list[LayerPlan]) -> None:
    """Tell each layer which one comes after it, where the next layer begins with an addition."""
    for plan, following in itertools.pairwise(plans):
        if not plan.last and not following.first and following.steps[0].name == "add":
            vars(model.get_submodule(plan.name))[NEXT] = (model.get_submodule(following.name),)


def unlink_layer(layer: nn.Module) -> None:
    """Forget the next layer, and what was read ahead."""
    vars(layer).pop(NEXT, None)
    vars(layer).pop(READ, None)


def connection_onward(layer: nn.Module, x: Tensor) -> Any:
    """Return the next layer's first connection, if it may read before that layer is called; else None."""
    following = vars(layer).get(NEXT)
    if following is None:
        return None
    connection = getattr(following[0], CHILD).additions[0]
    return connection if may_read_ahead(connection, x) else None


def hand_onward(layer: nn.Module, streams: Streams) -> None:
    """Keep for the next layer what was read for it."""
    vars(vars(layer)[NEXT][0])[READ] = keep_read(streams.x, streams.onward)


def take_onward(layer: nn.Module, x: Tensor) -> Any:
    """Return what was read ahead from these streams, or None."""
    return None if torch.compiler.is_compiling() else use_read(vars(layer).pop(READ, None), x)
