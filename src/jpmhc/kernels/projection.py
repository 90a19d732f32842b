"""The read's first half: norm statistics, projection to logits on the tensor cores, and the gates.

The norm is applied after the projection: W norm(x) = (W x - mean · W 1) · scale. The weighted sum that makes the
sublayer's input is a pass of its own (rows.py): at the speed of memory the two cost less than one kernel that keeps a
tile on chip between them (docs/LOG.md).
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# mypy: disable-error-code="assignment"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import gates
from jpmhc.kernels.launch import Launcher, aligned, ceil_div, kernel, padded, power_of_two, stages
from jpmhc.kernels.spec import Spec


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


def prepare(weight: Tensor, dtype: torch.dtype, columns: int, spec: Spec) -> tuple[Tensor, Tensor]:
    """Bring the projection into the form the kernels read. weight: [K, n·d] → rounded [KP, columns], row sums [KP]

    `columns` is n·d, or d for streams that are equal and held once: then the weights of the n streams are added up.
    """
    rows = weight.shape[0]
    height = padded(rows)
    prepared, sums = weight.new_empty(height, columns, dtype=dtype), weight.new_empty(height)
    launcher = _prepare_launcher(rows, columns, weight.shape[1] // columns, spec.scale, dtype)
    launcher.launch((height,), aligned(weight), prepared, sums, columns)
    return prepared, sums


@triton.jit
def finish(
    product,
    total,
    square,
    sums,
    bias,
    logits,
    stats,
    rows,
    inside,
    ND: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
):
    """Statistics and logits from W x and the sums of x and x² over a token."""
    mean = total / ND if S.norm == "layer" else total * 0.0  # what the norm subtracts
    variance = tl.maximum(square / ND - mean * mean, 0.0)
    # what it multiplies by
    scale = 1.0 / (tl.sqrt(variance) + S.eps) if S.norm == "rms_outside" else tl.rsqrt(variance + S.eps)
    tl.store(stats + rows * 2, mean, mask=inside)
    tl.store(stats + rows * 2 + 1, scale, mask=inside)
    k = tl.arange(0, KP)
    value = (product - mean[:, None] * tl.load(sums + k)[None, :]) * scale[:, None]
    known = k < S.logits
    value += tl.load(bias + k, mask=known, other=0.0)[None, :]
    tl.store(logits + rows[:, None] * S.logits + k[None, :], value, mask=inside[:, None] & known[None, :])


@triton.jit
def _store_coefficients(coef, rows, inside, r, v, h, N: tl.constexpr):
    """One token's r, w and H side by side in memory."""
    i = tl.arange(0, N)
    base = coef + rows * (N * (N + 2))
    tl.store(base[:, None] + i[None, :], r, mask=inside[:, None])
    tl.store(base[:, None] + N + i[None, :], v, mask=inside[:, None])
    entries = 2 * N + i[:, None] * N + i[None, :]
    tl.store(base[:, None, None] + entries[None, :, :], h, mask=inside[:, None, None])


@triton.jit
def constrain_rows(logits, coef, rows, inside, S: tl.constexpr):
    """Coefficients from logits in memory, to memory."""
    base = (logits + rows * S.logits)[:, None, None]
    here = inside[:, None, None]
    r = tl.load(base + gates.read_entries(S)[None, :, :], mask=here, other=0.0)
    v = tl.load(base + gates.write_entries(S)[None, :, :], mask=here, other=0.0)
    F: tl.constexpr = S.mixer
    index, sign = F.entries(F)
    there = here & (sign != 0.0)[None, :, :]
    m = tl.load(base + S.gate_logits + index[None, :, :], mask=there, other=0.0) * sign[None, :, :]
    h = F.mix(m, F)
    r = gates.read_weights(r, S)
    v = gates.write_weights(v, S)
    _store_coefficients(coef, rows, inside, r, v, h, S.n)


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
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = rows < T
    k = tl.arange(0, KP)
    acc = tl.zeros([BT, KP], tl.float32)
    total = tl.zeros([BT], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for start in tl.range(0, ND, BC, num_stages=STAGES):
        c = start + tl.arange(0, BC)
        xv = tl.load(x + rows[:, None] * ND + c[None, :], mask=inside[:, None] & (c < ND)[None, :], other=0.0)
        wv = tl.load(w + k[None, :] * ND + c[:, None], mask=(c < ND)[:, None], other=0.0)
        xf = xv.to(tl.float32)
        acc = tl.dot(xv, wv, acc, input_precision=PRECISION)
        square += tl.sum(xf * xf, axis=1)
        if S.norm == "layer":
            total += tl.sum(xf, axis=1)
    finish(acc, total, square, sums, bias, logits, stats, rows, inside, ND, KP, S)
    tl.debug_barrier()  # the constraints read these logits back in another layout
    constrain_rows(logits, coef, rows, inside, S)


@kernel
def _constrain(logits, coef, T, BT: tl.constexpr, S: tl.constexpr):
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    constrain_rows(logits, coef, rows, rows < T, S)


@functools.cache
def _constrain_launcher(spec: Spec) -> Launcher:
    return Launcher(_constrain, BT=128, S=spec, num_warps=4)


def constrain(logits: Tensor, coef: Tensor, spec: Spec) -> None:
    """Fill in the coefficients of logits in memory. logits: [T, K]; coef: [T, n(n+2)]"""
    tokens = logits.shape[0]
    _constrain_launcher(spec).launch((ceil_div(tokens, 128),), logits, coef, tokens)


@functools.cache
def _project_launcher(spec: Spec, dtype: torch.dtype, width: int) -> tuple[Launcher, int]:
    kp, size = padded(spec.logits), dtype.itemsize
    block, columns, depth = (64, 128, 3) if kp * size <= 32 else (128, 64, 4) if size == 2 else (64, 32, 3)
    columns = min(columns, max(16, power_of_two(width)))
    depth = stages((block + kp) * columns * size, depth)
    constants = {"ND": width, "KP": kp, "PRECISION": precision(dtype), "BT": block, "BC": columns, "STAGES": depth}
    return Launcher(_project, **constants, S=spec, num_warps=4), block


def project(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project the streams to logits and constrain them. x: [T, n or 1, d]; weight: [K, n·d]; bias: [K]

    Returns:
        Logits [T, K], statistics [T, 2], coefficients [T, n(n+2)], and the weight as `prepare` returns it.
    """
    tokens, width = x.shape[0], x.shape[1] * spec.d
    outputs = small_outputs(x, spec)
    prepared, sums = prepare(weight, x.dtype, width, spec)
    if tokens:
        launcher, block = _project_launcher(spec, x.dtype, width)
        launcher.launch((ceil_div(tokens, block),), x, prepared, sums, bias, *outputs, tokens)
    return *outputs, prepared, sums


def project_static(bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Constrain the bias alone: one row of coefficients serves every token, and there are no statistics."""
    logits, coef = bias.clone().unsqueeze(0), bias.new_empty(1, spec.coefficients)
    constrain(logits, coef, spec)
    return logits, bias.new_empty(0, 2), coef, bias.new_empty(0), bias.new_empty(0)


def small_outputs(x: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Make room for logits, statistics and coefficients."""
    return (
        x.new_empty(x.shape[0], spec.logits, dtype=torch.float32),
        x.new_empty(x.shape[0], 2, dtype=torch.float32),
        x.new_empty(x.shape[0], spec.coefficients, dtype=torch.float32),
    )


def precision(operand: torch.dtype) -> str:
    """Say how the tensor cores multiply: half types exactly, float32 as three products of tf32."""
    return "tf32x3" if operand == torch.float32 else "tf32"
