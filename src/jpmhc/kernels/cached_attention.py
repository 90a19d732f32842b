r"""Attention of one new token per row to the row's earlier tokens, whose keys and values are in a cache.

A head has the new token's query q and, for each token j of the row, the new one included, a key k_j and a value v_j of
D numbers. With $s_j = q \cdot k_j / \sqrt{D}$ the output is $\sum_j e^{s_j} v_j / \sum_j e^{s_j}$. One program computes
one head of one row: it writes the new key and value into the cache and reads the earlier ones once, block by block,
with a running maximum of the s_j. The kernel takes as long as reading the cache up to each row's length.
"""

import math

import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import kernel

TOKENS = 64  # cached tokens that a program reads at a time


@kernel
def _attend(
    q, k, v, keys, values, lengths, out, SCALE, CAPACITY, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    d = tl.arange(0, D)
    at = (row * HEADS + head) * D + d
    q_D = tl.load(q + at).to(tl.float32) * SCALE
    new_key = tl.load(k + at)
    new_value = tl.load(v + at)
    cached = (row * HEADS + head) * CAPACITY * D
    tl.store(keys + cached + length * D + d, new_key)
    tl.store(values + cached + length * D + d, new_value)
    top = tl.sum(q_D * new_key.to(tl.float32), 0)
    total = top * 0 + 1.0
    sum_D = new_value.to(tl.float32)
    for start in range(0, length, TOKENS):
        n = start + tl.arange(0, TOKENS)
        seen = n < length
        block = cached + n[:, None] * D + d[None, :]
        k_ND = tl.load(keys + block, mask=seen[:, None], other=0.0).to(tl.float32)
        v_ND = tl.load(values + block, mask=seen[:, None], other=0.0).to(tl.float32)
        s_N = tl.where(seen, tl.sum(k_ND * q_D[None, :], 1), float("-inf"))
        higher = tl.maximum(top, tl.max(s_N, 0))
        p_N = tl.exp2(s_N - higher)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p_N, 0)
        sum_D = sum_D * shrink + tl.sum(p_N[:, None] * v_ND, 0)
        top = higher
    tl.store(out + at, (sum_D / total).to(out.dtype.element_ty))


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Append one token per row to the cache, and return the attention's output for each of these tokens.

    Args:
        q, k, v: The new tokens' queries, keys and values, [B, heads, D]; D is a power of two.
        keys, values: The cache, [B, heads, capacity, D], contiguous. Changed in place.
        lengths: Number of tokens of each row in the cache before the call, below the capacity, [B] int32.

    Returns:
        The attention's output, [B, heads, D].
    """
    batch, heads, width = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = q.new_empty(q.shape)
    scale = math.log2(math.e) / math.sqrt(width)  # the exponentials are powers of two
    _attend[(batch, heads)](
        q, k, v, keys, values, lengths, out, scale, keys.shape[2], HEADS=heads, D=width, TOKENS=TOKENS
    )  # fmt: skip
    return out
