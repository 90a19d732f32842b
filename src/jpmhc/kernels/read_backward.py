r"""The derivative of the read: two passes, as the logits' gradient must be known before the streams' can be.

`_logits_backward` takes the inner products of grad h with the streams, and turns the coefficients' gradients into the
logits'. `_streams_backward` walks over tokens with a slice of the width: it returns the streams' gradient and keeps
the weight's in registers, one partial sum a program, which are added afterwards in a fixed order.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import constraints
from jpmhc.kernels.launch import multiprocessors, padded
from jpmhc.kernels.spec import Spec


@triton.jit
def _derive(
    logits,
    coef,
    grad_read,
    grad_coef,
    grad_logits,
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
    """The logits' gradient from the coefficients'; what the sublayer's input adds to r's is in grad_read."""
    gbase = grad_coef + rows * (N * (N + 2))
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    row = inside[:, None]
    here = inside[:, None, None]
    base = (logits + rows * K)[:, None, None]
    out = (grad_logits + rows * K)[:, None, None]
    dr = tl.load(gbase[:, None] + j, mask=row, other=0.0)
    dr += tl.load((grad_read + rows * N)[:, None] + j, mask=row, other=0.0)
    dw = tl.load(gbase[:, None] + N + j, mask=row, other=0.0)
    entries = constraints.read_entries(READ, N)[None, :, :]
    g = constraints.read_derivative(tl.load(base + entries, mask=here, other=0.0), dr, READ, N, TAU)
    if READ == "softmax_matrix":
        tl.store(out + entries, g, mask=here)
    else:
        tl.store((grad_logits + rows * K)[:, None] + j, tl.sum(g, axis=1), mask=row)
    entries = constraints.write_entries(WRITE, N, KR)[None, :, :]
    g = constraints.write_derivative(tl.load(base + entries, mask=here, other=0.0), dw, WRITE, N, TAU)
    if WRITE == "softmax_matrix":
        tl.store(out + entries, g, mask=here)
    else:
        tl.store((grad_logits + rows * K)[:, None] + KR + j, tl.sum(g, axis=2), mask=row)
    if MIXER != "identity":
        matrix = (2 * N + i * N + j)[None, :, :]
        h = tl.load((coef + rows * (N * (N + 2)))[:, None, None] + matrix, mask=here, other=0.0)
        dh = tl.load(gbase[:, None, None] + matrix, mask=here, other=0.0)
        index, sign = constraints.mixer_entries(MIXER, N, KR, KW, RANK, MA, MB, PERMUTATIONS)
        there = here & (sign != 0.0)[None, :, :]
        m = tl.load(base + index[None, :, :], mask=there, other=0.0) * sign[None, :, :]
        g = constraints.mix_derivative(m, h, dh, MIXER, N, SCALE, ITERATIONS, RANK, MB, PERMUTATIONS)
        tl.store(out + index[None, :, :], g, mask=here & (sign > 0.0)[None, :, :])


@triton.jit
def _logits_backward(
    x,
    grad_h,
    logits,
    coef,
    grad_read,
    grad_coef,
    grad_logits,
    T,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    DOTS: tl.constexpr,
    DERIVE: tl.constexpr,
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
    """DOTS: inner products of grad h and the streams into grad_read. DERIVE: the logits' gradient from all of it."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = rows < T
    if DOTS:
        sums = ()
        for _ in tl.static_range(N):
            sums = sums + (tl.zeros([BT], tl.float32),)
        for start in tl.range(0, D, BD):
            c = start + tl.arange(0, BD)
            mask = inside[:, None] & (c < D)[None, :]
            gh = tl.load(grad_h + rows[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            added = ()
            for s in tl.static_range(N):
                xs = tl.load(x + rows[:, None] * (N * D) + s * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
                added = added + (sums[s] + tl.sum(gh * xs, axis=1),)
            sums = added
        for s in tl.static_range(N):
            tl.store(grad_read + rows * N + s, sums[s], mask=inside)
        tl.debug_barrier()  # read back below in the layout of the constraints
    if DERIVE:
        _derive(
            logits, coef, grad_read, grad_coef, grad_logits, rows, inside,
            K, N, READ, WRITE, MIXER, KR, KW, TAU, SCALE, ITERATIONS, RANK, MA, MB, PERMUTATIONS,
        )  # fmt: skip


@triton.jit
def _streams_backward(
    x,
    grad,
    grad_h,
    w,
    sums,
    bias,
    logits,
    stats,
    coef,
    grad_logits,
    grad_x,
    partial_w,
    partial_b,
    T,
    CHUNK,
    N: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LAYER: tl.constexpr,
    DYNAMIC: tl.constexpr,
    STREAM_GRAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """STREAM_GRAD: 0 none arrives with `grad`, 1 the write's, still to be multiplied by Hᵀ, 2 one for the streams."""
    ND: tl.constexpr = N * D
    operand = w.dtype.element_ty
    slice_ = tl.program_id(0)
    split = tl.program_id(1)
    k = tl.arange(0, KP)
    c = slice_ * BD + tl.arange(0, BD)
    within = c < D
    weight = ()
    acc = ()
    if DYNAMIC:
        for j in tl.static_range(N):
            weight = weight + (tl.load(w + k[:, None] * ND + j * D + c[None, :], mask=within[None, :], other=0.0),)
            acc = acc + (tl.zeros([KP, BD], tl.float32),)
        row_sums = tl.load(sums + k)
        offset = tl.load(bias + k, mask=k < K, other=0.0)
    grad_b = tl.zeros([KP], tl.float32)
    shift = tl.zeros([KP], tl.float32)
    first = split * CHUNK
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        inside = rows < T
        mask = inside[:, None] & within[None, :]
        cbase = coef + rows * (DYNAMIC * N * (N + 2))
        gh = tl.load(grad_h + rows[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DYNAMIC:
            known = inside[:, None] & (k < K)[None, :]
            gl = tl.load(grad_logits + rows[:, None] * K + k[None, :], mask=known, other=0.0)
            raw = tl.load(logits + rows[:, None] * K + k[None, :], mask=known, other=0.0) - offset[None, :]
            mean = tl.load(stats + rows * 2, mask=inside, other=0.0)
            scale = tl.load(stats + rows * 2 + 1, mask=inside, other=0.0)
            # With ν the normed token and gν = Wᵀ gl: grad x = scale (gν - mean(gν) - ν mean(gν ν)), and both means
            # are inner products of the K logits.
            along = tl.sum(gl * raw, axis=1) / ND * scale * scale
            level = mean * along
            if LAYER:
                level -= tl.sum(gl * row_sums[None, :], axis=1) / ND * scale
            scaled = gl * scale[:, None]
            grad_b += tl.sum(gl, axis=0)
            if LAYER:
                shift += tl.sum(scaled * mean[:, None], axis=0)
            left = scaled.to(operand)
            left_t = tl.trans(left)
        grads = ()
        if STREAM_GRAD == 1:
            for i in tl.static_range(N):
                g = tl.load(grad + rows[:, None] * ND + i * D + c[None, :], mask=mask, other=0.0)
                grads = grads + (g.to(tl.float32),)
        updated = ()
        for j in tl.static_range(N):
            place = rows[:, None] * ND + j * D + c[None, :]
            total = tl.load(cbase + j, mask=inside, other=0.0)[:, None] * gh
            if STREAM_GRAD == 2:
                total += tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
            if STREAM_GRAD == 1:
                for i in tl.static_range(N):
                    total += tl.load(cbase + 2 * N + i * N + j, mask=inside, other=0.0)[:, None] * grads[i]
            if DYNAMIC:
                xj = tl.load(x + place, mask=mask, other=0.0)
                total += level[:, None] - along[:, None] * xj.to(tl.float32)
                total += tl.dot(left, weight[j], input_precision=PRECISION)
                updated = updated + (tl.dot(left_t, xj.to(operand), acc[j], input_precision=PRECISION),)
            tl.store(grad_x + place, total.to(grad_x.dtype.element_ty), mask=mask)
        acc = updated
    if DYNAMIC:
        out = partial_w + split.to(tl.int64) * (K * ND)
        for j in tl.static_range(N):
            value = acc[j] - shift[:, None]
            tl.store(out + k[:, None] * ND + j * D + c[None, :], value, mask=(k < K)[:, None] & within[None, :])
        if slice_ == 0:
            tl.store(partial_b + split * K + k, grad_b, mask=k < K)


def _slice(spec: Spec) -> dict[str, int]:
    """The tile of `_streams_backward`: the weight's gradient for n slices of the width has to stay in registers."""
    logits = padded(spec.logits)
    width = max(16, min(triton.next_power_of_2(spec.d), 128, 16384 // (spec.n * logits)))
    return {"BT": 32, "BD": width, "num_warps": 4 if spec.n * logits * width <= 8192 else 8, "STAGES": 2}


def logits_backward(x: Tensor, grad_h: Tensor, logits: Tensor, coef: Tensor, grad_coef: Tensor, spec: Spec) -> Tensor:
    """The gradient of the logits: [T, K], or [1, K] where all tokens share them."""
    launch: dict[str, int] = {"BT": 8, "BD": min(512, triton.next_power_of_2(spec.d)), "num_warps": 4}
    constants = {"D": spec.d, "K": spec.logits, **spec.constants(), **launch}
    grad_logits = torch.empty_like(logits)
    tokens = len(x)
    per_token = len(logits) == tokens
    grad_read = coef.new_empty(tokens, spec.n)
    if tokens:
        _logits_backward[(triton.cdiv(tokens, launch["BT"]),)](
            x, grad_h, logits, coef, grad_read, grad_coef, grad_logits, tokens,
            DOTS=True, DERIVE=per_token, **constants,
        )  # fmt: skip
    if not per_token:
        _logits_backward[(1,)](
            x, grad_h, logits, coef, grad_read.sum(0), grad_coef, grad_logits, 1, DOTS=False, DERIVE=True, **constants
        )
    return grad_logits


def streams_backward(
    x: Tensor,
    grad: Tensor | None,
    mixed: bool,
    grad_h: Tensor,
    prepared: Tensor,
    sums: Tensor,
    bias: Tensor,
    logits: Tensor,
    stats: Tensor,
    coef: Tensor,
    grad_logits: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the streams, the weight and the bias. `mixed`: `grad` has been multiplied by Hᵀ already."""
    tokens, logit_count = len(x), spec.logits
    per_token = prepared.numel() > 0
    grad_x = torch.empty_like(x)
    launch = _slice(spec)
    slices = triton.cdiv(spec.d, launch["BD"])
    splits = max(1, min(4 * multiprocessors(x) // slices, triton.cdiv(tokens, launch["BT"])))
    chunk = triton.cdiv(triton.cdiv(tokens, splits), launch["BT"]) * launch["BT"]
    splits = max(1, triton.cdiv(tokens, chunk)) if tokens else 1
    partial_w = coef.new_empty(splits if per_token else 0, logit_count, spec.n * spec.d)
    partial_b = coef.new_empty(splits, logit_count)
    if not tokens:
        return grad_x, partial_w.new_zeros(logit_count, spec.n * spec.d), grad_logits.sum(0)
    _streams_backward[(slices, splits)](
        x, grad, grad_h, prepared, sums, bias, logits, stats, coef, grad_logits, grad_x, partial_w, partial_b,
        tokens, chunk,
        N=spec.n, D=spec.d, K=logit_count, KP=padded(logit_count), LAYER=spec.norm == "layer", DYNAMIC=per_token,
        STREAM_GRAD=0 if grad is None else 2 if mixed else 1,
        PRECISION="tf32" if prepared.dtype == torch.bfloat16 else "tf32x3", **launch,
    )  # fmt: skip
    if not per_token:
        return grad_x, partial_w.new_empty(0), grad_logits[0]
    return grad_x, partial_w.sum(0), partial_b.sum(0)
