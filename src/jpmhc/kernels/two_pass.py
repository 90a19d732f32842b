"""The read: norm statistics, projection to logits, constraints and the sublayer's input in one kernel.

This form takes any shape: it reads each tile of tokens twice, the second time from cache. resident.py has the faster
one for widths that fit on chip.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import constraints
from jpmhc.kernels.launch import padded
from jpmhc.kernels.spec import Spec


@triton.jit
def _prepare(w, prepared, sums, ND, K: tl.constexpr, BLOCK: tl.constexpr):
    """Round the weight to the tensor cores' type, pad it with zero rows, and sum the rounded rows."""
    k = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, ND, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (c < ND) & (k < K)
        value = tl.load(w + k.to(tl.int64) * ND + c, mask=inside, other=0.0).to(prepared.dtype.element_ty)
        tl.store(prepared + k.to(tl.int64) * ND + c, value, mask=c < ND)
        total += value.to(tl.float32)
    tl.store(sums + k, tl.sum(total, axis=0))


def prepare(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The projection as the kernels read it. weight: [K, n·d] → rounded and padded [KP, n·d], row sums [KP]"""
    rows, columns = weight.shape
    prepared = weight.new_empty(padded(rows), columns, dtype=dtype)
    sums = weight.new_empty(padded(rows))
    _prepare[(padded(rows),)](weight, prepared, sums, columns, K=rows, BLOCK=min(2048, triton.next_power_of_2(columns)))
    return prepared, sums


@triton.jit
def _statistics(total, square, ND: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr):
    """The mean to subtract and the factor to multiply by. [tokens] each"""
    if LAYER:
        mean = total / ND
        return mean, tl.rsqrt(tl.maximum(square / ND - mean * mean, 0.0) + EPS)
    else:
        return total * 0.0, tl.rsqrt(square / ND + EPS)


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
def _constrain(
    logits,
    coef,
    rows,
    inside,
    K: tl.constexpr,
    N: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    MIXER: tl.constexpr,
    KR: tl.constexpr,
    KW: tl.constexpr,
    TAU: tl.constexpr,
    SCALE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    RANK: tl.constexpr,
    MA: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    """Coefficients from logits in memory, to memory."""
    base = (logits + rows * K)[:, None, None]
    here = inside[:, None, None]
    r = tl.load(base + constraints.read_entries(READ, N)[None, :, :], mask=here, other=0.0)
    v = tl.load(base + constraints.write_entries(WRITE, N, KR)[None, :, :], mask=here, other=0.0)
    index, sign = constraints.mixer_entries(MIXER, N, KR, KW, RANK, MA, MB, PERMUTATIONS)
    there = here & (sign != 0.0)[None, :, :]
    m = tl.load(base + index[None, :, :], mask=there, other=0.0) * sign[None, :, :]
    h = constraints.mix(m, MIXER, N, SCALE, ITERATIONS, RANK, MB, PERMUTATIONS)
    r = constraints.read_weights(r, READ, N, TAU)
    v = constraints.write_weights(v, WRITE, N, TAU)
    _store_coefficients(coef, rows, inside, r, v, h, N)


@triton.jit
def _two_pass(
    x,
    w,
    sums,
    bias,
    h,
    logits,
    stats,
    coef,
    T,
    D: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    N: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    MIXER: tl.constexpr,
    KR: tl.constexpr,
    KW: tl.constexpr,
    TAU: tl.constexpr,
    SCALE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    RANK: tl.constexpr,
    MA: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    ND: tl.constexpr = N * D
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
        if LAYER:
            total += tl.sum(xf, axis=1)
    mean, scale = _statistics(total, square, ND, EPS, LAYER)
    tl.store(stats + rows * 2, mean, mask=inside)
    tl.store(stats + rows * 2 + 1, scale, mask=inside)
    value = (acc - mean[:, None] * tl.load(sums + k)[None, :]) * scale[:, None]
    value += tl.load(bias + k, mask=k < K, other=0.0)[None, :]
    tl.store(logits + rows[:, None] * K + k[None, :], value, mask=inside[:, None] & (k < K)[None, :])
    tl.debug_barrier()  # the constraints read these logits back in another layout
    _constrain(
        logits, coef, rows, inside,
        K, N, READ, WRITE, MIXER, KR, KW, TAU, SCALE, ITERATIONS, RANK, MA, MB, PERMUTATIONS,
    )  # fmt: skip
    tl.debug_barrier()
    _weighted_sum(x, h, coef, rows, inside, N, D, BT, BD, STAGES, 1)


@triton.jit
def _weighted_sum(
    x,
    h,
    coef,
    rows,
    inside,
    N: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """h = Σ_j r_j x_j, a slice of the width at a time. PER_TOKEN 0: one r serves every token."""
    r = ()
    for j in tl.static_range(N):
        r = r + (tl.load(coef + rows * (PER_TOKEN * N * (N + 2)) + j, mask=inside, other=0.0)[:, None],)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        acc = tl.zeros([BT, BD], tl.float32)
        for j in tl.static_range(N):
            xj = tl.load(x + rows[:, None] * (N * D) + j * D + c[None, :], mask=mask, other=0.0)
            acc += r[j] * xj.to(tl.float32)
        tl.store(h + rows[:, None] * D + c[None, :], acc.to(h.dtype.element_ty), mask=mask)


@triton.jit
def _constrain_static(
    bias,
    coef,
    K: tl.constexpr,
    N: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    MIXER: tl.constexpr,
    KR: tl.constexpr,
    KW: tl.constexpr,
    TAU: tl.constexpr,
    SCALE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    RANK: tl.constexpr,
    MA: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    rows = tl.arange(0, 1).to(tl.int64)
    _constrain(
        bias, coef, rows, rows < 1,
        K, N, READ, WRITE, MIXER, KR, KW, TAU, SCALE, ITERATIONS, RANK, MA, MB, PERMUTATIONS,
    )  # fmt: skip


@triton.jit
def _static_sum(x, h, coef, T, N: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    _weighted_sum(x, h, coef, rows, rows < T, N, D, BT, BD, 1, 0)


def read(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x: [T, n, d]; weight: [K, n·d]; bias: [K] → h [T, d], logits [T, K], statistics [T, 2], coefficients."""
    tokens = len(x)
    outputs = _outputs(x, spec)
    if tokens:
        prepared, sums = prepare(weight, x.dtype)
        width = spec.n * spec.d
        block = 32
        _two_pass[(triton.cdiv(tokens, block),)](
            x, prepared, sums, bias, *outputs, tokens,
            D=spec.d, K=spec.logits, KP=padded(spec.logits), EPS=spec.eps, LAYER=spec.norm == "layer",
            PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
            BT=block, BC=min(128, triton.next_power_of_2(width)), BD=min(128, triton.next_power_of_2(spec.d)),
            STAGES=3, **spec.constants(), num_warps=4,
        )  # fmt: skip
    return outputs


def read_static(x: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The read whose logits are the bias alone: one row of coefficients serves every token; no statistics."""
    h = x.new_empty(len(x), spec.d)
    coef = bias.new_empty(1, spec.coefficients)
    _constrain_static[(1,)](bias, coef, K=spec.logits, **spec.constants(), num_warps=1)
    if len(x):
        width = min(512, triton.next_power_of_2(spec.d))
        _static_sum[(triton.cdiv(len(x), 8),)](x, h, coef, len(x), N=spec.n, D=spec.d, BT=8, BD=width, num_warps=4)
    return h, bias.clone().unsqueeze(0), bias.new_empty(0, 2), coef


def _outputs(x: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = len(x)
    return (
        x.new_empty(tokens, spec.d),
        x.new_empty(tokens, spec.logits, dtype=torch.float32),
        x.new_empty(tokens, 2, dtype=torch.float32),
        x.new_empty(tokens, spec.coefficients, dtype=torch.float32),
    )
