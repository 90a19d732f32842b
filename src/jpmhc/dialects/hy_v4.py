"""HY-V4: sigmoid reads and writes with eps, the identity as skip, and DeepSeek-V4's learned head.

The read weights are σ + eps and the write weights are magnitude · σ + eps, where σ is the sigmoid of the logits. The
norm is over all n · d numbers of a token.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from jpmhc.dialects import keys, mhc
from jpmhc.dialects.deepseek_v4 import Head
from jpmhc.dialects.layers import ConnectedLayer

_NAMINGS = {
    "huggingface": mhc.TRANSFORMERS_NAMES,
    "original": keys.Naming(
        "model.",
        {
            "layers.{}.attn": "layers.{}.hc_attn_layer.hc_pre.hc_[part]",
            "layers.{}.ffn": "layers.{}.hc_mlp_layer.hc_pre.hc_[part]",
            "head": "hc_head.hc_head_[part]",
        },
    ),
}
DIALECT = mhc.Dialect("HY-V4", _NAMINGS, r"(^|\.)(hc_(attn_layer|mlp_layer|head)|(attn|ffn)_hc)\.", skip="the identity")
dump = DIALECT.dump


def load(
    state_dict: Mapping[str, Tensor],
    *,
    streams: int = 4,
    magnitude: float = 2.0,
    eps: float = 1e-6,
    norm_eps: float = 1e-5,
) -> dict[str, nn.Module]:
    """Make the connections and the head of an HY-V4 model from its state dict.

    Args:
        state_dict: The model's tensors under Hugging Face's or the original names; other tensors are ignored.
        streams: The number of streams, `hc_mult` of the model's configuration.
        magnitude: The largest write weight without eps, `hc_magnitude`.
        eps: Added to the read weights and the write weights, `hc_eps`.
        norm_eps: The norm's eps, `rms_norm_eps`.

    Returns:
        A `HyperConnection` for each of "layers.0.attn", "layers.0.ffn", …, and a `StreamHead` for "head".

    Example:
        >>> import jpmhc, torch
        >>> parts = {"fn": torch.zeros(8, 32), "base": torch.zeros(8), "scale": torch.ones(2)}
        >>> sites = ("layers.0.attn_hc", "layers.0.ffn_hc")
        >>> weights = {f"model.{site}.{part}": parts[part] for site in sites for part in parts}
        >>> connections = jpmhc.dialects.hy_v4.load(weights, streams=4)
        >>> connections["layers.0.ffn"].dim
        8
    """
    return {**DIALECT.make_connections(state_dict, streams, eps, norm_eps, write_peak=magnitude, write_eps=eps)}


class Layer(ConnectedLayer):
    """Computes a `transformers` decoder layer with this package's connections, which use the layer's parameters."""

    settings: ClassVar[dict[str, str]] = {"write_peak": "hc_post_magnitude", "write_eps": "hc_eps"}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        h, state = self.begin(hidden_states)
        y, _, selected = layer.self_attn(layer.input_layernorm(h), *args, **kwargs)
        x, h, state = self.attention.write_read(hidden_states, y, state, self.feedforward)
        return self.end(x, layer.mlp(layer.post_attention_layernorm(h)), state), selected


RUNNERS = {"HYV4DecoderLayer": Layer, "HYV4HyperHead": Head}
