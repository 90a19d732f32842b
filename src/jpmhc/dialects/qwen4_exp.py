r"""Qwen3.8-Flash-Next: a gated residual, whose skip is the identity and whose read has a weight for every channel.

With x̂ the streams, each divided by its own root mean square and multiplied by 1 + hc_norm, and flattened,

    read = mean over streams of σ(U silu(D x̂ / n)) ⊙ x̂,   write = 2σ(B x̂ / n),   x_i ← x_i + write_i y.

What the sublayer sees is already normalised, so that a block has no other norm, and the model no last one.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections.streams import check_sublayer_output, flatten_streams
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
    """Reads n streams channel by channel and writes to them beside the identity; without `inject` it is a head.

    Args:
        norm: The norm's weight less one. [n * dim]
        down: The read's gate, to its rank. [rank, n * dim]
        up: The read's gate, from its rank. [n * dim, rank]
        inject: The projection to the write weights; None makes a head, which has no write. [n, n * dim]
        streams: n.
        eps: The norm's, inside its root.

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
        checks.at_least_one(streams, "streams")
        checks.positive(eps, "eps")
        self.streams, self.dim, self.eps = streams, norm.numel() // streams, eps
        self.norm, self.down, self.up = (nn.Parameter(tensor.detach().clone()) for tensor in (norm, down, up))
        self.inject = None if inject is None else nn.Parameter(inject.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Read the streams, as the model's head does. [..., dim]"""
        return self.read(x)[0]

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the sublayer's input [..., dim], and the write weights [..., n] for `write`."""
        flatten_streams(x, self.streams, self.dim)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = (normed.flatten(-2) * (1 + self.norm.to(wide.dtype))).to(x.dtype)
        gate = F.linear(F.silu(F.linear(normed, self.down) / self.streams), self.up).sigmoid()
        h = (gate * normed).unflatten(-1, x.shape[-2:]).mean(-2)
        return h, None if self.inject is None else 2 * (F.linear(normed, self.inject) / self.streams).sigmoid()

    def write(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Add the sublayer's output y [..., dim] to each stream, times its weight."""
        return x + check_sublayer_output(y, x).unsqueeze(-2) * weights.unsqueeze(-1)


def load(state_dict: Mapping[str, Tensor], *, streams: int = 4, norm_eps: float = 1e-6) -> dict[str, nn.Module]:
    """Make the gated residuals of a Qwen3.8-Flash-Next model from its state dict.

    Args:
        state_dict: The model's tensors under Hugging Face's names; other tensors are left alone.
        streams: `hc_count` of the model's configuration.
        norm_eps: `rms_norm_eps`.

    Returns:
        A `GatedResidual` for each of "layers.0.attn", "layers.0.mlp", …, and one for "head".
    """
    checks.at_least_one(streams, "streams")
    places = keys.collect(state_dict, NAMINGS, MARKER, "Qwen3.8-Flash-Next")
    for place, parts in places.items():
        width, rank = parts["norm"].numel(), parts["down"].shape[0]
        if width % streams:
            raise ValueError(f"with {streams} streams {place}.norm must have {streams} * dim numbers, got {width}")
        shapes = {"norm": (width,), "down": (rank, width), "up": (width, rank), "inject": (streams, width)}
        for part, tensor in parts.items():
            keys.check_shape(tensor, shapes[part], f"with {streams} streams {place}.{part}")
    return {place: GatedResidual(**parts, streams=streams, eps=norm_eps) for place, parts in places.items()}


def dump(
    connections: Mapping[str, nn.Module], names: str = "huggingface", prefix: str | None = None
) -> dict[str, Tensor]:
    """Return the tensors of gated residuals that `load` made, under `"huggingface"` names.

    Args:
        connections: What `load` returned.
        names: Which names.
        prefix: What stands before every key instead of the names' own prefix.
    """
    checks.choice(names, NAMINGS, "names")
    naming = NAMINGS[names]
    return {
        naming.make_key(place, part, prefix): tensor
        for place, module in connections.items()
        for part, tensor in module.state_dict().items()
    }
