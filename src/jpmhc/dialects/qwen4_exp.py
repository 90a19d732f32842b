r"""Qwen3.8-Flash-Next: a gated residual, whose skip is the identity and whose read has a weight for every channel.

Let x̂ be the flattened streams, each divided by its root mean square and multiplied by 1 + hc_norm. Then

    read = mean over streams of σ(U silu(D x̂ / n)) ⊙ x̂,   write = 2σ(B x̂ / n),   x_i ← x_i + write_i y.

Here σ is the sigmoid, y the sublayer's output, and D, U and B are the matrices `down`, `up` and `inject`. The
sublayer's input is already normalised, so that blocks have no other norm and the model has no last norm.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections.hyper import KERNELS
from jpmhc.connections.streams import check_streams
from jpmhc.connections.sublayer import check_sublayer_output
from jpmhc.dialects import keys

_GATE = {"norm": "hc_norm.weight", "down": "input_mix_weight_down.weight", "up": "input_mix_weight_up.weight"}
NAMINGS = {
    "huggingface": keys.Naming(
        "model.language_model.",
        {
            "layers.{}.attn": "layers.{}.attn_hyper_connection.[part]",
            "layers.{}.mlp": "layers.{}.mlp_hyper_connection.[part]",
            "head": "hyper_connection_mixer.[part]",
        },
        {"": {**_GATE, "inject": "block_inject_weight.weight"}, "head": _GATE},
    )
}
MARKER = r"(^|\.)((attn|mlp)_hyper_connection|hyper_connection_mixer)\."


class GatedResidual(nn.Module):
    """A module that reads n streams with one weight per channel and writes to the streams; without `inject`, a head.

    Args:
        norm: The norm's weight minus one. [n * dim]
        down: The first matrix of the read's gate. [rank, n * dim]
        up: The second matrix of the read's gate. [n * dim, rank]
        inject: The projection to the write weights; None makes a head, which has no write. [n, n * dim]
        streams: The number n of streams.
        eps: Added to the mean square under the norm's root.

    Shapes:
        x: [..., n, dim]
    """

    def __init__(
        self,
        norm: Tensor,
        down: Tensor,
        up: Tensor,
        inject: Tensor | None = None,
        *,
        streams: int = 4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        checks.whole_number(streams, "streams")
        eps = checks.positive_number(eps, "eps")
        self.streams, self.dim, self.eps = streams, norm.numel() // streams, eps
        self.norm, self.down, self.up = (nn.Parameter(tensor.detach().clone()) for tensor in (norm, down, up))
        self.inject = None if inject is None else nn.Parameter(inject.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return only the gated read of the streams, as the model's head does. [..., dim]"""
        return self.read(x)[0]

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read the streams. Return the sublayer's input [..., dim], and the write weights [..., n] for `write`."""
        check_streams(x, self.streams, self.dim)
        return read_gated(x, self.norm, self.down, self.up, self.eps, self.inject)

    def write(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Return the streams plus y [..., dim], the sublayer's output, times each stream's write weight."""
        return write_gated(x, check_sublayer_output(y, x), weights)


def read_gated(
    x: Tensor, norm: Tensor, down: Tensor, up: Tensor, eps: float, inject: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gated read of the streams, and write weights if `inject` is given. [..., n, d] → [..., d], [..., n]"""
    streams = x.shape[-2]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (normed.flatten(-2) * (1 + norm.to(wide.dtype))).to(x.dtype)
    gate = F.linear(F.silu(F.linear(normed, down) / streams), up).sigmoid()
    h = (gate * normed).unflatten(-1, x.shape[-2:]).mean(-2)
    return h, None if inject is None else 2 * (F.linear(normed, inject) / streams).sigmoid()


def write_gated(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Add y, times the stream's write weight, to each stream of x. [..., n, d], [..., d], [..., n] → [..., n, d]"""
    return x + y.unsqueeze(-2) * weights.unsqueeze(-1)


def write_read_gated(x: Tensor, y: Tensor, weights: Tensor, *following: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the streams after `write_gated` and their `read_gated`; in one function, a compiler can fuse both."""
    x = write_gated(x, y, weights)
    return x, *read_gated(x, *following)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def load(state_dict: Mapping[str, Tensor], *, streams: int = 4, norm_eps: float = 1e-6) -> dict[str, nn.Module]:
    """Make the gated residuals of a Qwen3.8-Flash-Next model from its state dict.

    Args:
        state_dict: The model's tensors under Hugging Face's names; tensors that are not a connection's are ignored.
        streams: The number of streams, `hc_count` of the model's configuration.
        norm_eps: The norm's eps, `rms_norm_eps`.

    Returns:
        A `GatedResidual` for each of "layers.0.attn", "layers.0.mlp", …, and one for "head".

    Example:
        >>> import jpmhc, torch
        >>> weights = {"hc_norm": torch.zeros(32), "input_mix_weight_down": torch.zeros(2, 32)}
        >>> weights |= {"input_mix_weight_up": torch.zeros(32, 2)}
        >>> weights = {f"hyper_connection_mixer.{name}.weight": tensor for name, tensor in weights.items()}
        >>> head = jpmhc.dialects.qwen4_exp.load(weights, streams=4)["head"]
        >>> head(torch.randn(2, 4, 8)).shape
        torch.Size([2, 8])
    """
    checks.whole_number(streams, "streams")
    sites = keys.collect_sites(state_dict, NAMINGS, MARKER, "Qwen3.8-Flash-Next")
    for site, parts in sites.items():
        width, rank = parts["norm"].numel(), parts["down"].shape[0]
        if width % streams:
            raise ValueError(f"with {streams} streams {site}.norm must have {streams} * dim numbers, got {width}")
        shapes = {"norm": (width,), "down": (rank, width), "up": (width, rank), "inject": (streams, width)}
        for part, tensor in parts.items():
            keys.check_shape(tensor, shapes[part], f"with {streams} streams {site}.{part}")
    return {site: GatedResidual(**parts, streams=streams, eps=norm_eps) for site, parts in sites.items()}


def dump(
    connections: Mapping[str, nn.Module], names: str = "huggingface", prefix: str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of gated residuals that `load` made, under `"huggingface"` names.

    Args:
        connections: The gated residuals by site, as `load` returns them.
        names: The set of names.
        prefix: The text before every key, in place of the prefix of the names.

    Example:
        >>> import jpmhc, torch
        >>> weights = {"hc_norm": torch.zeros(32), "input_mix_weight_down": torch.zeros(2, 32)}
        >>> weights |= {"input_mix_weight_up": torch.zeros(32, 2)}
        >>> weights = {f"hyper_connection_mixer.{name}.weight": tensor for name, tensor in weights.items()}
        >>> connections = jpmhc.dialects.qwen4_exp.load(weights)
        >>> jpmhc.dialects.qwen4_exp.dump(connections, prefix="").keys() == weights.keys()
        True
    """
    keys.check_connections(connections)
    checks.choice(names, NAMINGS, "set of names")
    naming = NAMINGS[names]
    return {
        naming.make_key(site, part, prefix): tensor
        for site, module in connections.items()
        for part, tensor in module.state_dict().items()
    }


class GatedResidualRunner:
    """Computes a gated residual of `transformers` (a connection or the head) by the functions of this file."""

    def __init__(self, module: Any, name: str, kernels: str) -> None:
        checks.choice(kernels, KERNELS, "kind of kernels")
        self.module, self.kernels = module, kernels

    def flatten(self, hidden_states: Tensor) -> Tensor:
        """Reshape the streams of all T tokens. [..., n * d] → [T, n, d]"""
        return hidden_states.reshape(-1, self.module.hc_count, self.module.hidden_size)

    def run(self, function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
        """Call a function with the module's parameters, compiled if `kernels` is "fused", or "auto" on a GPU.

        Every call looks the parameters up, so that moved or sharded parameters are used.
        """
        module = self.module
        if function is not write_gated:
            weights = (module.hc_norm.weight, module.input_mix_weight_down.weight, module.input_mix_weight_up.weight)
            inject = () if module.block_inject_weight is None else (module.block_inject_weight.weight,)
            arguments = (*arguments, *weights, module.hc_norm.eps, *inject)
        fused = self.kernels == "fused" or (self.kernels == "auto" and x.is_cuda)
        return (_compile(function) if fused and not torch.compiler.is_compiling() else function)(x, *arguments)

    def forward(self, hyper_input: Tensor) -> Any:
        x, lead = self.flatten(hyper_input), hyper_input.shape[:-1]
        h, weights = self.run(read_gated, x)
        if weights is None:
            return h.reshape(*lead, -1)
        return h.reshape(*lead, -1), hyper_input, weights.reshape(*lead, -1)


class Layer:
    """Computes a `transformers` decoder layer, with the attention's write and the MLP's read in one function."""

    def __init__(self, layer: Any, name: str, kernels: str) -> None:
        self.layer = layer
        self.attention = GatedResidualRunner(layer.attn_hyper_connection, f"{name}.attn_hyper_connection", kernels)
        self.feedforward = GatedResidualRunner(layer.mlp_hyper_connection, f"{name}.mlp_hyper_connection", kernels)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        ple_input_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        layer = self.layer
        if layer.ple is not None:
            added = layer.ple(hidden_states, ple_input_ids, past_key_values, conv_mask=conv_mask)
            hidden_states = hidden_states + added
        x, shape = self.attention.flatten(hidden_states), (*hidden_states.shape[:-1], -1)
        h, weights = self.attention.run(read_gated, x)
        h = h.reshape(shape)
        if layer.layer_type == "linear_attention":
            y = layer.linear_attn(h, cache_params=past_key_values, attention_mask=conv_mask, **kwargs)
        else:
            y, _ = layer.self_attn(
                h, position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )
        x, h, weights = self.feedforward.run(write_read_gated, x, y.flatten(0, -2), weights)
        y = layer.mlp(h.reshape(shape))
        return self.feedforward.run(write_gated, x, y.flatten(0, -2), weights).reshape(shape)


RUNNERS = {"Qwen4ExpTextDecoderLayer": Layer, "Qwen4ExpTextGatedResidual": GatedResidualRunner}
