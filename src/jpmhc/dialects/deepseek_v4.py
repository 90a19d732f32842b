"""DeepSeek-V4: mHC with eps, the transposed Sinkhorn matrix as skip, and a learned head before the last norm.

The norm is over all n · d numbers of a token, with its eps under the root. With σ the sigmoid of the logits of the read
or the write,

    read = σ + eps,  write = 2σ,  H = Cᵀ,
    C = softmax of each row of the skip's logits, plus eps; then the columns, rows, …, columns in turn are divided by
        their sums plus eps.
"""

from typing import Any

from torch import Tensor

from jpmhc.connections.ends import read_streams
from jpmhc.dialects import keys, mhc
from jpmhc.dialects.layers import ConnectedLayer

_NAMINGS = {
    "huggingface": mhc.TRANSFORMERS_NAMES,
    "original": keys.Naming(
        "",
        {
            **mhc.LAYERS_WITH_TENSORS,
            "mtp.{}.attn": "mtp.{}.hc_attn_[part]",
            "mtp.{}.ffn": "mtp.{}.hc_ffn_[part]",
            "mtp.{}.head": "mtp.{}.hc_head_[part]",
            "head": "hc_head_[part]",
        },
    ),
}
DIALECT = mhc.Dialect("DeepSeek-V4", _NAMINGS, mhc.MARKER)
load, dump = DIALECT.load, DIALECT.dump


class Layer(ConnectedLayer):
    """Computes a `transformers` decoder layer with this package's connections, which use the layer's parameters."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        layer = self.layer
        h, state = self.begin(hidden_states)
        y, _ = layer.self_attn(layer.input_layernorm(h), **kwargs)
        x, h, state = self.attention.write_read(hidden_states, y, state, self.feedforward)
        return self.end(x, layer.mlp(layer.post_attention_layernorm(h), input_ids=input_ids), state)


class Head:
    """Computes the learned head of `transformers` by this package's functions."""

    def __init__(self, head: Any, name: str, kernels: str) -> None:
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        head = self.head
        return read_streams(x, head.hc_fn * head.hc_scale, head.hc_base, head.input_norm.eps, head.eps)


RUNNERS = {"DeepseekV4DecoderLayer": Layer, "DeepseekV4HyperHead": Head}
