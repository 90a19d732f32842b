"""What the dialects share that follow DeepSeek's mHC: sigmoid reads and writes, Sinkhorn used transposed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import StreamHead
from jpmhc.dialects.keys import Naming, check_connections, check_shape, collect_places
from jpmhc.dialects.scaled import ScaledConnection, ScaledMap, ScaledParameters
from jpmhc.mixers import Identity, Mixer, Sinkhorn

PARTS = ("fn", "base", "scale")
# The three numbers of "scale" where a model keeps each in a tensor of its own.
SCALES = ("read_scale", "write_scale", "skip_scale")
MARKER = r"(^|\.)hc_|_hc\."  # in every key of a connection of DeepSeek-V4, or of one that it does not know
SAME_NAMES = {"": {part: part for part in PARTS}}  # of a model that calls the parts as we do
# How a layer names the tensors of its two connections: in a module for each connection, or as its own.
LAYERS_WITH_MODULES = {
    "layers.{}.attn": "layers.{}.attn_hc.[part]",
    "layers.{}.ffn": "layers.{}.ffn_hc.[part]",
}
LAYERS_WITH_TENSORS = {
    "layers.{}.attn": "layers.{}.hc_attn_[part]",
    "layers.{}.ffn": "layers.{}.hc_ffn_[part]",
}
# The names that `transformers` gives to the connections and the head of several families.
TRANSFORMERS_NAMES = Naming("model.", {**LAYERS_WITH_MODULES, "head": "hc_head.hc_[part]"}, SAME_NAMES)


@dataclass(frozen=True)
class Dialect:
    """The names that a family of models gives to the tensors of its connections, and what it sets by default.

    Attributes:
        title: What the family is called, for messages.
        namings: Its ways to name tensors.
        marker: A pattern that every key of a connection matches, and no other key.
        norm_eps: `rms_norm_eps` of its configurations.
        mean_head: Whether its streams end as their mean, so that no key tells of a head.
        skip: What its skip matrix is, in the words of `describe_skip`.
    """

    title: str
    namings: Mapping[str, Naming]
    marker: str
    norm_eps: float = 1e-6
    mean_head: bool = False
    skip: str = "Sinkhorn's matrix transposed"

    def load(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        streams: int = 4,
        iterations: int = 20,
        eps: float = 1e-6,
        norm_eps: float | None = None,
    ) -> dict[str, nn.Module]:
        """Make the connections of a model, and its head if it has one, from its state dict.

        Args:
            state_dict: The model's tensors under Hugging Face's or the original names; other tensors are left alone.
            streams: `hc_mult` of the model's configuration.
            iterations: `hc_sinkhorn_iters`.
            eps: `hc_eps`.
            norm_eps: `rms_norm_eps`; None: what the family has.

        Returns:
            A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …, and a `StreamHead` for "head".
        """
        norm_eps = self.norm_eps if norm_eps is None else norm_eps
        connections = self.make_connections(state_dict, streams, iterations, eps, norm_eps)
        if self.mean_head:
            dim = next(module.dim for module in connections.values())
            connections["head"] = StreamHead(dim, streams, "mean")  # type: ignore[arg-type]
        return connections

    def make_connections(
        self,
        state_dict: Mapping[str, Tensor],
        streams: int,
        iterations: int | None,
        eps: float,
        norm_eps: float,
        **settings: Any,
    ) -> dict[str, nn.Module]:
        """Make a connection for every place in a state dict, and a learned head where a place is one."""
        checks.at_least_one(streams, "streams")
        checks.at_least_one(iterations, "iterations")
        places = collect_places(state_dict, self.namings, self.marker, self.title)
        connections: dict[str, Any] = {
            place: make_head(parts, streams, eps, norm_eps, place)
            if place.endswith("head")
            else make_scaled_connection(
                join_scales(parts, place), streams, iterations, eps, norm_eps, borrowed=False, what=place, **settings
            )
            for place, parts in places.items()
        }
        first = next(iter(connections))
        for place, module in connections.items():
            if module.dim != connections[first].dim:
                raise ValueError(
                    f"{place}.fn is for streams of width {module.dim}, {first}.fn for {connections[first].dim}"
                )
        return connections

    def dump(
        self, connections: Mapping[str, nn.Module], names: str | None = None, prefix: str | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of connections that `load` made, under the names of a model.

        Args:
            connections: What `load` returned.
            names: Which names, such as "huggingface" or "original"; None: the first of the dialect's.
            prefix: What stands before every key instead of the names' own prefix.
        """
        check_connections(connections)
        names = next(iter(self.namings)) if names is None else names
        checks.choice(names, self.namings, "set of names")
        naming = self.namings[names]
        state: dict[str, Tensor] = {}
        for place, module in connections.items():
            tensors = read_parts(module, place, self.title, self.skip)
            if tensors and SCALES[0] in naming.parts_of(place):
                tensors |= dict(zip(SCALES, tensors.pop("scale").split(1)))
            for part, tensor in tensors.items():
                state[naming.make_key(place, part, prefix)] = tensor
        return state


def join_scales(parts: Mapping[str, Tensor], what: str) -> ScaledParameters:
    """Make the parameters of one connection, whose scales may come as three tensors of one number each."""
    if "scale" in parts:
        return ScaledParameters(**parts)
    for name in SCALES:
        if parts[name].numel() != 1:
            raise ValueError(f"{what}.{name} must be one number, got the shape {list(parts[name].shape)}")
    return ScaledParameters(parts["fn"], parts["base"], torch.cat([parts[name].reshape(1) for name in SCALES]))


def read_parts(module: nn.Module, what: str, dialect: str, skip: str) -> dict[str, Tensor]:
    """Return the tensors of a connection or a head by part; a head without parameters has none.

    Args:
        module: The connection or the head.
        what: Its place, for messages.
        dialect: The dialect whose tensors they are to be.
        skip: That dialect's skip. A connection with another one is refused: its tensors would mean something else.
    """
    if isinstance(module, ScaledConnection):
        if describe_skip(module.mixer) != skip:
            raise ValueError(f"the skip of {what} is {describe_skip(module.mixer)}, that of {dialect} is {skip}")
        return {part: getattr(module.map.source, part).detach() for part in PARTS}
    if isinstance(module, StreamHead):
        return dict(zip(PARTS, module.state_dict().values())) if module.kind == "learned" else {}
    raise ValueError(f"{what} must be a connection or a head that load returned, got {type(module).__name__}")


def make_scaled_connection(
    parameters: Any,
    streams: int,
    iterations: int | None,
    eps: float,
    norm_eps: float,
    *,
    borrowed: bool,
    what: str,
    kernels: str = "auto",
    transposed: bool = True,
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
        transposed: Whether the skip is the Sinkhorn matrix transposed.
        settings: Others, as in `ScaledMap`; a `read_eps` stands instead of `eps` at the reads.
    """
    mixer = make_skip(streams, iterations, eps, transposed)
    logits, fn = 2 * streams + mixer.logits, parameters.fn
    if fn.ndim != 2 or fn.shape[1] % streams:
        raise ValueError(f"{what}.fn must have the shape [{logits}, {streams} * dim], got {list(fn.shape)}")
    check_shape(fn, (logits, fn.shape[1]), f"with {streams} streams {what}.fn")
    check_shape(parameters.base, (logits,), f"with {streams} streams {what}.base")
    check_shape(parameters.scale, (3 if mixer.logits else 2,), f"{what}.scale")
    dim = fn.shape[1] // streams
    settings = {"eps": norm_eps, "read_eps": eps, **settings}
    coefficients = ScaledMap(parameters, borrowed, dim, mixer, **settings)
    return ScaledConnection(coefficients, kernels=kernels)


def make_skip(streams: int, iterations: int | None, eps: float, transposed: bool = True) -> Mixer:
    """Make the skip: C by rows from a softmax on, T iterations that end with its columns, and H = Cᵀ or C."""
    if iterations is None:
        return Identity(streams)
    first = "columns" if transposed else "rows"
    return Sinkhorn(
        streams, iterations=iterations, gradient="unrolled", eps=eps, clamp=None, first=first, transposed=transposed
    )


def describe_skip(mixer: Mixer) -> str:
    """Say what the skip of a connection with this mixer is."""
    if not isinstance(mixer, Sinkhorn):
        return "the identity"
    return "Sinkhorn's matrix transposed" if mixer.transposed else "Sinkhorn's matrix"


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
