"""Tiny random models of `transformers` that have hyper-connections, at mild and at sharp logits."""

import pytest
import torch
from torch import nn

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2}
SIZES |= {"num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0}
ATTENTION = {"q_lora_rank": 16, "index_topk": 4, "index_n_heads": 2}


def require(name: str):
    """Return a model family's module of `transformers`, or skip the test where it is not installed."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return pytest.importorskip(f"transformers.models.{name}", reason=f"transformers has no {name}")


def deepseek_v4(layers: int = 3) -> nn.Module:
    module = require("deepseek_v4")
    config = module.DeepseekV4Config(
        **SIZES,
        **ATTENTION,
        num_hidden_layers=layers,
        head_dim=16,
        n_routed_experts=4,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=8,
        index_head_dim=8,
        num_nextn_predict_layers=0,
    )
    return module.DeepseekV4ForCausalLM(config)


def glm5_next(layers: int = 4) -> nn.Module:
    module = require("glm5_next")
    text = {
        **SIZES,
        **ATTENTION,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "kv_lora_rank": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_head_dim": 8,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "index_kpool": 2,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "intermediate_size": 16,
        "projection_intermediate_size": 16,
    }
    return module.Glm5NextForConditionalGeneration(module.Glm5NextConfig(text_config=text, vision_config=vision))


def hy_v4(layers: int = 3) -> nn.Module:
    module = require("hy_v4")
    config = module.HYV4Config(
        **SIZES,
        **ATTENTION,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        n_routed_experts=4,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
        index_head_dim=16,
        hc_magnitude=3.0,
    )
    return module.HYV4ForCausalLM(config)


def qwen4_exp() -> nn.Module:
    module = require("qwen4_exp")
    config = module.Qwen4ExpTextConfig(
        **SIZES,
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        shared_expert_intermediate_size=16,
        num_experts=4,
        eos_token_id=2,
        hc_lowrank=6,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
        ple_layer_ids=[1],
        ple_embed_dim=16,
        ngram_vocab_size_base=50,
        split_ngram_parts=4,
        heads_per_ngram=2,
    )
    model = module.Qwen4ExpForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "hyper_connection" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def sharpen(model: nn.Module, largest: float, seed: int = 0) -> nn.Module:
    """Draw the connections' parameters anew, the skip's static logits up to `largest`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        part = name.rpartition(".")[2].removeprefix("hc_")
        if part not in ("fn", "base", "scale"):
            continue
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if part == "base":
            drawn *= largest / drawn.abs().max()
        elif part == "scale":
            drawn = 0.5 + drawn.abs()
        else:
            drawn *= 0.05
        parameter.data.copy_(drawn)
    return model


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
