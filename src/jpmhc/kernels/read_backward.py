r"""The derivative of the read.

The logits' gradient must be known before the streams' can be: `_logits_backward` turns the coefficients' gradients
into the logits'. Then `_streams_backward` returns the streams' gradient and `_weight_backward` the weight's, without
atomics.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import gates
from jpmhc.kernels.launch import SHARED_BYTES, kernel, multiprocessors, padded, stages
from jpmhc.kernels.projection import precision, prepare
from jpmhc.kernels.rows import combine_backward, load_streams
from jpmhc.kernels.spec import Spec


@triton.jit
def _derive(logits, coef, grad_read, grad_coef, grad_logits, rows, inside, S: tl.constexpr):
    """The logits' gradient from the coefficients'; what the sublayer's input adds to r's is in grad_read."""
    N: tl.constexpr = S.n
    gbase = grad_coef + rows * (N * (N + 2))
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    row = inside[:, None]
    here = inside[:, None, None]
    base = (logits + rows * S.logits)[:, None, None]
    line = (grad_logits + rows * S.logits)[:, None]
    out = line[:, :, None]
    dr = tl.load(gbase[:, None] + j, mask=row, other=0.0)
    dr += tl.load((grad_read + rows * N)[:, None] + j, mask=row, other=0.0)
    dw = tl.load(gbase[:, None] + N + j, mask=row, other=0.0)
    entries = gates.read_entries(S)[None, :, :]
    g = gates.read_derivative(tl.load(base + entries, mask=here, other=0.0), dr, S)
    if S.read == "softmax_matrix":
        tl.store(out + entries, g, mask=here)
    else:
        tl.store(line + j, tl.sum(g, axis=1), mask=row)
    entries = gates.write_entries(S)[None, :, :]
    g = gates.write_derivative(tl.load(base + entries, mask=here, other=0.0), dw, S)
    if S.write == "softmax_matrix":
        tl.store(out + entries, g, mask=here)
    else:
        tl.store(line + S.read_logits + j, tl.sum(g, axis=2), mask=row)
    if S.mixer.logits > 0:
        matrix = (2 * N + i * N + j)[None, :, :]
        h = tl.load((coef + rows * (N * (N + 2)))[:, None, None] + matrix, mask=here, other=0.0)
        dh = tl.load(gbase[:, None, None] + matrix, mask=here, other=0.0)
        F: tl.constexpr = S.mixer
        index, sign = F.entries(F)
        there = here & (sign != 0.0)[None, :, :]
        place = S.gate_logits + index[None, :, :]
        m = tl.load(base + place, mask=there, other=0.0) * sign[None, :, :]
        g = F.derivative(m, h, dh, F)
        tl.store(out + place, g, mask=here & (sign > 0.0)[None, :, :])


@kernel
def _logits_backward(
    logits,
    bias,
    sums,
    stats,
    coef,
    grad_read,
    grad_coef,
    grad_logits,
    left,
    affine,
    partial,
    T,
    ND: tl.constexpr,
    KP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    BT: tl.constexpr,
    S: tl.constexpr,
):
    """The logits' gradient gl, and what the passes over the streams need of it.

    With ν the normed token and gν = Wᵀ gl, grad x = scale (gν - mean(gν) - ν mean(gν ν)), and both means are inner
    products of K numbers: grad x = Wᵀ (scale gl) + level - along · x. Of n equal streams held once the sum of their
    gradients is asked for, and with the sum of their weights for W and d for n·d this is it.
    """
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = rows < T
    _derive(logits, coef, grad_read, grad_coef, grad_logits, rows, inside, S)
    if DYNAMIC:
        tl.debug_barrier()  # read back in another layout
        k = tl.arange(0, KP)
        known = inside[:, None] & (k < S.logits)[None, :]
        place = rows[:, None] * S.logits + k[None, :]
        gl = tl.load(grad_logits + place, mask=known, other=0.0)
        raw = tl.load(logits + place, mask=known, other=0.0)
        raw -= tl.load(bias + k, mask=k < S.logits, other=0.0)[None, :]
        mean = tl.load(stats + rows * 2, mask=inside, other=0.0)
        scale = tl.load(stats + rows * 2 + 1, mask=inside, other=0.0)
        along = tl.sum(gl * raw, axis=1) * scale * scale / ND
        level = mean * along
        if S.norm == "layer":
            level -= tl.sum(gl * tl.load(sums + k)[None, :], axis=1) * scale / ND
        scaled = gl * scale[:, None]
        tl.store(left + rows[:, None] * KP + k[None, :], scaled.to(left.dtype.element_ty), mask=inside[:, None])
        tl.store(affine + rows * 2, level, mask=inside)
        tl.store(affine + rows * 2 + 1, along, mask=inside)
        out = partial + tl.program_id(0) * (2 * KP) + k
        tl.store(out, tl.sum(gl, axis=0))
        tl.store(out + KP, tl.sum(scaled * mean[:, None], axis=0))


@kernel
def _streams_backward(
    x,
    grad,
    grad_h,
    w,
    coef,
    left,
    affine,
    grad_x,
    T,
    CHUNK,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    DYNAMIC: tl.constexpr,
    WRITTEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    k = tl.arange(0, KP)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    within = c < D
    weight = ()
    if DYNAMIC:
        for m in tl.static_range(M):
            place = w + k[:, None] * (M * D) + m * D + c[None, :]
            weight = weight + (tl.load(place, mask=within[None, :], other=0.0),)
    first = tl.program_id(1) * CHUNK
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        inside = rows < T
        mask = inside[:, None] & within[None, :]
        cbase = coef + rows * (DYNAMIC * N * (N + 2))
        gh = tl.load(grad_h + rows[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DYNAMIC:
            lv = tl.load(left + rows[:, None] * KP + k[None, :], mask=inside[:, None], other=0.0)
            level = tl.load(affine + rows * 2, mask=inside, other=0.0)[:, None]
            along = tl.load(affine + rows * 2 + 1, mask=inside, other=0.0)[:, None]
        if WRITTEN:
            grads = load_streams(grad, rows, c, mask, N, D)
        for m in tl.static_range(M):
            held = rows[:, None] * (M * D) + m * D + c[None, :]
            # Not added to zeros: Triton 3.6 then keeps the tiles on chip without swizzling and takes 1.4 times as long.
            total = tl.load(cbase + m, mask=inside, other=0.0)[:, None] * gh
            for j in tl.static_range(m + M, N, M):
                total += tl.load(cbase + j, mask=inside, other=0.0)[:, None] * gh
            if WRITTEN:
                for j in tl.static_range(m, N, M):
                    for i in tl.static_range(N):
                        total += tl.load(cbase + 2 * N + i * N + j, mask=inside, other=0.0)[:, None] * grads[i]
            if DYNAMIC:
                total += level - along * tl.load(x + held, mask=mask, other=0.0).to(tl.float32)
                total += tl.dot(lv, weight[m], input_precision=PRECISION)
            tl.store(grad_x + held, total.to(grad_x.dtype.element_ty), mask=mask)


@kernel
def _weight_backward(
    x,
    left,
    partial_w,
    T,
    CHUNK,
    ND: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A partial sum over CHUNK tokens of (scale gl) xᵀ, for a slice of the streams."""
    k = tl.arange(0, KP)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    first = split * CHUNK
    acc = tl.zeros([BC, KP], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        rows = (start + tl.arange(0, BT)).to(tl.int64)
        inside = (rows < T)[:, None]
        xv = tl.load(x + rows[:, None] * ND + c[None, :], mask=inside & (c < ND)[None, :], other=0.0)
        lv = tl.load(left + rows[:, None] * KP + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(tl.trans(xv.to(lv.dtype)), lv, acc, input_precision=PRECISION)
    out = partial_w + split.to(tl.int64) * (K * ND)
    tl.store(out + k[None, :] * ND + c[:, None], acc, mask=(k < K)[None, :] & (c < ND)[:, None])


def logits_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    logits: Tensor,
    stats: Tensor,
    coef: Tensor,
    grad_h: Tensor,
    grad_coef: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `streams_backward` and `weight_backward` need.

    Returns:
        The rounded weight [KP, width of x], scale · gl [T, KP], the affine part [T, 2], and the sums over the tokens
        of gl and of scale · mean · gl, [K] each.
    """
    tokens, k, kp = len(x), spec.logits, padded(spec.logits)
    grad_read = combine_backward(x, grad_h, spec)
    width = x.shape[1] * spec.d
    constants = {"ND": width, "KP": kp, "S": spec}
    if weight is None:
        none = bias.new_empty(0)
        grad_bias = torch.empty_like(bias)
        _logits_backward[(1,)](
            logits, bias, none, stats, coef, grad_read.sum(0), grad_coef, grad_bias, none, none, none, 1,
            DYNAMIC=False, BT=1, **constants, num_warps=1,
        )  # fmt: skip
        return none, none, none, grad_bias, none
    # The logits' gradients need more range than float16 has.
    operand = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    prepared, sums = prepare(weight, operand, width)
    left, affine = x.new_empty(tokens, kp, dtype=operand), coef.new_empty(tokens, 2)
    block = 32
    programs = triton.cdiv(tokens, block)
    partial = coef.new_empty(programs, 2, kp)
    if tokens:
        _logits_backward[(programs,)](
            logits, bias, sums, stats, coef, grad_read, grad_coef, torch.empty_like(logits), left, affine, partial,
            tokens, DYNAMIC=True, BT=block, **constants, num_warps=2,
        )  # fmt: skip
    total = partial.sum(0)
    return prepared, left, affine, total[0, :k], total[1, :k]


def streams_backward(
    x: Tensor,
    grad: Tensor | None,
    grad_h: Tensor,
    prepared: Tensor,
    coef: Tensor,
    left: Tensor,
    affine: Tensor,
    spec: Spec,
) -> Tensor:
    """The gradient of the streams; `grad` is that of H x, if they were written back. Shape of x"""
    tokens = len(x)
    grad_x = torch.empty_like(x)
    if not tokens:
        return grad_x
    kp = padded(spec.logits)
    column = weight_column_bytes(spec, prepared.dtype)
    width = 128
    while width > 16 and (width >= 2 * spec.d or column * width > SHARED_BYTES // 2):
        width //= 2  # the weight's slices stay on chip
    depth = stages(16 * (2 * spec.n + 1) * width * x.element_size(), 2, taken=column * width)
    launch = {"BT": 16, "BD": width, "STAGES": depth, "num_warps": 4}
    chunk = 16 * launch["BT"]
    _streams_backward[(triton.cdiv(spec.d, launch["BD"]), triton.cdiv(tokens, chunk))](
        x, grad, grad_h, prepared, coef, left, affine, grad_x, tokens, chunk,
        N=spec.n, M=x.shape[1], D=spec.d, KP=kp, DYNAMIC=len(prepared) > 0,
        WRITTEN=grad is not None, PRECISION=precision(prepared), **launch,
    )  # fmt: skip
    return grad_x


def weight_column_bytes(spec: Spec, operand: torch.dtype) -> int:
    """What one column of the n streams' weights takes on chip in `_streams_backward`: float32 is kept in two parts."""
    return spec.n * padded(spec.logits) * (2 if operand == torch.bfloat16 else 8)


def weight_backward(x: Tensor, left: Tensor, shift: Tensor, spec: Spec) -> Tensor:
    """The gradient of the weight: partial sums over stretches of tokens, added in a fixed order. [K, n·d]"""
    tokens, width = len(x), x.shape[1] * spec.d
    kp, size = padded(spec.logits), left.element_size()
    block, columns = (64, 128) if size == 2 else (32, 64)
    columns = min(columns, max(16, triton.next_power_of_2(width)))
    launch = {"BT": block, "BC": columns, "STAGES": stages(block * (columns + kp) * size, 3), "num_warps": 8}
    slices = triton.cdiv(width, launch["BC"])
    splits = max(1, min(2 * multiprocessors(x) // slices, triton.cdiv(tokens, launch["BT"])))
    chunk = triton.cdiv(triton.cdiv(tokens, splits), launch["BT"]) * launch["BT"]
    if not tokens:
        return shift.new_zeros(spec.logits, spec.n * spec.d)
    splits = triton.cdiv(tokens, chunk)
    partial = shift.new_empty(splits, spec.logits, width)
    _weight_backward[(slices, splits)](
        x, left, partial, tokens, chunk,
        ND=width, K=spec.logits, KP=kp, PRECISION=precision(left), **launch,
    )  # fmt: skip
    total = partial.sum(0)
    if spec.norm == "layer":
        total -= shift.unsqueeze(1)
    return total.repeat(1, spec.n // x.shape[1])  # equal streams have equal gradients
