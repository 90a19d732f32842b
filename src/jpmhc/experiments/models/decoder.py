"""A decoder for language models: causal attention and feed-forward layers, each after an RMS norm.

The configuration chooses plain residual connections or hyper-connections.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpmhc.checks import Count, Positive
from jpmhc.connections import HyperConnectionStack
from jpmhc.experiments.models.connections import ConnectionConfig, make_connection
from jpmhc.experiments.models.layers import Attention, Linear, Rotary, inner_width, rms_norm, truncated_normal_, widen

MULTIPLE = 16  # inner widths are multiples of this, for the tensor cores


@dataclass(frozen=True)
class DecoderConfig(ConnectionConfig):
    """Size and connections of the language decoder."""

    dim: Count = 384  # Width of a stream.
    layers: Count = 8  # Number of blocks, each with an attention and a feed-forward layer in a connection each.
    heads: Count = 6  # Number of attention heads.
    length: Count = 1024  # Tokens per row.
    vocabulary: Count = 2**14  # Number of different tokens.
    positions: Literal["rotary", "learned"] = "rotary"
    """Position embeddings: rotations of queries and keys, or learned vectors that are added to token embeddings."""
    qk_norm: bool = True  # Whether to normalise queries and keys.
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the feed-forward layers; swiglu, which is gated, has two thirds of the inner width."""
    expansion: Positive = 4.0  # Expansion of feed-forward layers: the inner width of gelu is expansion · dim.
    embedding_std: Positive = 0.02  # Standard deviation of the initial token embeddings.
    extra_inner: Annotated[int, "[0, inf)"] = 0
    """Number of inner features to add to the feed-forward layers in total, to match another model's parameters."""
    mixer_delayed: bool = False
    """Whether each sublayer reads with the coefficients that the previous connection computed."""
    compute: Literal["float32", "bfloat16"] = "float32"  # Type of activations; weights are always float32.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim must be a multiple of 2 · heads = {2 * self.heads}, not {self.dim}")

    def inner_widths(self) -> list[int]:
        """Return the inner width of every feed-forward layer."""
        matrices = 3 if self.feed_forward == "swiglu" else 2
        base = inner_width(self.dim, self.expansion * 3 / matrices, MULTIPLE)
        share, rest = divmod(self.extra_inner // MULTIPLE, self.layers)
        return [base + MULTIPLE * (share + (layer < rest)) for layer in range(self.layers)]


class FeedForward(nn.Module):
    """A feed-forward layer with SwiGLU (gated) or GELU between two linear maps."""

    def __init__(self, dim: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = Linear(dim, inner * (1 + gated))
        self.down = Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x))


class PreNorm(nn.Module):
    """A sublayer whose input goes through an RMS norm without weights."""

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
    """The language decoder; its forward returns the mean cross-entropy in nats per token.

    Two decoders built after the same `torch.manual_seed` have the same weights outside their connections. They also
    give the same loss, because every kind of connection starts as the plain residual.

    >>> tokens = torch.arange(16).view(1, 16)
    >>> model = Decoder(DecoderConfig(dim=16, layers=1, heads=2, length=16, vocabulary=32, mixer="cayley", streams=4))
    >>> model(tokens, tokens.roll(-1, 1)).shape
    torch.Size([])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.dtype = getattr(torch, config.compute)
        self.tokens = nn.Parameter(config.embedding_std * torch.randn(config.vocabulary, config.dim))
        rotary = Rotary(config.dim // config.heads, config.length) if config.positions == "rotary" else None
        self.positions = None if rotary else nn.Parameter(0.02 * torch.randn(config.length, config.dim))
        sublayers: list[nn.Module] = []
        for inner in config.inner_widths():
            attend = Attention(config.dim, config.heads, rotary, causal=True, qk_norm=config.qk_norm)
            feed = FeedForward(config.dim, inner, config.feed_forward == "swiglu")
            for last in (attend.out, feed.down):  # so that hidden states do not grow with the depth
                last.weight.data /= math.sqrt(2 * config.layers)
            sublayers += [attend, feed]
        self.head = Linear(config.dim, config.vocabulary)
        truncated_normal_(self.head.weight.data, 0.02)
        self.network: nn.Module
        if config.plain:
            self.network = nn.Sequential(*map(PreNormResidual, sublayers))
        else:
            connections = (make_connection(config, PreNorm(layer), i) for i, layer in enumerate(sublayers))
            self.network = HyperConnectionStack(connections, reduce=True, expand=True, delayed=config.mixer_delayed)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of predicting `labels` from `inputs`, each [B, S]."""
        x = F.embedding(inputs, self.tokens)
        if self.positions is not None:
            x = x + self.positions[: inputs.shape[1]]
        logits = self.head(rms_norm(self.network(x.to(self.dtype))))
        return F.cross_entropy(widen(logits).flatten(0, 1), labels.flatten())

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of attention and feed-forward layers, for optimisers such as Muon."""
        layers = (m for m in self.network.modules() if isinstance(m, Attention | FeedForward))
        return [linear.weight for layer in layers for linear in layer.children() if isinstance(linear, Linear)]


def count_parameters(config: DecoderConfig) -> int:
    """Return the number of a decoder's parameters, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config).parameters())
