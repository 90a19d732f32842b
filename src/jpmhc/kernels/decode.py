"""Few tokens without gradients, as in decoding: one kernel from one sublayer's output to the next one's input.

A program takes one token: it writes the streams, multiplies them by the next connection's weight as it goes, constrains
the logits and reads the streams back. Each token fetches the whole weight from the cache, which for few tokens is
cheaper than preparing it in a launch of its own and waiting for tiles of sixteen tokens.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import (
    BufferPart,
    Launcher,
    aligned,
    count_tokens,
    kernel,
    make_buffer,
    padded,
    power_of_two,
    split_buffer,
)
from jpmhc.kernels.projection import constrain_tokens, load_read_weights, store_logits
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.stream_sums import load_streams, mixed, mixing_entries

MOST_TOKENS = 256
TILE = 16384  # sums that a program keeps, 32 a thread


@kernel
def _decode(
    x,
    y,
    old,
    out,
    w,
    bias,
    logits,
    stats,
    coef,
    h,
    sums,
    T,
    WRITES: tl.constexpr,
    OLD_PER_TOKEN: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    S: tl.constexpr,
):
    """S is the connection that reads; without WRITES the streams are read as they are."""
    N: tl.constexpr = S.n
    D: tl.constexpr = S.d
    ND: tl.constexpr = N * D
    token = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)  # one token, as a block of one
    inside = token < T
    k = tl.arange(0, KP)
    if WRITES:
        mixing = mixing_entries(old, token, inside, N, OLD_PER_TOKEN)
    products = tl.zeros([KP, BD], tl.float32)
    weights = tl.zeros([KP, BD], tl.float32)
    square = tl.zeros([1, BD], tl.float32)
    mean = tl.zeros([1, BD], tl.float32)  # of what each lane has seen
    seen = tl.zeros([1, BD], tl.float32)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        streams = load_streams(x, token, c, mask, M, D)
        if WRITES:
            yv = tl.load(y + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            if WRITES:
                rounded = mixed(streams, yv, mixing, i, N).to(out.dtype.element_ty)
                tl.store(out + token[:, None] * ND + i * D + c[None, :], rounded, mask=mask)
                z = rounded.to(tl.float32)
            else:
                z = streams[i % M]
            known = (k < S.logits)[:, None] & (c < D)[None, :]
            wv = tl.load(w + k[:, None] * ND + i * D + c[None, :], mask=known, other=0.0) * S.scale
            products += wv * z
            if S.norm == "layer":
                weights += wv
                seen += mask.to(tl.float32)
                step = tl.where(mask, z - mean, 0.0)
                mean += step / tl.maximum(seen, 1.0)
                square += step * (z - mean)
            else:
                square += z * z
    # The sums of the weight's rows, which a layer norm needs: this token's place for them.
    tl.store(sums + tl.program_id(0) * KP + k, tl.sum(weights, axis=1))
    tl.debug_barrier()
    product = tl.sum(products, axis=1)[None, :]
    whole = tl.sum(mean * seen, axis=1) / ND
    if S.norm == "layer":
        apart = mean - whole[:, None]
        square += seen * apart * apart
    store_logits(
        product, whole, tl.sum(square, axis=1), sums + tl.program_id(0) * KP, bias, logits, stats,
        token, inside, ND, KP, S,
    )  # fmt: skip
    tl.debug_barrier()  # what was stored is read back in another layout
    constrain_tokens(logits, coef, token, inside, S)
    r = load_read_weights(logits, token, inside, S)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        value = tl.zeros([1, BD], tl.float32)
        for i in tl.static_range(N):
            if WRITES:
                z = tl.load(out + token[:, None] * ND + i * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            else:
                place = x + token[:, None] * (M * D) + (i % M) * D + c[None, :]
                z = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            value += tl.sum(tl.where(tl.arange(0, N)[None, :] == i, r, 0.0), axis=1)[:, None] * z
        tl.store(h + token[:, None] * D + c[None, :], value.to(h.dtype.element_ty), mask=mask)


@functools.cache
def _launcher(spec: Spec, dtype: torch.dtype, held: int, writes: bool, per_token: bool) -> Launcher:
    height = padded(spec.logits)
    tile = TILE // 2 if spec.norm == "layer" else TILE  # a layer norm keeps a second sum for each number
    width = min(power_of_two(spec.d), tile // height)
    constants = {"WRITES": writes, "OLD_PER_TOKEN": int(per_token), "KP": height, "M": held, "BD": width}
    return Launcher(_decode, **constants, S=spec, num_warps=max(4, height * width // 1024))


def are_few(tokens: int) -> bool:
    """Say whether so many tokens are few."""
    return 0 < tokens <= MOST_TOKENS


def _make_room(tokens: int, bias: Tensor, spec: Spec) -> list[BufferPart]:
    """Make room for logits, statistics and the sums of the weight's rows."""
    layout = tuple((tokens * size, torch.float32) for size in (spec.logits, 2, padded(spec.logits)))
    return split_buffer(make_buffer(layout, bias), layout)


def read(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return h [..., d] and the coefficients [T, n(n+2)] of few tokens."""
    x = aligned(x)
    tokens = count_tokens(x, spec.d)
    h, coef = x.new_empty((*x.shape[:-2], spec.d)), bias.new_empty(tokens, spec.coefficients)
    logits, stats, sums = _make_room(tokens, bias, spec)
    launcher = _launcher(spec, x.dtype, x.shape[-2], False, False)
    launcher.launch((tokens,), x, x, x, x, aligned(weight), bias, logits, stats, coef, h, sums, tokens)
    return h, coef


def write_read(
    x: Tensor, y: Tensor, old: Tensor, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new streams [..., n, d], the next sublayer's input h [..., d] and its coefficients [T, n(n+2)]."""
    x, y = aligned(x), aligned(y)
    tokens = count_tokens(x, following.d)
    out, h = x.new_empty((*y.shape[:-1], following.n, following.d)), torch.empty_like(y)
    coef = bias.new_empty(tokens, following.coefficients)
    logits, stats, sums = _make_room(tokens, bias, following)
    launcher = _launcher(following, x.dtype, x.shape[-2], True, old.shape[0] == tokens)
    launcher.launch((tokens,), x, y, old, out, aligned(weight), bias, logits, stats, coef, h, sums, tokens)
    return out, h, coef
