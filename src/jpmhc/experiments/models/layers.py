"""The layers of the recursive transformer: linear maps, rotary attention, SwiGLU over channels or over positions, and a
table of puzzle vectors.

Weights are float32, and every layer computes in the type of its input, float32 or bfloat16. Sublayers contain no
residual connection.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Attend = Literal["auto", "cudnn", "flash", "efficient", "math"]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill a tensor from a standard normal distribution cut at ±2, scaled to the standard deviation `std`."""
    inner = std / 0.87962566103423978  # standard deviation of a standard normal cut at ±2
    return nn.init.trunc_normal_(tensor, std=inner, a=-2 * inner, b=2 * inner)


def widen(x: Tensor) -> Tensor:
    """Convert to float32, but leave float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


NORM_EPS = 1e-5  # as in the public model


def rms_norm(x: Tensor, dim: int = -1) -> Tensor:
    """Apply an RMS norm without weights over one dimension, computed in float32 at least."""
    if dim != -1:
        return rms_norm(x.transpose(dim, -1)).transpose(dim, -1)
    return F.rms_norm(widen(x), x.shape[-1:], eps=NORM_EPS).to(x.dtype)


class Linear(nn.Module):
    """A linear map whose float32 weight is cast to the input's type on use."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal_(torch.empty(outputs, inputs), 1 / math.sqrt(inputs)))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def pad_rows(weight: Tensor) -> Tensor:
    """Append zero rows until the number of rows is a multiple of 16, as tensor cores need."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 16))


class NarrowLinear(Linear):
    """A linear map to a few outputs: it pads its weight by `pad_rows` and drops the outputs of the added rows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, pad_rows(self.weight.to(x.dtype)))[..., : len(self.weight)]


class Rotary(nn.Module):
    """Tables of rotary position embeddings for `length` positions, in the convention of `rotate`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, base: float = 1e4) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)  # [S, head_dim / 2]
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys x by their positions. [B, S, heads, head_dim]"""
        return rotate(x, self.cos[:, None, :], self.sin[:, None, :])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features i and i + head_dim / 2 of a head by an angle.

    Queries or keys x are [..., heads, head_dim]; cosines and sines of the angles are [..., 1, head_dim / 2].
    """
    # Written in halves, so that the backward pass is one kernel too, with the opposite angle.
    first, second = widen(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend, causal: bool = False) -> Tensor:
    """Compute attention with the kernel `attend` ("auto": PyTorch chooses); q, k, v are [B, heads, S, head_dim]."""
    if attend == "auto":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(_BACKENDS[attend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Attention(nn.Module):
    """Self-attention with one linear map for queries, keys and values, and with rotary positions if given."""

    def __init__(
        self,
        dim: int,
        heads: int,
        rotary: Rotary | None,
        attend: Attend = "auto",
        causal: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.attend: Attend = attend
        self.causal, self.qk_norm = causal, qk_norm
        self.qkv = Linear(dim, 3 * dim)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # each [B, S, heads, head_dim]
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = attention(q, k, v, self.attend, self.causal)
        return self.out(y.transpose(1, 2).flatten(-2))


def inner_width(dim: int, expansion: float, multiple: int) -> int:
    """Return two thirds of `expansion · dim`, rounded up to a multiple of `multiple`."""
    return multiple * math.ceil(round(expansion * dim * 2 / 3) / multiple)


class SwiGLU(nn.Module):
    """A gated feed-forward layer, with the inner width from `inner_width`."""

    def __init__(self, dim: int, expansion: float = 4.0, multiple: int = 256) -> None:
        super().__init__()
        inner = inner_width(dim, expansion, multiple)
        self.gate_up = Linear(dim, 2 * inner)
        self.down = Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if both.is_cuda and torch.is_grad_enabled():
            from jpmhc.kernels.swiglu import gated_linear  # Triton is not there on every platform

            return gated_linear(both, self.down.weight.to(x.dtype))
        gate, up = both.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class PositionSwiGLU(SwiGLU):
    """A gated feed-forward layer over the positions of a row, with the same weights for every channel.

    [B, positions, d] → [B, positions, d]
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class PostNormResidual(nn.Module):
    """The plain residual connection of the recursive model: `rms_norm(x + sublayer(x))`.

    The norm is over the dimension that the sublayer mixes: positions or channels.
    """

    def __init__(self, sublayer: nn.Module) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm_dim = 1 if isinstance(sublayer, PositionSwiGLU) else -1

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x + self.sublayer(x), self.norm_dim)


class PuzzleTable(nn.Module):
    """A table of one learned vector per puzzle, initially zero; the gradient is sparse, with one row per lookup."""

    def __init__(self, identifiers: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(identifiers, dim))

    def forward(self, identifiers: Tensor) -> Tensor:
        return F.embedding(identifiers, self.weight, sparse=True)  # [B, d]
