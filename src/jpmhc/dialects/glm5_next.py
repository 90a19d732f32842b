"""GLM-5.3-Flash: the connections of DeepSeek-V4 with another eps in the norm, and the streams' mean as head."""

from typing import Any

from torch import Tensor

from jpmhc.dialects import keys, mhc
from jpmhc.dialects.layers import ConnectedLayer

_PREFIX = "model.language_model."
_NAMINGS = {
    "huggingface": keys.Naming(_PREFIX, mhc.LAYERS_WITH_MODULES),
    "original": keys.Naming(_PREFIX, mhc.LAYERS_WITH_TENSORS),
}
DIALECT = mhc.Dialect("GLM-5.3-Flash", _NAMINGS, mhc.MARKER, norm_eps=1e-5, mean_head=True)
load, dump = DIALECT.load, DIALECT.dump


class Layer(ConnectedLayer):
    """Computes a `transformers` decoder layer with this package's connections, which use the layer's parameters."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        h, state = self.begin(hidden_states)
        h, selected = layer.input_layernorm(h), None
        if layer.block_type == "linear_attention":
            y = layer.self_attn(hidden_states=h, cache_params=past_key_values, attention_mask=attention_mask, **kwargs)
        else:
            y, _, selected = layer.self_attn(
                hidden_states=h,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
        x, h, state = self.attention.write_read(hidden_states, y, state, self.feedforward)
        return self.end(x, layer.mlp(layer.post_attention_layernorm(h)), state), selected


RUNNERS = {"Glm5NextTextDecoderLayer": Layer}
