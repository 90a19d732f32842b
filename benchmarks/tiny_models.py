"""Tiny models with random weights, one for each architecture of the installed `transformers`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

LARGEST = 30_000_000  # parameters; what does not become smaller is left out
FAILURES = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError)
FAILURES += (RuntimeError, StrictDataclassError, TypeError, ValueError)
LAYER_TYPES = ("layer_types", "layers_block_type")

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
    "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
    "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "max_target_positions": 128,
    "max_source_positions": 128, "num_feature_levels": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 4, "image_size": 32}

# What an architecture needs besides.
BESIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cvt": {"drop_path_rate": [0.0, 0.0, 0.0]},
    "donut-swin": SWIN,
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "swin": SWIN,
    "swinv2": SWIN,
    "xmod": {"default_language": "en_XX"},
}

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
    for config_class in sorted(set(mapping), key=lambda found: found.model_type):
        found = mapping[config_class]
        yield config_class.model_type, config_class, found[0] if isinstance(found, tuple) else found


def small_arguments(config_class: type, fill: bool) -> dict[str, Any]:
    """The arguments that make a configuration small, with those of the configurations inside it.

    With `fill`, heads and their width are set where the class leaves them open.
    """
    default = config_class()
    names = {getattr(default, "attribute_map", {}).get(key, key): value for key, value in SMALL.items()}
    found: dict[str, Any] = {}
    for key, old in vars(default).items():
        if hasattr(old, "model_type"):
            found[key] = {"model_type": old.model_type, **small_arguments(type(old), fill)}
        elif key in names and (is_smaller(key, names[key], old) or (fill and old is None and "head" in key)):
            found[key] = names[key]
    if "qk_rope_head_dim" in found:
        found.pop("head_dim", None)  # it follows from others
    if getattr(default, "num_key_value_heads", None) == getattr(default, "num_attention_heads", 0):
        found["num_key_value_heads"] = found.get("num_attention_heads", default.num_attention_heads)
    return found | BESIDES.get(default.model_type, {})


def is_smaller(key: str, new: Any, old: Any) -> bool:
    """Whether a number may take the place of a configuration's own."""
    if isinstance(old, bool) or not isinstance(old, int | float):
        return False
    return old > new or key.endswith("_id")


def shrink(config: Any) -> Any:
    """Make the numbers of a configuration small that exists already."""
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            shrink(value)
    names = {getattr(config, "attribute_map", {}).get(key, key): value for key, value in SMALL.items()}
    for key, old in list(vars(config).items()):
        if key in names and is_smaller(key, names[key], old):
            setattr(config, key, names[key])
        if key in LAYER_TYPES and isinstance(old, list):
            setattr(config, key, every_kind(old, SMALL["num_hidden_layers"]))
    return config


def every_kind(kinds: list[str], count: int) -> list[str]:
    """A short list of layers in which each kind occurs."""
    different = list(dict.fromkeys(kinds))
    return [different[k % len(different)] for k in range(max(count, len(different)))]


def small_configs(config_class: type) -> Iterator[Callable[[], Any]]:
    """Ways to make a small configuration, to be tried in turn: what one class derives, another wants to be told."""
    default = config_class()
    for fill, typed in ((False, True), (False, False), (True, True), (True, False)):

        def made(fill: bool = fill, typed: bool = typed) -> Any:
            arguments = small_arguments(config_class, fill)
            for key in LAYER_TYPES:
                if typed and isinstance(getattr(default, key, None), list):
                    arguments[key] = every_kind(getattr(default, key), SMALL["num_hidden_layers"])
                    arguments["num_hidden_layers"] = len(arguments[key])
            return config_class(**arguments)

        yield made
        yield lambda made=made: made().get_text_config(decoder=True)
    yield lambda: shrink(config_class())


def count_parameters(model_class: type, config: Any) -> int:
    """How many parameters a model would have; zero where that cannot be known without making it."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(config).parameters())
    except FAILURES:
        return 0


def build(config_class: type, model_class: type, run: Any) -> nn.Module:
    """A tiny model with random weights that runs; its weights are not as small as a fresh model's.

    `run` calls a model; what it raises says that the model is not well made.
    """
    problems = []
    for make in small_configs(config_class):
        try:
            torch.manual_seed(0)
            config = make()
            config._attn_implementation = "eager"
            if count_parameters(model_class, config) > LARGEST:
                raise ValueError("it stays too large")
            model = model_class(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
                run(model)
            return model
        except FAILURES as problem:
            problems.append(f"{type(problem).__name__}: {problem}".splitlines()[0])
    raise ValueError(problems[0])
