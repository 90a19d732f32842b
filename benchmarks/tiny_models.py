"""Tiny models with random weights, one for each architecture of the installed `transformers`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Numbers that make a model small, by the names that configurations have for them.
SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32,
    "embedding_size": 32, "hidden_dim": 64, "word_embed_proj_dim": 32, "intermediate_size": 64, "n_inner": 64,
    "ffn_dim": 64, "d_ff": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_hidden_size": 64, "ffn_size": 64,
    "d_inner": 64, "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 3, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 8, "d_kv": 8, "kv_channels": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 128,
    "n_positions": 128, "n_ctx": 128, "image_size": 32, "patch_size": 8, "num_channels": 3, "state_size": 8,
    "time_step_rank": 4, "attention_hidden_size": 32, "rotary_dim": 4, "sliding_window": 16, "attention_window": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "layerdrop": 0.0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "num_labels": 3, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_state": 8, "ssm_state_size": 8, "max_seq_len": 128,
    "max_target_positions": 128, "max_source_positions": 128, "num_feature_levels": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

# What an architecture needs besides.
BESIDES: dict[str, dict[str, Any]] = {}

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}


def architectures(kind: str) -> Iterator[tuple[str, type, type]]:
    """The model type, configuration class and model class of every architecture of a kind."""
    import transformers.models.auto.modeling_auto as auto

    mapping = getattr(auto, KINDS[kind])
    for config_class in sorted(mapping, key=lambda found: found.model_type):
        found = mapping[config_class]
        yield config_class.model_type, config_class, found[0] if isinstance(found, tuple) else found


def small_config(config_class: type, seen: int = 0) -> Any:
    """A configuration with every known number made small, those inside it too."""
    config = config_class()
    shrink(config)
    for key, value in BESIDES.get(config.model_type, {}).items():
        setattr(config, key, value)
    return config


def shrink(config: Any) -> None:
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            shrink(value)
    mapped = getattr(config, "attribute_map", {})
    for key, value in SMALL.items():
        key = mapped.get(key, key)
        old = vars(config).get(key)
        if old is None or isinstance(old, list | tuple | dict | bool | str):
            continue
        if isinstance(old, int | float) and (old > value or key.endswith("_id") or value == 0):
            setattr(config, key, value)
    layers = getattr(config, "num_hidden_layers", None)
    for key, value in list(vars(config).items()):
        if (
            key.endswith(("layer_types", "layers_block_type", "block_types", "pattern"))
            and isinstance(value, list)
            and layers
        ):
            kinds = list(dict.fromkeys(value))
            setattr(config, key, [kinds[k % len(kinds)] for k in range(layers)])
    if hasattr(config, "dtype"):
        config.dtype = torch.float32
    config._attn_implementation = "eager"


def build(config_class: type, model_class: type) -> nn.Module:
    """A tiny model with random weights that are not as small as a fresh model's."""
    torch.manual_seed(0)
    model = model_class(small_config(config_class)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
