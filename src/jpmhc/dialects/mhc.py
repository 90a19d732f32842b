"""The connections of DeepSeek's mHC and its successors, with one learned scale for each kind of logits.

With m = fn · norm(x) for the flattened streams x of a token, the logits are m · scale + base. The read and write
weights are sigmoids of their logits. The skip is the identity or a Sinkhorn matrix, which most dialects transpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import HyperConnection, StreamHead
from jpmhc.connections.coefficients import CoefficientMap
from jpmhc.dialects.keys import PARTS, Naming, check_connections, check_shape, collect_sites
from jpmhc.mixers import Identity, Mixer, SettingsModule, Sinkhorn

# The names of the three numbers of "scale", if a model has a tensor for each number.
SCALES = ("read_scale", "write_scale", "skip_scale")
MARKER = r"(^|\.)hc_|_hc\."  # matches every key of a connection in the family of DeepSeek-V4
# The names of the tensors of a layer's two connections: in one module per connection, or in the layer itself.
LAYERS_WITH_MODULES = {
    "layers.{}.attn": "layers.{}.attn_hc.[part]",
    "layers.{}.ffn": "layers.{}.ffn_hc.[part]",
}
LAYERS_WITH_TENSORS = {
    "layers.{}.attn": "layers.{}.hc_attn_[part]",
    "layers.{}.ffn": "layers.{}.hc_ffn_[part]",
}
# The names of the connections and the head that several families share in `transformers`.
TRANSFORMERS_NAMES = Naming("model.", {**LAYERS_WITH_MODULES, "head": "hc_head.hc_[part]"})


class ScaledParameters(nn.Module):
    """A module with the three tensors of one connection; a module of `transformers` with such tensors can replace it.

    Args:
        fn: The projection. [K, n * dim]
        base: The bias. [K]
        scale: The factors of the projected logits: for the read, the write and, if there is one, the skip. [2 or 3]
    """

    def __init__(self, fn: Tensor, base: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.fn, self.base, self.scale = (nn.Parameter(tensor.detach().clone()) for tensor in (fn, base, scale))


class ScaledMap(CoefficientMap):
    """A coefficient map with the logits fn · norm(x) · scale + base, which uses another module's parameters.

    Args:
        parameters: The module with the parameters. Every call looks the parameters up, so that the map uses moved,
            sharded or replaced parameters.
        borrowed: Whether that module stays a part of another model; otherwise it becomes a part of the map.
        settings: Other settings, as in `CoefficientMap.configure`.
    """

    source: ScaledParameters

    def __init__(self, parameters: ScaledParameters, borrowed: bool, dim: int, mixer: Mixer, **settings: Any) -> None:
        SettingsModule.__init__(self)
        self.configure(dim, mixer, **settings)
        self.favoured, self._filled = 0, True
        if borrowed:
            self.__dict__["source"] = parameters
        else:
            self.source = parameters

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The projection, not yet multiplied by the scales. [K, n * dim]"""
        return self.source.fn

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """The bias, in float32 or float64. [K]"""
        return _widen(self.source.base)

    @property
    def scale(self) -> float:
        return 1.0

    def parameters_in_use(self) -> tuple[Tensor, Tensor]:
        sizes = [size for size in self.sizes if size]
        scales = torch.cat([part.expand(size) for part, size in zip(_widen(self.source.scale).split(1), sizes)])
        return _widen(self.weight) * scales.unsqueeze(-1), self.bias

    def reset_parameters(self) -> None:
        raise RuntimeError(
            "the parameters of this connection come from a published model and have no initial values to return to"
        )


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class ScaledConnection(HyperConnection):
    """A hyper-connection whose coefficients come from a `ScaledMap`."""

    map: ScaledMap

    def __init__(self, coefficients: ScaledMap, kernels: str) -> None:
        SettingsModule.__init__(self)
        self.sublayer, self.kernels, self.post_norm = None, kernels, None
        self.write_scale, self.layer_norm = 1.0, None
        self.dim, self.streams = coefficients.dim, coefficients.mixer.streams
        self.map = coefficients


@dataclass(frozen=True)
class Dialect:
    """A family of models: the names of the connections' tensors, and the connections' settings.

    Attributes:
        title: The family's name, for messages.
        namings: The family's sets of names, such as `"huggingface"`, by the name of the set.
        marker: A regular expression that every key of a connection matches, and no other key.
        norm_eps: `rms_norm_eps` of the family's configurations.
        mean_head: Whether the head is the mean of the streams, which has no key in the state dict.
        skip: The skip matrix, in the words of `describe_skip`.
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
        """Make a model's connections, and its head if it has one, from the model's state dict.

        Args:
            state_dict: The model's tensors under Hugging Face's or the original names. Tensors that are not a
                connection's are ignored.
            streams: The number of streams, `hc_mult` of the model's configuration.
            iterations: The number of Sinkhorn iterations, `hc_sinkhorn_iters`.
            eps: Added to the read weights and in the Sinkhorn iterations, `hc_eps`.
            norm_eps: The norm's eps, `rms_norm_eps`; None takes the family's value.

        Returns:
            A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …, and a `StreamHead` for "head".

        Example:
            >>> import jpmhc, torch
            >>> parts = {"fn": torch.zeros(24, 32), "base": torch.zeros(24), "scale": torch.ones(3)}
            >>> weights = {f"layers.0.hc_{site}_{part}": parts[part] for site in ("attn", "ffn") for part in parts}
            >>> connections = jpmhc.dialects.deepseek_v4.load(weights, streams=4)
            >>> list(connections), connections["layers.0.attn"].dim
            (['layers.0.attn', 'layers.0.ffn'], 8)
        """
        norm_eps = self.norm_eps if norm_eps is None else norm_eps
        return self.make_connections(state_dict, streams, eps, norm_eps, iterations=iterations)

    def make_connections(
        self, state_dict: Mapping[str, Tensor], streams: int, eps: float, norm_eps: float, **settings: Any
    ) -> dict[str, nn.Module]:
        """Make the connection or the learned head of every site in a state dict, and return them by site.

        Args:
            settings: Other settings of `make_scaled_connection`; all other arguments are as in `load`.
        """
        checks.whole_number(streams, "streams")
        checks.optional_whole_number(settings.get("iterations"), "iterations")
        sites = collect_sites(state_dict, self.namings, self.marker, self.title)
        connections: dict[str, ScaledConnection | StreamHead] = {
            site: make_head(parts, streams, eps, norm_eps, site)
            if site.endswith("head")
            else make_scaled_connection(join_scales(parts, site), streams, eps, norm_eps, site, **settings)
            for site, parts in sites.items()
        }
        first = next(iter(connections))
        dim = connections[first].dim
        for site, module in connections.items():
            if module.dim != dim:
                raise ValueError(f"{site}.fn is for streams of width {module.dim}, {first}.fn for {dim}")
        return {**connections, **({"head": StreamHead(dim, streams, "mean")} if self.mean_head else {})}

    def dump(
        self, connections: Mapping[str, nn.Module], names: str | None = None, prefix: str | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of connections that `load` made, under the names of the published model.

        Args:
            connections: The connections by site, as `load` returns them.
            names: The set of names, such as "huggingface" or "original"; None takes the dialect's first set.
            prefix: The text before every key, in place of the prefix of the names.

        Example:
            >>> import jpmhc, torch
            >>> parts = {"fn": torch.zeros(24, 32), "base": torch.zeros(24), "scale": torch.ones(3)}
            >>> weights = {f"layers.0.hc_{site}_{part}": parts[part] for site in ("attn", "ffn") for part in parts}
            >>> connections = jpmhc.dialects.deepseek_v4.load(weights)
            >>> next(iter(jpmhc.dialects.deepseek_v4.dump(connections, "huggingface")))
            'model.layers.0.attn_hc.fn'
        """
        check_connections(connections)
        names = next(iter(self.namings)) if names is None else names
        checks.choice(names, self.namings, "set of names")
        naming = self.namings[names]
        state: dict[str, Tensor] = {}
        for site, module in connections.items():
            tensors = read_parts(module, site, self.title, self.skip)
            if tensors and SCALES[0] in naming.parts_of(site):
                tensors |= dict(zip(SCALES, tensors.pop("scale").split(1)))
            for part, tensor in tensors.items():
                state[naming.make_key(site, part, prefix)] = tensor
        return state


def join_scales(parts: Mapping[str, Tensor], site: str) -> ScaledParameters:
    """Return one connection's parameters as a module; scales in separate tensors (`SCALES`) are joined into one."""
    if "scale" in parts:
        return ScaledParameters(**parts)
    for name in SCALES:
        if parts[name].numel() != 1:
            raise ValueError(f"{site}.{name} must be one number, got the shape {list(parts[name].shape)}")
    return ScaledParameters(parts["fn"], parts["base"], torch.cat([parts[name].reshape(1) for name in SCALES]))


def read_parts(module: nn.Module, site: str, dialect: str, skip: str) -> dict[str, Tensor]:
    """Return the tensors of a connection or a head by part (`PARTS`); none for a head without parameters.

    Args:
        site: The site of the connection, for messages.
        dialect: The dialect's name, for messages.
        skip: The dialect's skip, as in `Dialect.skip`. A connection with another skip raises an error.
    """
    if isinstance(module, ScaledConnection):
        if describe_skip(module.mixer) != skip:
            raise ValueError(f"the skip of {site} is {describe_skip(module.mixer)}, but {dialect} has {skip}")
        return {part: getattr(module.map.source, part).detach() for part in PARTS}
    if isinstance(module, StreamHead):
        return dict(zip(PARTS, module.state_dict().values())) if module.kind == "learned" else {}
    raise ValueError(f"{site} must be a connection or a head that load returned, got {type(module).__name__}")


def make_scaled_connection(
    parameters: ScaledParameters,
    streams: int,
    eps: float,
    norm_eps: float,
    site: str,
    borrowed: bool = False,
    *,
    iterations: int | None = None,
    transposed: bool = True,
    kernels: str = "auto",
    **settings: Any,
) -> ScaledConnection:
    """Check the shapes of a connection's parameters, and make the connection.

    Args:
        eps: Added to the read weights, and in the Sinkhorn iterations.
        norm_eps: The norm's eps.
        site: The name of the connection's place, for messages.
        borrowed: Whether the module `parameters` stays a part of another model.
        iterations: The number of Sinkhorn iterations; None makes the skip the identity. Each iteration normalises the
            rows of a matrix C and then its columns.
        transposed: Whether the skip is Cᵀ, and not C.
        settings: Other settings of `ScaledMap`; `read_eps` replaces `eps` for the reads.
    """
    mixer: Mixer = Identity(streams)
    if iterations is not None:
        sides: dict[str, Any] = {"first": "columns" if transposed else "rows", "transposed": transposed}
        mixer = Sinkhorn(streams, iterations=iterations, gradient="unrolled", eps=eps, clamp=None, **sides)
    dim = _find_dim(parameters, streams, 2 * streams + mixer.logits, 3 if mixer.logits else 2, site)
    settings = {"eps": norm_eps, "read_eps": eps, **settings}
    return ScaledConnection(ScaledMap(parameters, borrowed, dim, mixer, **settings), kernels)


def describe_skip(mixer: Mixer) -> str:
    """Return a phrase for a mixer's skip matrix, as in `Dialect.skip` and in messages."""
    if not isinstance(mixer, Sinkhorn):
        return "the identity"
    return "Sinkhorn's matrix transposed" if mixer.transposed else "Sinkhorn's matrix"


def make_head(parts: Mapping[str, Tensor], streams: int, eps: float, norm_eps: float, site: str) -> StreamHead:
    """Return a learned head with the tensors `fn`, `base` and `scale` of `parts`; messages name its `site`."""
    source = ScaledParameters(**parts)
    dim = _find_dim(source, streams, streams, 1, site)
    head = StreamHead(dim, streams, eps=norm_eps, read_eps=eps, device=source.fn.device)
    head.weight, head.bias, head.scale = source.fn, source.base, source.scale
    return head


def _find_dim(tensors: ScaledParameters, streams: int, logits: int, scales: int, site: str) -> int:
    """Return the width of a stream. Raise an error unless the tensors have shapes for so many logits and scales."""
    fn = tensors.fn
    if fn.ndim != 2 or fn.shape[1] % streams:
        raise ValueError(f"{site}.fn must have the shape [{logits}, {streams} * dim], got {list(fn.shape)}")
    check_shape(fn, (logits, fn.shape[1]), f"with {streams} streams {site}.fn")
    check_shape(tensors.base, (logits,), f"with {streams} streams {site}.base")
    check_shape(tensors.scale, (scales,), f"{site}.scale")
    return fn.shape[1] // streams
