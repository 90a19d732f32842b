"""One kernel from one sublayer's output to the next sublayer's input, for few tokens without gradients (decoding).

One program handles one token. It writes the streams while it multiplies them by the next connection's weight,
constrains the logits and reads the streams back. Each program fetches the whole weight from the cache. For few tokens
this is cheaper than preparing the weight in a launch of its own and filling tiles of sixteen tokens.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.device import (
    constrain_tokens,
    load_coefficient,
    load_mixing,
    load_read_weights,
    load_streams,
    mix_stream,
    store_logits,
)
from jpmhc.kernels.launch import (
    Launcher,
    aligned,
    count_tokens,
    kernel,
    make_buffer,
    padded,
    power_of_two,
    split_buffer,
)
from jpmhc.kernels.spec import Spec

MOST_TOKENS = 256
TILE = 16384  # sums that a program keeps, 32 per thread


# z = H x + w ⊗ y, or x as it is; logits = (W z - mean · W 1) · scale + b; r, w, H of the logits; h = Σ_j r_j z_j,
# with r of `old` if DELAYED
@kernel
def _decode(
    x_TMD, y_TD, old_TC, out_TND, w_KW, bias_K, logits_TK, stats_T2, coef_TC, h_TD, sums_TP, T,
    WRITES: tl.constexpr, OLD_PER_TOKEN: tl.constexpr, DELAYED: tl.constexpr, KP: tl.constexpr, M: tl.constexpr,
    BD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Write one token's streams and read them for the next connection S. Without WRITES, read x without a write."""
    N: tl.constexpr = S.n
    D: tl.constexpr = S.d
    ND: tl.constexpr = N * D
    token = (tl.program_id(0) + tl.arange(0, 1)).to(tl.int64)  # a block of one token
    inside = token < T
    k = tl.arange(0, KP)
    if WRITES:
        mixing = load_mixing(old_TC, token, inside, N, OLD_PER_TOKEN)
    products_PD = tl.zeros([KP, BD], tl.float32)
    weights_PD = tl.zeros([KP, BD], tl.float32)
    square = tl.zeros([1, BD], tl.float32)
    mean = tl.zeros([1, BD], tl.float32)  # of the numbers that each lane has seen
    seen = tl.zeros([1, BD], tl.float32)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        streams = load_streams(x_TMD, token, c, mask, M, D)
        if WRITES:
            y = tl.load(y_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        for i in tl.static_range(N):
            if WRITES:
                rounded_TD = mix_stream(streams, y, mixing, i, N).to(out_TND.dtype.element_ty)
                tl.store(out_TND + token[:, None] * ND + i * D + c[None, :], rounded_TD, mask=mask)
                z_TD = rounded_TD.to(tl.float32)
            else:
                z_TD = streams[i % M]
            known = (k < S.logits)[:, None] & (c < D)[None, :]
            w_PD = tl.load(w_KW + k[:, None] * ND + i * D + c[None, :], mask=known, other=0.0) * S.scale
            products_PD += w_PD * z_TD
            if S.norm == "layer":
                weights_PD += w_PD
                seen += mask.to(tl.float32)
                step = tl.where(mask, z_TD - mean, 0.0)
                mean += step / tl.maximum(seen, 1.0)
                square += step * (z_TD - mean)
            else:
                square += z_TD * z_TD
    # The sums of the weight's rows, which a layer norm needs. Each program stores a copy of its own.
    tl.store(sums_TP + tl.program_id(0) * KP + k, tl.sum(weights_PD, axis=1))
    tl.debug_barrier()
    product = tl.sum(products_PD, axis=1)[None, :]
    whole = tl.sum(mean * seen, axis=1) / ND
    if S.norm == "layer":
        apart = mean - whole[:, None]
        square += seen * apart * apart
    store_logits(
        product, whole, tl.sum(square, axis=1), sums_TP + tl.program_id(0) * KP, bias_K, logits_TK, stats_T2,
        token, inside, ND, KP, S,
    )  # fmt: skip
    tl.debug_barrier()  # the stored numbers are read back in another layout
    constrain_tokens(logits_TK, coef_TC, token, inside, S)
    r_TN = load_read_weights(logits_TK, token, inside, S)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        sum_TD = tl.zeros([1, BD], tl.float32)
        for i in tl.static_range(N):
            if WRITES:
                z_TD = tl.load(out_TND + token[:, None] * ND + i * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            else:
                address = x_TMD + token[:, None] * (M * D) + (i % M) * D + c[None, :]
                z_TD = tl.load(address, mask=mask, other=0.0).to(tl.float32)
            if DELAYED:
                sum_TD += load_coefficient(old_TC, token, inside, i, N, OLD_PER_TOKEN) * z_TD
            else:
                sum_TD += tl.sum(tl.where(tl.arange(0, N)[None, :] == i, r_TN, 0.0), axis=1)[:, None] * z_TD
        tl.store(h_TD + token[:, None] * D + c[None, :], sum_TD.to(h_TD.dtype.element_ty), mask=mask)


@functools.cache
def _launcher(
    spec: Spec, dtype: torch.dtype, stored_streams: int, writes: bool, per_token: bool, delayed: bool
) -> Launcher:
    height = padded(spec.logits)
    tile = TILE // 2 if spec.norm == "layer" else TILE  # a layer norm keeps a second sum for each number
    width = min(power_of_two(spec.d), tile // height)
    old = {"WRITES": writes, "OLD_PER_TOKEN": int(per_token), "DELAYED": delayed}
    sizes = {"KP": height, "M": stored_streams, "BD": width}
    return Launcher(_decode, **old, **sizes, S=spec, num_warps=max(4, height * width // 1024))


def are_few(tokens: int) -> bool:
    """Return whether the decoding kernel is used for this number of tokens."""
    return 0 < tokens <= MOST_TOKENS


def decode(
    x: Tensor, weight: Tensor, bias: Tensor, spec: Spec, h: Tensor, coef: Tensor, y: Tensor | None = None,
    old: Tensor | None = None, out: Tensor | None = None, delayed: bool = False,
) -> None:  # fmt: skip
    """Read few tokens' streams: store the sublayer's input in h [..., d] and the coefficients in `coef` [T, n(n+2)].

    With y, first write y to the streams with the coefficients `old`, store the new streams in `out` [..., n, d], and
    read these. With `delayed`, h is read with the read weights in `old`.
    """
    tokens = count_tokens(x, spec.d)
    layout = tuple((tokens * size, torch.float32) for size in (spec.logits, 2, padded(spec.logits)))
    logits, stats, sums = split_buffer(make_buffer(layout, bias), layout)
    launcher = _launcher(spec, x.dtype, x.shape[-2], y is not None, old is not None and len(old) == tokens, delayed)
    written = (x, x, x) if y is None else (y, old, out)
    launcher.launch((tokens,), x, *written, aligned(weight), bias, logits, stats, coef, h, sums, tokens)
