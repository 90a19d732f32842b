"""A small decoder over bytes: pre-norm causal attention and SwiGLU, with plain residuals or hyper-connections."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import HyperConnectionStack
from jpmhc.experiments.models.connections import ConnectionConfig, make_connection
from jpmhc.experiments.models.layers import (
    Attention,
    Linear,
    Rotary,
    SwiGLU,
    inner_width,
    rms_norm,
    truncated_normal_,
    widen,
)
from jpmhc.experiments.tasks.language.text import VOCABULARY

MULTIPLE = 16  # of inner widths: odd ones would leave the tensor cores


@dataclass(frozen=True)
class DecoderConfig(ConnectionConfig):
    """Size and connections of the decoder."""

    dim: int = 128
    """Width of a stream."""
    layers: int = 8
    """Blocks, each with attention and feed-forward: two connections."""
    heads: int = 4
    """Attention heads."""
    expansion: float = 4.0
    """Feed-forward expansion; the gated inner width is two thirds of it."""
    extra_inner: int = 0
    """Inner features added to the feed-forward layers, all together: a way to have as many parameters as another."""
    length: int = 256
    """Bytes of a row."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights are float32 in either case."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "length"):
            checks.at_least_one(getattr(self, name), name)
        checks.to_positive_number(self.expansion, "expansion")
        checks.inside(self.extra_inner, "[0, inf)", "extra_inner")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads = {2 * self.heads}, not {self.dim}")
        super().__post_init__()

    def inner_widths(self) -> list[int]:
        """Return the inner width of every feed-forward layer."""
        share, rest = divmod(self.extra_inner // MULTIPLE, self.layers)
        base = inner_width(self.dim, self.expansion, MULTIPLE)
        return [base + MULTIPLE * (share + (layer < rest)) for layer in range(self.layers)]


class PreNorm(nn.Module):
    """A sublayer behind a weightless RMS norm."""

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x: Tensor) -> Tensor:
        return self.sublayer(rms_norm(x))


class PreNormResidual(PreNorm):
    """The plain residual connection: `x + sublayer(rms_norm(x))`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Decoder(nn.Module):
    """The decoder; its forward is the mean cross-entropy in nats per byte.

    Two decoders built after the same `torch.manual_seed` have the same weights outside their connections, whatever
    these are, and give the same loss: every connection starts as the plain residual.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.dtype = getattr(torch, config.compute)
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, config.dim))
        rotary = Rotary(config.dim // config.heads, config.length)
        sublayers: list[nn.Module] = []
        for inner in config.inner_widths():
            attend = Attention(config.dim, config.heads, rotary, causal=True)
            feed = SwiGLU(config.dim, 1.5 * inner / config.dim, 1)
            for last in (attend.out, feed.down):  # so that the residual does not grow with the depth
                last.weight.data /= math.sqrt(2 * config.layers)
            sublayers += [attend, feed]
        self.head = Linear(config.dim, VOCABULARY)
        truncated_normal_(self.head.weight.data, 0.02)
        self.network: nn.Module
        if config.plain:
            self.network = nn.Sequential(*map(PreNormResidual, sublayers))
        else:
            connections = (make_connection(config, PreNorm(layer), i) for i, layer in enumerate(sublayers))
            self.network = HyperConnectionStack(connections, reduce=True)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of predicting `labels` from `inputs`, each [B, length]."""
        x = F.embedding(inputs, self.tokens).to(self.dtype)
        # n equal streams are given once; the stack returns their mean
        x = self.network(x if self.config.plain else x.unsqueeze(-2))
        logits = self.head(rms_norm(x))
        return F.cross_entropy(widen(logits).flatten(0, 1), labels.flatten())
