"""A decoder for ARC that reads a pair of grids token by token and predicts the tokens of the output grid.

The decoder differs from the language model's decoder in three ways. Rotary positions have three coordinates: the part
of the sequence that a token is in (start, input, separator or output), and the row and column of its cell. Each token
gets a learned vector of its puzzle and a learned vector of its symmetry, and the model knows other pairs of the puzzle
only through these vectors. The caller supplies the attention function: training attends within packed sequences,
generation to a cache of earlier tokens.

In training on CUDA, attention is flex attention, which skips blocks of keys that no query of a block may see, and which
must run inside a compiled function. Elsewhere it is ordinary attention with a mask of all pairs of tokens.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jpmhc.checks import Count, Positive
from jpmhc.connections import HyperConnectionStack
from jpmhc.experiments.models.connections import ConnectionConfig, make_connection
from jpmhc.experiments.models.decoder import FeedForward
from jpmhc.experiments.models.layers import Linear, rms_norm, rotate, truncated_normal_, widen
from jpmhc.experiments.tasks.arc.augment import SYMMETRIES
from jpmhc.experiments.tasks.arc.sequences import BLOCK, NO_LABEL, VOCABULARY, Pack

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

# Tiles of the forward kernel. With PyTorch's default of 128 × 128, the kernel with a pack's mask runs out of registers:
# it takes 4.7 ms per layer on an H200, and 0.18 ms with these tiles (torch 2.11, 12,288 tokens, 12 heads of 64).
_TILES: "FlexKernelOptions" = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 2}  # type: ignore[typeddict-unknown-key]

PARTS = (0.25, 0.375, 0.375)  # shares of a head's rotations that depend on part, row and column


@dataclass(frozen=True)
class ArcDecoderConfig(ConnectionConfig):
    """Size and connections of the ARC decoder."""

    dim: Count = 768  # Width of a stream.
    layers: Count = 8  # Number of blocks, each with an attention and a feed-forward layer in a connection each.
    heads: Count = 12  # Number of attention heads.
    inner: Count = 3072  # Inner width of the gated feed-forward layers.
    dropout: Annotated[float, "[0, 1)"] = 0.1
    """Fraction of the embeddings and of every sublayer's output that training sets to zero."""
    rotary_base: Positive = 100.0  # Number of rows or columns in which the slowest rotation turns by about one radian.
    qk_norm: bool = False  # Whether to normalise queries and keys.
    compute: Literal["float32", "bfloat16"] = "float32"  # Type of activations; weights are always float32.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % (16 * self.heads):
            raise ValueError(f"dim must be a multiple of 16 · heads = {16 * self.heads}, not {self.dim}")


class Attend(Protocol):
    """An attention function that the caller supplies."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of layer number `layer` for its queries, keys and values, each [..., heads, head_dim]."""
        ...


class RotaryAngles(nn.Module):
    """The angles of rotary positions with three coordinates: the part, row and column of a token."""

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

    def forward(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the angles, [..., 1, head_dim / 2] each, for coordinates [..., 3]."""
        # Not a matrix product, which a GPU might round; only one of the three products summed is not zero.
        angles = (coordinates.float()[..., None] * self.frequencies).sum(-2).unsqueeze(-2)
        return angles.cos(), angles.sin()


class RotaryAttention(nn.Module):
    """Attention after an RMS norm, with rotary positions."""

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
    """A gated feed-forward layer after an RMS norm."""

    def __init__(self, config: ArcDecoderConfig) -> None:
        super().__init__()
        self.feed = FeedForward(config.dim, config.inner, gated=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.feed(rms_norm(x)))


class ResidualLayers(nn.ModuleList):
    """Attention and feed-forward layers in turn, with plain residual connections."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        for attention, feed in zip(self[::2], self[1::2]):
            x = x + attention(x, cos, sin, attend)
            x = x + feed(x)
        return x


class ArcDecoder(nn.Module):
    """The ARC decoder; its forward returns the mean cross-entropy in nats over the labels of a `Pack`.

    A `Pack` is one row of tokens that contains several sequences. The argument `puzzles` is the number of puzzles.

    Two decoders built after the same `torch.manual_seed` have the same weights outside their connections. Without
    dropout they also give the same loss, because every kind of connection starts as the plain residual.

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
        self.rotary = RotaryAngles(config.dim // config.heads, config.rotary_base)
        self.dropout = nn.Dropout(config.dropout)
        sublayers: list[nn.Module] = []
        for layer in range(config.layers):
            attention, feed = RotaryAttention(config, layer), NormedFeedForward(config)
            for last in (attention.out, feed.feed.down):  # so that hidden states do not grow with the depth
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
        """Return each sequence's vector, which is added to all its tokens: its puzzle's plus its symmetry's vector.

        `puzzles` and `symmetries` are the numbers of each sequence's puzzle and symmetry. [...], [...] → [..., dim]
        """
        return F.embedding(puzzles, self.puzzles) + F.embedding(symmetries, self.symmetries)

    def embed(self, tokens: Tensor, vectors: Tensor) -> Tensor:
        """Return the embeddings of tokens [...] plus the vectors [..., dim] of the tokens' sequences."""
        # The gradient of this product with ones and zeros is a product too, and not a sum in random order.
        ones = (tokens[..., None] == torch.arange(VOCABULARY, device=tokens.device)).to(self.dtype)
        return ones @ self.tokens.to(self.dtype) + vectors.to(self.dtype)

    def hidden(self, x: Tensor, coordinates: Tensor, attend: Attend) -> Tensor:
        """Return the hidden states [..., dim] for embeddings x [..., dim] and tokens' coordinates [..., 3]."""
        cos, sin = self.rotary(coordinates)
        return self.network(self.dropout(x), cos=cos, sin=sin, attend=attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, [..., VOCABULARY] in float32."""
        return widen(self.head(rms_norm(hidden)))

    def forward(self, pack: Pack, vectors: Tensor, attend: Attend) -> Tensor:
        """Compute the loss of a pack of S sequences; `vectors` [S, dim] come from the method `vectors`."""
        owned = (pack.owners[:, None] == torch.arange(len(vectors), device=vectors.device)).to(self.dtype)
        x = self.embed(pack.tokens, owned @ vectors.to(self.dtype))
        logits = self.logits(self.hidden(x, pack.coordinates, attend))
        return F.cross_entropy(logits, pack.labels.long(), ignore_index=NO_LABEL)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the matrices of attention and feed-forward layers, for optimisers such as NorMuon."""
        layers = (m for m in self.network.modules() if isinstance(m, RotaryAttention | FeedForward))
        return [linear.weight for layer in layers for linear in layer.children() if isinstance(linear, Linear)]


def make_mask(pack: Pack) -> Tensor | BlockMask:
    """Return a pack's attention mask: a block mask on CUDA, elsewhere a boolean [tokens, tokens]."""
    owners = pack.owners
    if owners.device.type != "cuda":
        return (owners[:, None] == owners[None, :]).tril()
    return make_block_mask(pack)


def make_block_mask(pack: Pack) -> BlockMask:
    """Return a pack's attention mask as a `BlockMask`; `pack.spans` has the first block that each block attends to.

    The host never waits for the device. `BlockMask.from_kv_blocks` is not used, because it is slow on the host: it
    computes the last block that attends to each block, which `pack.spans` also has.
    """
    owners, (first, last) = pack.owners, pack.spans
    own = torch.arange(len(first), dtype=torch.int32, device=owners.device)
    keys = torch.minimum(first[:, None] + own, own[-1])  # each row's first `own - first + 1` entries count
    queries = torch.minimum(own[:, None] + own, own[-1])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (owners[query] == owners[key]) & (query >= key)

    return BlockMask(
        seq_lengths=(len(owners), len(owners)),
        kv_num_blocks=(own - first + 1)[None, None],
        kv_indices=keys[None, None],
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=(last - own + 1)[None, None],
        q_indices=queries[None, None],
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
    )


def packed_loss(model: ArcDecoder, pack: Pack, vectors: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Compute the loss of a pack of S sequences; on CUDA this function must be compiled.

    `vectors` [S, dim] come from `ArcDecoder.vectors`, and `mask` from `make_mask`.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, heads, T, head_dim]
        if isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = flex_attention(q, k, v, block_mask=mask, kernel_options=_TILES)
        return y[0].transpose(0, 1)

    return model(pack, vectors, attend)
