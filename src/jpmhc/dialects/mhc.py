"""What the dialects share that follow DeepSeek's mHC: sigmoid reads and writes, Sinkhorn used transposed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import StreamHead
from jpmhc.dialects.keys import Naming, Places, check_shape
from jpmhc.dialects.scaled import ScaledConnection, ScaledMap, ScaledParameters
from jpmhc.mixers import Identity, Mixer, Sinkhorn

PARTS = ("fn", "base", "scale")


def make_connection(
    parameters: Any,
    streams: int,
    iterations: int | None,
    eps: float,
    norm_eps: float,
    *,
    borrowed: bool,
    what: str,
    kernels: str = "auto",
    **settings: Any,
) -> ScaledConnection:
    """Make the connection of `fn`, `base` and `scale`, after a check of their shapes.

    Args:
        parameters: The module that has them.
        streams: n.
        iterations: T of the Sinkhorn skip; None: the skip is the identity.
        eps: Added to the reads, and in the Sinkhorn iterations.
        norm_eps: The norm's, inside its root.
        borrowed: Whether the parameters stay another model's.
        what: Where they are from, for messages.
        kernels: As in `HyperConnection`.
        settings: Others, as in `CoefficientMap.configure`.
    """
    mixer = make_mixer(streams, iterations, eps)
    logits, fn = 2 * streams + mixer.logits, parameters.fn
    if fn.ndim != 2 or fn.shape[1] % streams:
        raise ValueError(f"{what}.fn must have the shape [{logits}, {streams} * dim], got {list(fn.shape)}")
    check_shape(fn, (logits, fn.shape[1]), f"with {streams} streams {what}.fn")
    check_shape(parameters.base, (logits,), f"with {streams} streams {what}.base")
    check_shape(parameters.scale, (3 if mixer.logits else 2,), f"{what}.scale")
    dim = fn.shape[1] // streams
    coefficients = ScaledMap(parameters, borrowed, dim, mixer, eps=norm_eps, read_eps=eps, **settings)
    return ScaledConnection(coefficients, kernels=kernels)


def make_mixer(streams: int, iterations: int | None, eps: float) -> Mixer:
    """Make the skip: C by rows from a softmax on, T iterations that end with its columns, and H = Cᵀ."""
    if iterations is None:
        return Identity(streams)
    return Sinkhorn(
        streams, iterations=iterations, gradient="unrolled", eps=eps, clamp=None, first="columns", transposed=True
    )


def load_places(
    places: Places, streams: int, iterations: int | None, eps: float, norm_eps: float, **settings: Any
) -> dict[str, nn.Module]:
    """Make a connection for every place, and a learned head where a place is one."""
    checks.at_least_one(streams, "streams")
    checks.at_least_one(iterations, "iterations")
    return {
        place: make_head(parts, streams, eps, norm_eps, place)
        if place.endswith("head")
        else make_connection(
            ScaledParameters(**parts), streams, iterations, eps, norm_eps, borrowed=False, what=place, **settings
        )
        for place, parts in places.items()
    }


def make_head(parts: Mapping[str, Tensor], streams: int, eps: float, norm_eps: float, what: str) -> StreamHead:
    """Make the learned head of `fn`, `base` and `scale`."""
    fn = parts["fn"]
    if fn.ndim != 2 or fn.shape[1] % streams:
        raise ValueError(f"{what}.fn must have the shape [{streams}, {streams} * dim], got {list(fn.shape)}")
    check_shape(fn, (streams, fn.shape[1]), f"with {streams} streams {what}.fn")
    check_shape(parts["base"], (streams,), f"with {streams} streams {what}.base")
    check_shape(parts["scale"], (1,), f"{what}.scale")
    head = StreamHead(fn.shape[1] // streams, streams, eps=norm_eps, read_eps=eps, device=fn.device)
    with torch.no_grad():
        for name, part in zip(("weight", "bias", "scale"), PARTS):
            setattr(head, name, nn.Parameter(parts[part].detach().clone()))
    return head


def dump_places(connections: Mapping[str, nn.Module], naming: Naming, prefix: str | None) -> dict[str, Tensor]:
    """Return the tensors of connections and heads under a naming's keys."""
    state: dict[str, Tensor] = {}
    for place, module in connections.items():
        if isinstance(module, ScaledConnection):
            tensors = {part: getattr(module.map.source, part).detach() for part in PARTS}
        elif isinstance(module, StreamHead):
            tensors = dict(zip(PARTS, module.state_dict().values())) if module.kind == "learned" else {}
        else:
            raise ValueError(f"{place} must be a connection or a head that load returned, got {type(module).__name__}")
        for part, tensor in tensors.items():
            state[naming.make_key(place, part, prefix)] = tensor
    return state
