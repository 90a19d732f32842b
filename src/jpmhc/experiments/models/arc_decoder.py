"""A decoder for ARC: it reads a pair of grids token by token and predicts the tokens of the output.

It differs from the language model's decoder in three ways. Positions are rotations by part, row and column of a token.
Every token also carries a learned vector of its puzzle and one of its symmetry, which is all that the model knows of
other pairs of the puzzle. Attention is a function that the caller brings: among sequences packed side by side in
training, to a cache of earlier tokens in generation.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.connections import HyperConnectionStack
from jpmhc.experiments.models.connections import ConnectionConfig, make_connection
from jpmhc.experiments.models.decoder import FeedForward
from jpmhc.experiments.models.layers import Linear, rms_norm, truncated_normal_, widen
from jpmhc.experiments.tasks.arc.augment import SYMMETRIES
from jpmhc.experiments.tasks.arc.sequences import NO_LABEL, VOCABULARY, Pack

PARTS = (0.25, 0.375, 0.375)  # shares of a head's rotations that turn by part, row and column
MULTIPLE = 16  # of inner widths, for the tensor cores


@dataclass(frozen=True)
class ArcDecoderConfig(ConnectionConfig):
    """Size and connections of the decoder."""

    dim: int = 768
    """Width of a stream."""
    layers: int = 8
    """Blocks, each with attention and feed-forward: two connections."""
    heads: int = 12
    """Attention heads."""
    inner: int = 3072
    """Inner width of the gated feed-forward layers."""
    dropout: float = 0.1
    """Share of the embeddings and of every sublayer's output that training sets to zero."""
    rotary_base: float = 100.0
    """The slowest rotation turns by one radian in about so many rows or columns."""
    qk_norm: bool = False
    """Normalise queries and keys."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Type of activations; weights are float32 in either case."""

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "inner"):
            checks.whole_number(getattr(self, name), name)
        checks.inside(self.dropout, "[0, 1)", "dropout")
        checks.positive_number(self.rotary_base, "rotary_base")
        if self.dim % (16 * self.heads):
            raise ValueError(f"dim must be a multiple of 16 · heads = {16 * self.heads}, not {self.dim}")
        super().__post_init__()


class Attend(Protocol):
    """Attention as the caller brings it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in one layer: queries, keys and values of the tokens at hand, each [..., heads, head_dim]."""
        ...


class Places(nn.Module):
    """Rotations by the three coordinates of a token's place."""

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        pairs = head_dim // 2
        shares = [round(pairs * share) for share in PARTS]
        shares[0] = pairs - sum(shares[1:])
        table = torch.zeros(len(PARTS), pairs)
        for axis, start in enumerate((0, shares[0], shares[0] + shares[1])):
            count = shares[axis]
            table[axis, start : start + count] = base ** (-torch.arange(count) / count)
        self.register_buffer("frequencies", table, persistent=False)  # [3, head_dim / 2]

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [..., 1, head_dim / 2] of places [..., 3]."""
        # A sum of three products, one of which is not zero: no matrix product, which a GPU might round.
        angles = (places.float()[..., None] * self.frequencies).sum(-2).unsqueeze(-2)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of a head's features against the second."""
    first, second = widen(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PlacedAttention(nn.Module):
    """Attention behind an RMS norm, with rotations by place."""

    def __init__(self, config: ArcDecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.qk_norm = layer, config.heads, config.qk_norm
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(rms_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # [..., heads, head_dim]
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        y = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.dropout(self.out(y.flatten(-2)))


class NormedFeedForward(nn.Module):
    """A gated feed-forward layer behind an RMS norm."""

    def __init__(self, config: ArcDecoderConfig) -> None:
        super().__init__()
        self.feed = FeedForward(config.dim, config.inner, gated=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed(rms_norm(x)))


class ResidualLayers(nn.ModuleList):
    """Attention and feed-forward layers in turn, each added to what it reads."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        for attention, feed in zip(self[::2], self[1::2]):
            x = x + attention(x, cos, sin, attend)
            x = x + feed(x)
        return x


class ArcDecoder(nn.Module):
    """The decoder; its forward is the mean cross-entropy in nats over the labels of a pack.

    Two decoders built after the same `torch.manual_seed` have the same weights outside their connections, whatever
    these are, and without dropout they give the same loss: every connection starts as the plain residual.

    >>> model = ArcDecoder(ArcDecoderConfig(dim=32, layers=1, heads=2, inner=32, streams=4, mixer="cayley"), puzzles=3)
    >>> model.embed(torch.tensor([1, 2]), model.vectors(torch.tensor([0, 1]), torch.tensor([0, 7]))).shape
    torch.Size([2, 32])
    """

    def __init__(self, config: ArcDecoderConfig, puzzles: int) -> None:
        super().__init__()
        self.config = config
        self.dtype = getattr(torch, config.compute)
        self.tokens = nn.Parameter(0.02 * torch.randn(VOCABULARY, config.dim))
        self.puzzles = nn.Parameter(0.02 * torch.randn(puzzles, config.dim))
        self.symmetries = nn.Parameter(0.02 * torch.randn(SYMMETRIES, config.dim))
        self.places = Places(config.dim // config.heads, config.rotary_base)
        self.dropout = nn.Dropout(config.dropout)
        sublayers: list[nn.Module] = []
        for layer in range(config.layers):
            attention, feed = PlacedAttention(config, layer), NormedFeedForward(config)
            for last in (attention.out, feed.feed.down):  # so that the residual does not grow with the depth
                last.weight.data /= math.sqrt(2 * config.layers)
            sublayers += [attention, feed]
        self.head = Linear(config.dim, VOCABULARY)
        truncated_normal_(self.head.weight.data, 0.02)
        self.network: nn.Module
        if config.plain:
            self.network = ResidualLayers(sublayers)
        else:
            connections = (make_connection(config, layer, i) for i, layer in enumerate(sublayers))
            self.network = HyperConnectionStack(connections, reduce=True, expand=True)

    def vectors(self, puzzles: Tensor, symmetries: Tensor) -> Tensor:
        """Return the vectors that all tokens of these sequences carry, [..., dim]."""
        return F.embedding(puzzles, self.puzzles) + F.embedding(symmetries, self.symmetries)

    def embed(self, tokens: Tensor, vectors: Tensor) -> Tensor:
        """Return the first hidden states of tokens [...] that carry the vectors [..., dim]."""
        # A product with ones and zeros: its gradient is a product too, and not a sum in random order.
        ones = (tokens[..., None] == torch.arange(VOCABULARY, device=tokens.device)).to(self.dtype)
        return ones @ self.tokens.to(self.dtype) + vectors.to(self.dtype)

    def hidden(self, x: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """Run the layers on the first hidden states [..., dim] of tokens at places [..., 3]."""
        cos, sin = self.places(places)
        return self.network(self.dropout(x), cos=cos, sin=sin, attend=attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, [..., VOCABULARY] in float32."""
        return widen(self.head(rms_norm(hidden)))

    def forward(self, pack: Pack, vectors: Tensor, attend: Attend) -> Tensor:
        """Compute the loss of a pack whose sequences have these vectors, [S, dim]."""
        owned = (pack.owners[:, None] == torch.arange(len(vectors), device=vectors.device)).to(self.dtype)
        x = self.embed(pack.tokens, owned @ vectors.to(self.dtype))
        logits = self.logits(self.hidden(x, pack.places, attend))
        return F.cross_entropy(logits, pack.labels.long(), ignore_index=NO_LABEL)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of attention and feed-forward layers, for optimisers such as NorMuon."""
        layers = (m for m in self.network.modules() if isinstance(m, PlacedAttention | FeedForward))
        return [linear.weight for layer in layers for linear in layer.children() if isinstance(linear, Linear)]
