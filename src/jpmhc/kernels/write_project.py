"""The write of one connection fused with the projection of the next: the new streams are projected while in registers.

A program writes the streams of its tokens slice by slice and multiplies each slice by the next connection's weight.
A post-norm would need whole rows first, so connections with one take the two steps in turn.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import SHARED_BYTES, padded, stages
from jpmhc.kernels.projection import _statistics, constrain, precision, prepare, small_outputs
from jpmhc.kernels.spec import Spec


@triton.jit
def _opaque(value, COMPILED: tl.constexpr):
    """The value itself, behind an instruction that the compiler may not repeat.

    Without it the compiler computes the streams twice, once in the layout of the store and once in that of the tensor
    cores, instead of moving them from one to the other. The interpreter knows no such instruction and needs none.
    """
    if COMPILED:
        if value.dtype.primitive_bitwidth == 16:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=2)
        else:
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=1)
    else:
        return value


@triton.jit
def _write_project(
    x,
    y,
    old,
    out,
    w,
    sums,
    bias,
    logits,
    stats,
    T,
    D: tl.constexpr,
    OLD_PER_TOKEN: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    N: tl.constexpr,
):
    ND: tl.constexpr = N * D
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = rows < T
    k = tl.arange(0, KP)
    mixing = ()
    for entry in tl.static_range(N, N * (N + 2)):
        mixing = mixing + (
            tl.load(old + rows * (OLD_PER_TOKEN * N * (N + 2)) + entry, mask=inside, other=0.0)[:, None],
        )
    acc = tl.zeros([BT, KP], tl.float32)
    total = tl.zeros([BT], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        yv = tl.load(y + rows[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        streams = ()
        for j in tl.static_range(N):
            xj = tl.load(x + rows[:, None] * ND + j * D + c[None, :], mask=mask, other=0.0)
            streams = streams + (xj.to(tl.float32),)
        for i in tl.static_range(N):
            z = mixing[i] * yv
            for j in tl.static_range(N):
                z += mixing[N + i * N + j] * streams[j]
            rounded = _opaque(z.to(out.dtype.element_ty), COMPILED)
            tl.store(out + rows[:, None] * ND + i * D + c[None, :], rounded, mask=mask)
            wv = tl.load(w + k[None, :] * ND + i * D + c[:, None], mask=(c < D)[:, None], other=0.0)
            acc = tl.dot(rounded, wv, acc, input_precision=PRECISION)
            z = rounded.to(tl.float32)
            square += tl.sum(z * z, axis=1)
            if LAYER:
                total += tl.sum(z, axis=1)
    mean, scale = _statistics(total, square, ND, EPS, LAYER)
    tl.store(stats + rows * 2, mean, mask=inside)
    tl.store(stats + rows * 2 + 1, scale, mask=inside)
    value = (acc - mean[:, None] * tl.load(sums + k)[None, :]) * scale[:, None]
    value += tl.load(bias + k, mask=k < K, other=0.0)[None, :]
    tl.store(logits + rows[:, None] * K + k[None, :], value, mask=inside[:, None] & (k < K)[None, :])


def write_project(
    x: Tensor, y: Tensor, old: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new streams [T, n, d], then what `project` returns for them and the connection `following`."""
    tokens = len(x)
    out = torch.empty_like(x)
    logits, stats, coef = small_outputs(x, following)
    if tokens:
        prepared, sums = prepare(weight, x.dtype)
        kp, size = padded(following.logits), x.element_size()
        width = 64
        while width > 16 and (width >= 2 * spec.d or spec.n * kp * width * size > SHARED_BYTES // 4):
            width //= 2
        depth = stages((16 * (spec.n + 1) + spec.n * kp) * width * size, 3)
        launch = {"BT": 16, "BD": width, "STAGES": depth, "num_warps": 2}
        _write_project[(triton.cdiv(tokens, launch["BT"]),)](
            x, y, old, out, prepared, sums, bias, logits, stats, tokens,
            D=spec.d, OLD_PER_TOKEN=int(len(old) == tokens),
            K=following.logits, KP=kp, EPS=following.eps, LAYER=following.norm == "layer",
            PRECISION=precision(x), COMPILED=x.is_cuda, N=spec.n, **launch,
        )  # fmt: skip
        constrain(logits, coef, following)
    return out, logits, stats, coef
