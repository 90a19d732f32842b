"""Small models to wrap: plain PyTorch blocks, and tiny ones of `transformers` with random weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jpmhc
from jpmhc.wrap.layers import CHILD

WITHOUT = "needs transformers, which the hf extra installs"


class Block(nn.Module):
    """A pre-norm block with two residual additions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.mix, self.mlp = (
            nn.Linear(dim, dim),
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x)).roll(1, -2)
        return x + self.mlp(self.norms[1](x))


class RootMeanSquare(nn.Module):
    """An RMS norm written in Python."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class PostNormBlock(nn.Module):
    """A block that normalises its residual stream after each addition."""

    def __init__(self, dim: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.second = norm(dim), norm(dim)
        self.mix, self.mlp = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.mix(x).roll(1, -2))
        return self.second(self.mlp(x).tanh() + x)


class Stack(nn.Module):
    """Blocks in a list, between an embedding and a head."""

    def __init__(self, blocks: Any, dim: int = 12) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(5, dim), nn.ModuleList(blocks), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(rows: int = 2, length: int = 7, count: int = 60) -> Tensor:
    """Sequences of random tokens."""
    return torch.randint(3, count, (rows, length), generator=torch.Generator().manual_seed(1))


def tiny(kind: str, **changes: Any) -> Any:
    """A tiny model of `transformers` without dropout, in evaluation mode."""
    transformers = pytest.importorskip("transformers", reason=WITHOUT)
    text = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    text |= {"max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"vocab_size": 64, "d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    t5 |= {"pad_token_id": 0, "decoder_start_token_id": 1}
    vit = {**text, "image_size": 16, "patch_size": 8, "num_labels": 3}
    config, model = {
        "bert": (transformers.BertConfig(**{**text, **changes}), transformers.BertForMaskedLM),
        "gpt2": (transformers.GPT2Config(**{**gpt2, **changes}), transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig(**{**text, **changes}), transformers.LlamaForCausalLM),
        "neox": (transformers.GPTNeoXConfig(**{**text, **changes}), transformers.GPTNeoXForCausalLM),
        "t5": (transformers.T5Config(**{**t5, **changes}), transformers.T5ForConditionalGeneration),
        "vit": (transformers.ViTConfig(**{**vit, **changes}), transformers.ViTForImageClassification),
    }[kind]
    torch.manual_seed(0)
    made = model(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def wrapped_copy(model: nn.Module, **options: Any) -> Any:
    """A wrapped copy of a model."""
    return jpmhc.wrap(copy.deepcopy(model), **options)


def disturb(model: nn.Module, by: float = 0.5) -> nn.Module:
    """Change all connections, as training does, so that the streams part."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{CHILD}." in f".{name}":
                parameter.add_(by * torch.randn_like(parameter))
    return model


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    assert one.shape == other.shape
    return float(((one - other).abs().max() / one.abs().max()).detach())
