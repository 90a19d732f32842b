"""The read's first half: norm statistics, projection to logits on the tensor cores, and the gates.

The norm is applied after the projection: W norm(x) = (W x - mean · W 1) · scale. The weighted sum that makes the
sublayer's input is a pass of its own (stream_sums.py): at the speed of memory the two cost less than one kernel that
keeps a tile on chip between them (docs/LOG.md).
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# mypy: disable-error-code="assignment"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import gates
from jpmhc.kernels.launch import (
    BufferPart,
    Launcher,
    Layout,
    aligned,
    ceil_div,
    count_tokens,
    kernel,
    make_buffer,
    padded,
    power_of_two,
    split_buffer,
    stages,
)
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.stream_sums import norm_factor


@triton.jit
def _prepare(
    w, prepared, sums, COLUMNS, FOLDS: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Scale the weights, add up those of streams held once, round to the tensor cores' type, pad with zero rows, sum
    the rows.
    """
    k = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (c < COLUMNS) & (k < K)
        value = tl.zeros([BLOCK], tl.float32)
        for fold in tl.static_range(FOLDS):
            value += tl.load(w + (k.to(tl.int64) * FOLDS + fold) * COLUMNS + c, mask=inside, other=0.0)
        rounded = (value * SCALE).to(prepared.dtype.element_ty)
        tl.store(prepared + k.to(tl.int64) * COLUMNS + c, rounded, mask=c < COLUMNS)
        total += rounded.to(tl.float32)
    tl.store(sums + k, tl.sum(total, axis=0))


@functools.cache
def _prepare_launcher(rows: int, columns: int, folds: int, scale: float, dtype: torch.dtype) -> Launcher:
    return Launcher(_prepare, FOLDS=folds, K=rows, SCALE=scale, BLOCK=min(2048, power_of_two(columns)))


def prepare(weight: Tensor, prepared: BufferPart, sums: BufferPart, columns: int, spec: Spec) -> None:
    """Bring the projection into the form the kernels read. weight: [K, n·d] → rounded [KP, columns], row sums [KP]

    `columns` is n·d, or d for streams that are equal and held once: then the weights of the n streams are added up.
    """
    rows = weight.shape[0]
    launcher = _prepare_launcher(rows, columns, weight.shape[1] // columns, spec.scale, prepared.dtype)
    launcher.launch((padded(rows),), aligned(weight), prepared, sums, columns)


@triton.jit
def centre_moments(near, total, square, COUNT: tl.constexpr):
    """The mean of COUNT numbers and the sum of their squared distances from it, from sums over their distances from
    `near` and over the squares of these.

    `near` is the mean of some of the numbers. With zero in its place a large offset would leave nothing of the squares.
    """
    return near + total / COUNT, tl.maximum(square - total * (total / COUNT), 0.0, tl.PropagateNan.ALL)


@triton.jit
def store_logits(
    product,
    mean,
    square,
    sums,
    bias,
    logits,
    stats,
    token,
    inside,
    ND: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
):
    """Statistics and logits from W x, what the norm subtracts, and the sum of squares of what is left."""
    scale = norm_factor(square / ND, S.eps, S.norm == "rms_outside")  # what it multiplies by
    tl.store(stats + token * 2, mean, mask=inside)
    tl.store(stats + token * 2 + 1, scale, mask=inside)
    k = tl.arange(0, KP)
    value = (product - mean[:, None] * tl.load(sums + k)[None, :]) * scale[:, None]
    known = k < S.logits
    value += tl.load(bias + k, mask=known, other=0.0)[None, :]
    tl.store(logits + token[:, None] * S.logits + k[None, :], value, mask=inside[:, None] & known[None, :])


@triton.jit
def load_read_weights(logits, token, inside, S: tl.constexpr):
    """Each token's read weights, from logits in memory. [tokens, n]"""
    entries = gates.read_entries(S)[None, :, :]
    r = tl.load((logits + token * S.logits)[:, None, None] + entries, mask=inside[:, None, None], other=0.0)
    return gates.read_weights(r, S)


@triton.jit
def load_mixer_logits(base, here, S: tl.constexpr):
    """Each token's matrix M of the mixer's logits; where each entry stands among all logits; its sign.

    `base` points at each token's first logit, `here` says which tokens there are. [tokens, 1, 1]
    """
    F: tl.constexpr = S.mixer
    index, sign = F.entries(F)
    place = S.gate_logits + index[None, :, :]
    m = tl.load(base + place, mask=here & (sign != 0.0)[None, :, :], other=0.0) * sign[None, :, :]
    return m, place, sign


@triton.jit
def _store_coefficients(coef, token, inside, r, v, h, N: tl.constexpr):
    """One token's r, w and H side by side in memory."""
    i = tl.arange(0, N)
    base = coef + token * (N * (N + 2))
    tl.store(base[:, None] + i[None, :], r, mask=inside[:, None])
    tl.store(base[:, None] + N + i[None, :], v, mask=inside[:, None])
    entries = 2 * N + i[:, None] * N + i[None, :]
    tl.store(base[:, None, None] + entries[None, :, :], h, mask=inside[:, None, None])


@triton.jit
def constrain_tokens(logits, coef, token, inside, S: tl.constexpr):
    """Coefficients from logits in memory, to memory."""
    base = (logits + token * S.logits)[:, None, None]
    here = inside[:, None, None]
    r = tl.load(base + gates.read_entries(S)[None, :, :], mask=here, other=0.0)
    v = tl.load(base + gates.write_entries(S)[None, :, :], mask=here, other=0.0)
    F: tl.constexpr = S.mixer
    m, _, _ = load_mixer_logits(base, here, S)
    h = F.mix(m, F)
    r = gates.read_weights(r, S)
    v = gates.write_weights(v, S)
    _store_coefficients(coef, token, inside, r, v, h, S.n)


@kernel
def _project(
    x,
    w,
    sums,
    bias,
    logits,
    stats,
    coef,
    T,
    ND: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
    S: tl.constexpr,
):
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    k = tl.arange(0, KP)
    acc = tl.zeros([BT, KP], tl.float32)
    near = tl.zeros([BT], tl.float32)
    if S.norm == "layer":
        first = tl.load(x + token[:, None] * ND + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0.0)
        near = tl.sum(first.to(tl.float32), axis=1) / 8
    mean = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for start in tl.range(0, ND, BC, num_stages=STAGES):
        c = start + tl.arange(0, BC)
        xv = tl.load(x + token[:, None] * ND + c[None, :], mask=inside[:, None] & (c < ND)[None, :], other=0.0)
        wv = tl.load(w + k[None, :] * ND + c[:, None], mask=(c < ND)[:, None], other=0.0)
        xf = xv.to(tl.float32)
        acc = tl.dot(xv, wv, acc, input_precision=PRECISION)
        if S.norm == "layer":
            xf -= near[:, None]
            if ND % BC != 0:
                xf = tl.where((c < ND)[None, :], xf, 0.0)
            total += tl.sum(xf, axis=1)
        square += tl.sum(xf * xf, axis=1)
    if S.norm == "layer":
        mean, square = centre_moments(near, total, square, ND)
    store_logits(acc, mean, square, sums, bias, logits, stats, token, inside, ND, KP, S)
    tl.debug_barrier()  # the constraints read these logits back in another layout
    constrain_tokens(logits, coef, token, inside, S)


@kernel
def _constrain(logits, coef, T, BT: tl.constexpr, S: tl.constexpr):
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    constrain_tokens(logits, coef, token, token < T, S)


@functools.cache
def _constrain_launcher(spec: Spec) -> Launcher:
    return Launcher(_constrain, BT=128, S=spec, num_warps=4)


def constrain(logits: BufferPart, coef: Tensor, spec: Spec) -> None:
    """Fill in the coefficients of logits in memory. logits: [T, K]; coef: [T, n(n+2)]"""
    tokens = coef.shape[0]
    _constrain_launcher(spec).launch((ceil_div(tokens, 128),), logits, coef, tokens)


@functools.cache
def _project_launcher(spec: Spec, dtype: torch.dtype, width: int) -> tuple[Launcher, int]:
    kp, size = padded(spec.logits), dtype.itemsize
    block, columns, depth = (64, 128, 3) if kp * size <= 32 else (128, 64, 4) if size == 2 else (64, 32, 3)
    columns = min(columns, max(16, power_of_two(width)))
    depth = stages((block + kp) * columns * size, depth)
    constants = {"ND": width, "KP": kp, "PRECISION": precision(dtype), "BT": block, "BC": columns, "STAGES": depth}
    return Launcher(_project, **constants, S=spec, num_warps=4), block


def kept_layout(tokens: int, width: int, dtype: torch.dtype, spec: Spec) -> Layout:
    """Return what a read keeps for its derivative: logits [T, K], statistics [T, 2], and the weight as `prepare` made
    it, [KP, width] and [KP]. Where the logits are the bias there are no tokens and no width, and one row of logits.
    """
    height = padded(spec.logits) if width else 0
    float32 = torch.float32
    return (max(tokens, 1) * spec.logits, float32), (2 * tokens, float32), (height * width, dtype), (height, float32)


def project_streams(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Project the streams to logits and constrain them. x: [..., n or 1, d]; weight: [K, n·d]; bias: [K]

    Returns:
        The coefficients [T, n(n+2)], and a buffer of `kept_layout`.
    """
    tokens, width = count_tokens(x, spec.d), x.shape[-2] * spec.d
    layout = kept_layout(tokens, width, x.dtype, spec)
    coef, kept = bias.new_empty(tokens, spec.coefficients), make_buffer(layout, x)
    logits, stats, prepared, sums = split_buffer(kept, layout)
    prepare(weight, prepared, sums, width, spec)
    if tokens:
        launcher, block = _project_launcher(spec, x.dtype, width)
        launcher.launch((ceil_div(tokens, block),), x, prepared, sums, bias, logits, stats, coef, tokens)
    return coef, kept


def project_static(bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Constrain the bias alone: one row of coefficients serves every token, and there are no statistics."""
    layout = kept_layout(0, 0, bias.dtype, spec)
    coef, kept = bias.new_empty(1, spec.coefficients), make_buffer(layout, bias)
    logits = split_buffer(kept, layout)[0]
    logits.tensor().copy_(bias)
    constrain(logits, coef, spec)
    return coef, kept


def precision(operand: torch.dtype) -> str:
    """Say how the tensor cores multiply: half types exactly, float32 as three products of tf32."""
    return "tf32x3" if operand == torch.float32 else "tf32"
