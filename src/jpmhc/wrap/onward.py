"""Reading ahead: a layer's last write and the first read of the next layer as one pass over the streams.

A layer knows the next one by a reference outside its modules. What it has read for the next layer is kept there, with
the streams it was read from: the next layer uses it only if it is given the very same streams.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn

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
    """Return the next layer's first connection, if it may read before that layer is called; else None.

    It may not where another process, device or recomputation has a say in when the next layer's parameters are there.
    """
    following = None if torch.compiler.is_compiling() else vars(layer).get(NEXT)
    if (
        following is None
        or x.is_inference()
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    ):
        return None
    connection = getattr(following[0], CHILD).additions[0]
    return connection if next(connection.parameters()).device == x.device else None


def hand_onward(layer: nn.Module, streams: Streams) -> None:
    """Keep for the next layer what was read for it."""
    vars(vars(layer)[NEXT][0])[READ] = (streams.x, streams.x._version, streams.onward)


def take_onward(layer: nn.Module, x: Tensor) -> Any:
    """Return what was read ahead from these streams, or None."""
    read = None if torch.compiler.is_compiling() else vars(layer).pop(READ, None)
    return read[2] if read is not None and read[0] is x and read[1] == x._version else None
