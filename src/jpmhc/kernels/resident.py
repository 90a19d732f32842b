"""Read and write→read over tiles of tokens that stay on chip from the projection to the weighted sum.

A persistent block walks over tiles of 16 tokens. The copy engine brings the next tile while this one is worked on; the
projection's weight sits in shared memory for the whole launch. Each warp multiplies its own slice of the width on the
tensor cores (a batched dot whose batch is the slice), so no warp repeats another's work.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jpmhc.kernels import constraints
from jpmhc.kernels.launch import multiprocessors, padded
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.two_pass import _outputs, _statistics, _store_coefficients, prepare

TOKENS = 16  # rows of one tensor-core tile
WARPS = 8
SHARED_BYTES = 196 * 1024  # of the 227 KB a Hopper block may use; the rest is scratch


@triton.jit
def _weight_slices(w, j, D: tl.constexpr, ND: tl.constexpr, KP: tl.constexpr, SLICES: tl.constexpr):
    """Stream j's part of the weight as a batch of slices. [slices, d / slices, KP]"""
    s = tl.arange(0, SLICES)[:, None, None]
    c = tl.arange(0, D // SLICES)[None, :, None]
    k = tl.arange(0, KP)[None, None, :]
    return tl.load(w + k * ND + j * D + s * (D // SLICES) + c)


@triton.jit
def _slices(x, BT: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr):
    """[tokens, d] → [slices, tokens, d / slices]"""
    return tl.permute(tl.reshape(x, (BT, SLICES, D // SLICES)), (1, 0, 2))


@triton.jit
def _pick(logits, entries, BT: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The logits that `entries` names. logits: [tokens, KP]; entries: [a, b] → [tokens, a, b]"""
    index = tl.broadcast_to(tl.reshape(entries, (1, A * B)), (BT, A * B))
    return tl.reshape(tl.gather(logits, index, 1), (BT, A, B))


@triton.jit
def _column(table, j, BT: tl.constexpr, N: tl.constexpr):
    """One column of a small table. [tokens, n] → [tokens, 1]

    The gather changes no value. It ends the table's layout here: without it the compiler would move the streams, a
    thousand times as large, into the layout of the constraints.
    """
    column = tl.sum(tl.where(tl.arange(0, N)[None, :] == j, table, 0.0), axis=1)
    return tl.gather(column, tl.arange(0, BT), 0)[:, None]


@triton.jit
def _constrain_tile(
    value,
    coef,
    rows,
    inside,
    BT: tl.constexpr,
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
    """Coefficients from logits in registers, to memory; returns the read weights. [tokens, n]"""
    r = _pick(value, constraints.read_entries(READ, N), BT, N, N)
    v = _pick(value, constraints.write_entries(WRITE, N, KR), BT, N, N)
    index, sign = constraints.mixer_entries(MIXER, N, KR, KW, RANK, MA, MB, PERMUTATIONS)
    m = _pick(value, tl.where(sign != 0.0, index, 0), BT, MA, MB)
    m = tl.where((sign != 0.0)[None, :, :], m * sign[None, :, :], 0.0)
    h = constraints.mix(m, MIXER, N, SCALE, ITERATIONS, RANK, MB, PERMUTATIONS)
    r = constraints.read_weights(r, READ, N, TAU)
    v = constraints.write_weights(v, WRITE, N, TAU)
    _store_coefficients(coef, rows, inside, r, v, h, N)
    return r


@triton.jit
def _resident_read(
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
    BT: tl.constexpr,
    SLICES: tl.constexpr,
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
    k = tl.arange(0, KP)
    c = tl.arange(0, D)
    weight = ()
    for j in tl.static_range(N):
        weight = weight + (_weight_slices(w, j, D, ND, KP, SLICES),)
    row_sums = tl.load(sums + k)
    offset = tl.load(bias + k, mask=k < K, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        rows = (tile * BT + tl.arange(0, BT)).to(tl.int64)
        inside = rows < T
        acc = tl.zeros([SLICES, BT, KP], tl.float32)
        square = tl.zeros([BT, D], tl.float32)
        total = tl.zeros([BT, D], tl.float32)
        streams = ()
        for j in tl.static_range(N):
            xj = x.load([tile * BT, j * D])
            streams = streams + (xj,)
            acc = tl.dot(_slices(xj, BT, D, SLICES), weight[j], acc)
            xf = xj.to(tl.float32)
            square += xf * xf
            if LAYER:
                total += xf
        mean, scale = _statistics(tl.sum(total, axis=1), tl.sum(square, axis=1), ND, EPS, LAYER)
        tl.store(stats + rows * 2, mean, mask=inside)
        tl.store(stats + rows * 2 + 1, scale, mask=inside)
        value = (tl.sum(acc, axis=0) - mean[:, None] * row_sums[None, :]) * scale[:, None] + offset[None, :]
        tl.store(logits + rows[:, None] * K + k[None, :], value, mask=inside[:, None] & (k < K)[None, :])
        r = _constrain_tile(
            value, coef, rows, inside,
            BT, N, READ, WRITE, MIXER, KR, KW, TAU, SCALE, ITERATIONS, RANK, MA, MB, PERMUTATIONS,
        )  # fmt: skip
        out = tl.zeros([BT, D], tl.float32)
        for j in tl.static_range(N):
            out += _column(r, j, BT, N) * streams[j].to(tl.float32)
        tl.store(h + rows[:, None] * D + c[None, :], out.to(h.dtype.element_ty), mask=inside[:, None])


def fits(x: Tensor, spec: Spec) -> bool:
    """Whether two tiles of tokens and the weight fit on chip, in a shape the copy engine takes."""
    width = spec.n * spec.d * x.element_size()
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and spec.d == triton.next_power_of_2(spec.d)
        and spec.d >= 16 * WARPS
        and width * (padded(spec.logits) + 2 * TOKENS) <= SHARED_BYTES
    )


def read(x: Tensor, weight: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x: [T, n, d]; weight: [K, n·d]; bias: [K] → h [T, d], logits [T, K], statistics [T, 2], coefficients."""
    tokens = len(x)
    outputs = _outputs(x, spec)
    if tokens:
        prepared, sums = prepare(weight, x.dtype)
        tiles = TensorDescriptor.from_tensor(x.view(tokens, -1), [TOKENS, spec.d])
        _resident_read[(min(multiprocessors(x), triton.cdiv(tokens, TOKENS)),)](
            tiles, prepared, sums, bias, *outputs, tokens,
            D=spec.d, K=spec.logits, KP=padded(spec.logits), EPS=spec.eps, LAYER=spec.norm == "layer",
            BT=TOKENS, SLICES=WARPS, **spec.constants(), num_warps=WARPS, num_stages=3,
        )  # fmt: skip
    return outputs
