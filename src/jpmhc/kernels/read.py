r"""The pass of the read: the sublayer's input $h = \sum_j r_j x_j$, and the coefficients r, w, H from the logits.

The logits of a token are $W\,\mathrm{norm}(x) + b$ (eq. fused-proj), with the projection W and the bias b. The norm is
applied after the product on the tensor cores: $W\,\mathrm{norm}(x) = (W x - \mathrm{mean} \cdot W 1) \cdot
\mathrm{scale}$. The sum of streams is a kernel of its own, because two kernels at the speed of memory are faster than
one kernel that keeps a tile on chip (docs/LOG.md). If the coefficients are static, the logits are the bias, and all
tokens share one row of coefficients.

The derivative begins with the logits' gradient, which the streams' gradient needs. Then it passes over the streams
twice: for the streams' gradient and for partial sums of the weight's gradient. Names end in shapes, see device.py.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.decode import are_few, decode
from jpmhc.kernels.device import (
    centre_moments,
    constrain_tokens,
    differentiate_logits,
    inner_products,
    load_coefficient,
    load_streams,
    store_logits,
)
from jpmhc.kernels.launch import (
    SHARED_BYTES,
    BufferPart,
    Launcher,
    Layout,
    aligned,
    buffer_bytes,
    ceil_div,
    count_tokens,
    kernel,
    make_buffer,
    multiprocessors,
    padded,
    power_of_two,
    precision,
    row_launch,
    split_buffer,
    stages,
)
from jpmhc.kernels.passes import Pass
from jpmhc.kernels.replay import replayed
from jpmhc.kernels.spec import Spec


# prepared = round(SCALE · W), with zero rows up to P; sums = prepared · 1
@triton.jit
def _prepare(
    w_KW, prepared_PW, sums_P, COLUMNS,
    FOLDS: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a scaled row of the weight, rounded to the tensor cores' type, and the row's sum.

    If n equal streams are stored once, the n streams' weights are added up: COLUMNS is then d, and FOLDS is n.
    """
    k = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (c < COLUMNS) & (k < K)
        value = tl.zeros([BLOCK], tl.float32)
        for fold in tl.static_range(FOLDS):
            value += tl.load(w_KW + (k.to(tl.int64) * FOLDS + fold) * COLUMNS + c, mask=inside, other=0.0)
        rounded = (value * SCALE).to(prepared_PW.dtype.element_ty)
        tl.store(prepared_PW + k.to(tl.int64) * COLUMNS + c, rounded, mask=c < COLUMNS)
        total += rounded.to(tl.float32)
    tl.store(sums_P + k, tl.sum(total, axis=0))


@functools.cache
def _prepare_launcher(rows: int, columns: int, folds: int, scale: float, dtype: torch.dtype) -> Launcher:
    return Launcher(_prepare, FOLDS=folds, K=rows, SCALE=scale, BLOCK=min(2048, power_of_two(columns)))


def prepare(weight: Tensor, prepared: BufferPart, sums: BufferPart, columns: int, spec: Spec) -> None:
    """Compute the kernels' scaled, padded weight [P, columns] and its row sums [P] from the weight [K, n·d].

    `columns` is n·d, or d for equal streams that are stored once.
    """
    rows = weight.shape[0]
    launcher = _prepare_launcher(rows, columns, weight.shape[1] // columns, spec.scale, prepared.dtype)
    launcher.launch((padded(rows),), aligned(weight), prepared, sums, columns)


# logits = (W x - mean · W 1) · scale + b; then r, w, H = gates and mixer of the logits
@kernel
def _project(
    x_TW, w_PW, sums_P, bias_K, logits_TK, stats_T2, coef_TC, T,
    ND: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    k = tl.arange(0, KP)
    acc_TP = tl.zeros([BT, KP], tl.float32)
    near_T = tl.zeros([BT], tl.float32)
    if S.norm == "layer":
        first = tl.load(x_TW + token[:, None] * ND + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0.0)
        near_T = tl.sum(first.to(tl.float32), axis=1) / 8
    mean_T = tl.zeros([BT], tl.float32)
    total_T = tl.zeros([BT], tl.float32)
    square_T = tl.zeros([BT], tl.float32)
    for start in tl.range(0, ND, BC, num_stages=STAGES):
        c = start + tl.arange(0, BC)
        x_TC = tl.load(x_TW + token[:, None] * ND + c[None, :], mask=inside[:, None] & (c < ND)[None, :], other=0.0)
        w_CP = tl.load(w_PW + k[None, :] * ND + c[:, None], mask=(c < ND)[:, None], other=0.0)
        wide_TC = x_TC.to(tl.float32)
        acc_TP = tl.dot(x_TC, w_CP, acc_TP, input_precision=PRECISION)
        if S.norm == "layer":
            wide_TC -= near_T[:, None]
            if ND % BC != 0:
                wide_TC = tl.where((c < ND)[None, :], wide_TC, 0.0)
            total_T += tl.sum(wide_TC, axis=1)
        square_T += tl.sum(wide_TC * wide_TC, axis=1)
    if S.norm == "layer":
        mean_T, square_T = centre_moments(near_T, total_T, square_T, ND)
    store_logits(acc_TP, mean_T, square_T, sums_P, bias_K, logits_TK, stats_T2, token, inside, ND, KP, S)
    tl.debug_barrier()  # the constraints read these logits back in another layout
    constrain_tokens(logits_TK, coef_TC, token, inside, S)


@functools.cache
def _project_launcher(spec: Spec, dtype: torch.dtype, width: int) -> tuple[Launcher, int]:
    kp, size = padded(spec.logits), dtype.itemsize
    block, columns, depth = (64, 128, 3) if kp * size <= 32 else (128, 64, 4) if size == 2 else (64, 32, 3)
    columns = min(columns, max(16, power_of_two(width)))
    depth = stages((block + kp) * columns * size, depth)
    constants = {"ND": width, "KP": kp, "PRECISION": precision(dtype), "BT": block, "BC": columns, "STAGES": depth}
    return Launcher(_project, **constants, S=spec, num_warps=4), block


# r, w, H = gates and mixer of logits in memory
@kernel
def _constrain(logits_TK, coef_TC, T, BT: tl.constexpr, S: tl.constexpr):
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    constrain_tokens(logits_TK, coef_TC, token, token < T, S)


@functools.cache
def _constrain_launcher(spec: Spec) -> Launcher:
    return Launcher(_constrain, BT=128, S=spec, num_warps=4)


def constrain(logits: BufferPart, coef: Tensor, spec: Spec) -> None:
    """Compute the coefficients from the logits [T, K], and store them in `coef` [T, C]."""
    tokens = coef.shape[0]
    _constrain_launcher(spec).launch((ceil_div(tokens, 128),), logits, coef, tokens)


@triton.jit
def _backwards(BT: tl.constexpr):
    """Return this program's tokens. The first programs get the last tokens, which are still in the cache."""
    return ((tl.num_programs(0) - 1 - tl.program_id(0)) * BT + tl.arange(0, BT)).to(tl.int64)


# h = Σ_j r_j x_j
@kernel
def _sum_streams(
    x_TMD, coef_TC, h_TD, T,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, PER_TOKEN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    token = _backwards(BT)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x_TMD, token, c, mask, M, D)
    total_TD = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(N):
        total_TD += load_coefficient(coef_TC, token, inside, j, N, PER_TOKEN) * streams[j % M]
    tl.store(h_TD + token[:, None] * D + c[None, :], total_TD.to(h_TD.dtype.element_ty), mask=mask)


@functools.cache
def _sum_launcher(spec: Spec, dtype: torch.dtype, stored_streams: int, per_token: bool) -> Launcher:
    return Launcher(_sum_streams, N=spec.n, M=stored_streams, D=spec.d, PER_TOKEN=int(per_token), **row_launch(spec))


def buffer_layout(tokens: int, width: int, dtype: torch.dtype, spec: Spec) -> Layout:
    """Return the layout of the buffer that a read keeps for its derivative.

    Its parts are the logits [T, K], the norm's statistics [T, 2], and the results of `prepare`, [P, width] and [P] for
    P padded logits. For static coefficients `tokens` and `width` are zero, and the logits have one row.
    """
    height = padded(spec.logits) if width else 0
    float32 = torch.float32
    return (max(tokens, 1) * spec.logits, float32), (2 * tokens, float32), (height * width, dtype), (height, float32)


def layout_of_read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> Layout:
    """Return the layout of the buffer that the read of the streams x keeps for its derivative."""
    if weight is None:
        return buffer_layout(0, 0, bias.dtype, spec)
    return buffer_layout(count_tokens(x, spec.d), x.shape[-2] * spec.d, x.dtype, spec)


Results = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def allocate(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec, keeps: bool) -> Results:
    """Allocate the results of a read, without their values."""
    rows = 1 if weight is None else count_tokens(x, spec.d)
    layout = layout_of_read(x, weight, bias, spec)
    return (
        x.new_empty((*x.shape[:-2], spec.d)),
        x.new_empty_strided((*x.shape[:-2], spec.n, spec.d), (0,) * x.ndim) if keeps else None,
        bias.new_empty(rows, spec.coefficients),
        x.new_empty(buffer_bytes(layout), dtype=torch.uint8) if keeps else None,
    )


@replayed
def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec, keeps: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return h [..., d], the link (see write.py), the coefficients [T or 1, C] and the buffer for the derivative.

    Without `keeps`, the link and the buffer are None.

    Args:
        x: The streams. [..., n or 1, d]
        weight: The projection W to the logits, or None if the logits are the bias. [K, n·d]
        bias: The bias b of the logits. [K]
        keeps: Whether there will be a derivative.
    """
    x, bias = aligned(x), aligned(bias)
    tokens = count_tokens(x, spec.d)
    h, _, coef, buffer = results = allocate(x, weight, bias, spec, keeps)
    if weight is not None and not keeps and are_few(tokens):
        decode(x, weight, bias, spec, h, coef)
        return results
    layout = layout_of_read(x, weight, bias, spec)
    logits, stats, prepared, sums = split_buffer(make_buffer(layout, x) if buffer is None else buffer, layout)
    if weight is None:
        logits.tensor().copy_(bias)
        constrain(logits, coef, spec)
    else:
        width = x.shape[-2] * spec.d
        prepare(weight, prepared, sums, width, spec)
        if tokens:
            launcher, block = _project_launcher(spec, x.dtype, width)
            launcher.launch((ceil_div(tokens, block),), x, prepared, sums, bias, logits, stats, coef, tokens)
    if tokens:
        launcher = _sum_launcher(spec, x.dtype, x.shape[-2], coef.shape[0] == tokens)
        launcher.launch((tokens,), x, coef, h, tokens)
    return results


# grad r_j = ⟨grad h, x_j⟩
@kernel
def _sum_backward(
    x_TMD, grad_h_TD, grad_read_TN, T,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    token = _backwards(BT)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x_TMD, token, c, mask, M, D)
    gh_TD = tl.load(grad_h_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    address = grad_read_TN + token[:, None] * ROW + tl.arange(0, N)[None, :]
    tl.store(address, inner_products(gh_TD, streams, BT, N), mask=inside[:, None])


@functools.cache
def _sum_backward_launcher(spec: Spec, dtype: torch.dtype, stored_streams: int, row: int) -> Launcher:
    return Launcher(_sum_backward, N=spec.n, M=stored_streams, D=spec.d, ROW=row, **row_launch(spec))


def differentiate_sum(x: Tensor, grad_h: Tensor, grad_read: BufferPart | Tensor, row: int, spec: Spec) -> None:
    """Store the read weights' gradient through h in the first n of the `row` columns of `grad_read`."""
    tokens = count_tokens(x, spec.d)
    if tokens:
        _sum_backward_launcher(spec, x.dtype, x.shape[-2], row).launch((tokens,), x, grad_h, grad_read, tokens)


# With ν the normed token and gν = Wᵀ gl:
#     grad x = scale (gν - mean(gν) - ν mean(gν ν)) = Wᵀ (scale gl) + level - along · x,
# because both means are inner products of K numbers. If n equal streams are stored once, the same formula gives the sum
# of their gradients, with the sum of their weights for W and with d for n·d.
@kernel
def _logits_backward(
    logits_TK, bias_K, sums_P, stats_T2, coef_TC, grad_read_TN, grad_coef_TC,
    grad_logits_TK, scaled_TP, level_and_along_T2, partial_2P, T,
    ND: tl.constexpr, KP: tl.constexpr, DYNAMIC: tl.constexpr, DELAYED: tl.constexpr, BT: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store the logits' gradient gl, scale · gl, level and along, and partial sums for the gradients of W and b.

    With DELAYED the sum h has the read weights of another connection, and there is no grad_read.
    """
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    differentiate_logits(logits_TK, coef_TC, grad_read_TN, grad_coef_TC, grad_logits_TK, token, inside, DELAYED, S)
    if DYNAMIC:
        tl.debug_barrier()  # the gradient is read back in another layout
        k = tl.arange(0, KP)
        known = inside[:, None] & (k < S.logits)[None, :]
        address = token[:, None] * S.logits + k[None, :]
        gl_TP = tl.load(grad_logits_TK + address, mask=known, other=0.0)
        raw_TP = tl.load(logits_TK + address, mask=known, other=0.0)
        raw_TP -= tl.load(bias_K + k, mask=k < S.logits, other=0.0)[None, :]
        mean_T = tl.load(stats_T2 + token * 2, mask=inside, other=0.0)
        scale_T = tl.load(stats_T2 + token * 2 + 1, mask=inside, other=0.0)
        along_T = tl.sum(gl_TP * raw_TP, axis=1) * scale_T * scale_T / ND
        if S.norm == "rms_outside":  # 1 - eps · scale is the share of the root in the divisor of x
            along_T = along_T / tl.maximum(1.0 - S.eps * scale_T, 1e-7)
        level_T = mean_T * along_T
        if S.norm == "layer":
            level_T -= tl.sum(gl_TP * tl.load(sums_P + k)[None, :], axis=1) * scale_T / ND
        scaled = gl_TP * scale_T[:, None]
        address = scaled_TP + token[:, None] * KP + k[None, :]
        tl.store(address, scaled.to(scaled_TP.dtype.element_ty), mask=inside[:, None])
        tl.store(level_and_along_T2 + token * 2, level_T, mask=inside)
        tl.store(level_and_along_T2 + token * 2 + 1, along_T, mask=inside)
        out = partial_2P + tl.program_id(0) * (2 * KP) + k
        tl.store(out, tl.sum(gl_TP, axis=0))
        tl.store(out + KP, tl.sum(scaled * mean_T[:, None], axis=0))


@functools.cache
def _logits_launcher(spec: Spec, operand: torch.dtype | None, width: int, delayed: bool = False) -> Launcher:
    """Return `_logits_backward`'s launcher. `operand` is None for static coefficients, with one row of logits."""
    blocks = {"BT": 1, "num_warps": 1} if operand is None else {"BT": 32, "num_warps": 2}
    sizes = {"ND": width, "KP": padded(spec.logits), "S": spec}
    return Launcher(_logits_backward, DYNAMIC=operand is not None, DELAYED=delayed, **sizes, **blocks)


# grad x_j = r_j grad h + Σ_i H_ij grad z_i + Wᵀ_j (scale gl) + level - along · x_j
@kernel
def _streams_backward(
    x_TMD, grad_TND, grad_h_TD, w_PMD, coef_TC, scaled_TP, level_and_along_T2, grad_x_TMD, T, CHUNK,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, DYNAMIC: tl.constexpr, WRITTEN: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    c = tl.program_id(0) * BD + tl.arange(0, BD)
    within = c < D
    weight = ()
    if DYNAMIC:
        for m in tl.static_range(M):
            address = w_PMD + k[:, None] * (M * D) + m * D + c[None, :]
            weight = weight + (tl.load(address, mask=within[None, :], other=0.0),)
    first = tl.program_id(1) * CHUNK
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        token = (start + tl.arange(0, BT)).to(tl.int64)
        inside = token < T
        mask = inside[:, None] & within[None, :]
        cbase = coef_TC + token * (DYNAMIC * N * (N + 2))
        gh_TD = tl.load(grad_h_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DYNAMIC:
            scaled = tl.load(scaled_TP + token[:, None] * KP + k[None, :], mask=inside[:, None], other=0.0)
            level = tl.load(level_and_along_T2 + token * 2, mask=inside, other=0.0)[:, None]
            along = tl.load(level_and_along_T2 + token * 2 + 1, mask=inside, other=0.0)[:, None]
        if WRITTEN:
            grads = load_streams(grad_TND, token, c, mask, N, D)
        for m in tl.static_range(M):
            offset = token[:, None] * (M * D) + m * D + c[None, :]
            # A sum that begins with zeros takes 1.4 times as long: Triton 3.6 then stores the tiles without swizzling.
            gx_TD = tl.load(cbase + m, mask=inside, other=0.0)[:, None] * gh_TD
            for j in tl.static_range(m + M, N, M):
                gx_TD += tl.load(cbase + j, mask=inside, other=0.0)[:, None] * gh_TD
            if WRITTEN:
                for j in tl.static_range(m, N, M):
                    for i in tl.static_range(N):
                        gx_TD += tl.load(cbase + 2 * N + i * N + j, mask=inside, other=0.0)[:, None] * grads[i]
            if DYNAMIC:
                gx_TD += level - along * tl.load(x_TMD + offset, mask=mask, other=0.0).to(tl.float32)
                gx_TD += tl.dot(scaled, weight[m], input_precision=PRECISION)
            tl.store(grad_x_TMD + offset, gx_TD.to(grad_x_TMD.dtype.element_ty), mask=mask)


@functools.cache
def _streams_launcher(
    spec: Spec, dtype: torch.dtype, operand: torch.dtype | None, stored_streams: int, written: bool
) -> tuple[Launcher, int]:
    column = 0 if operand is None else _weight_column_bytes(spec, operand)
    width = 128
    while width > 16 and (width >= 2 * spec.d or column * width > SHARED_BYTES // 2):
        width //= 2  # the weight's slices stay on chip
    depth = stages(16 * (2 * spec.n + 1) * width * dtype.itemsize, 2, taken=column * width)
    sizes = {"N": spec.n, "M": stored_streams, "D": spec.d, "KP": padded(spec.logits)}
    parts = {"DYNAMIC": operand is not None, "WRITTEN": written, "PRECISION": precision(operand or dtype)}
    return Launcher(_streams_backward, **sizes, **parts, BT=16, BD=width, STAGES=depth, num_warps=4), width


def _differentiate_streams(
    x: Tensor,
    grad: Tensor | None,
    grad_h: Tensor,
    prepared: BufferPart | None,
    coef: Tensor,
    scaled: BufferPart | None,
    level_and_along: BufferPart | None,
    spec: Spec,
    in_place: bool,
) -> Tensor:
    """Return the gradient of the streams, in the shape of x. `grad` is grad z from a linked write, or None.

    Static coefficients have no weight, and no gradient through the logits. With `in_place` the result overwrites
    `grad`, because each tile is read before it is written.
    """
    tokens, stored_streams = count_tokens(x, spec.d), x.shape[-2]
    grad_x = grad if in_place and grad is not None and grad.shape == x.shape else torch.empty_like(x)
    if tokens:
        operand = None if prepared is None else prepared.dtype
        launcher, width = _streams_launcher(spec, x.dtype, operand, stored_streams, grad is not None)
        slices, chunk = ceil_div(spec.d, width), 256
        # Many tokens per program, which loads its weights once, but enough programs to keep all processors busy.
        while chunk > 64 and slices * ceil_div(tokens, chunk) < 16 * multiprocessors(x.device):
            chunk //= 2
        grid = (slices, ceil_div(tokens, chunk))
        launcher.launch(grid, x, grad, grad_h, prepared, coef, scaled, level_and_along, grad_x, tokens, chunk)
    return grad_x


# partial grad W = Σ_t (scale gl)_t x_tᵀ over CHUNK tokens
@kernel
def _weight_backward(
    x_TW, scaled_TP, partial_KW, T, CHUNK,
    ND: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    first = split * CHUNK
    acc_CP = tl.zeros([BC, KP], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        token = (start + tl.arange(0, BT)).to(tl.int64)
        inside = (token < T)[:, None]
        x_TC = tl.load(x_TW + token[:, None] * ND + c[None, :], mask=inside & (c < ND)[None, :], other=0.0)
        scaled = tl.load(scaled_TP + token[:, None] * KP + k[None, :], mask=inside, other=0.0)
        acc_CP = tl.dot(tl.trans(x_TC.to(scaled.dtype)), scaled, acc_CP, input_precision=PRECISION)
    out = partial_KW + split.to(tl.int64) * (K * ND)
    tl.store(out + k[None, :] * ND + c[:, None], acc_CP, mask=(k < K)[None, :] & (c < ND)[:, None])


def _weight_columns(operand: torch.dtype, width: int) -> int:
    return min(128 if operand.itemsize == 2 else 64, max(16, power_of_two(width)))


@functools.cache
def _weight_launcher(spec: Spec, dtype: torch.dtype, operand: torch.dtype, width: int) -> tuple[Launcher, int]:
    kp, size = padded(spec.logits), operand.itemsize
    block, columns = 64 if size == 2 else 32, _weight_columns(operand, width)
    depth = stages(block * (columns + kp) * size, 3)
    constants = {"ND": width, "K": spec.logits, "KP": kp, "PRECISION": precision(operand)}
    return Launcher(_weight_backward, **constants, BT=block, BC=columns, STAGES=depth, num_warps=8), block


# grad W = SCALE (Σ partial grad W - Σ scale · mean · gl), grad b = Σ gl
@functools.partial(triton.jit, do_not_specialize=["SPLITS", "PROGRAMS"])
def _finish_gradients(
    partial_w_SKW, partial_R2P, grad_weight_KW, grad_bias_K, SPLITS, PROGRAMS,
    WIDTH: tl.constexpr, FOLDS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SCALE: tl.constexpr,
    CENTRED: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store row k of the weight's gradient and entry k of the bias's, from partial sums added in a fixed order.

    A layer norm subtracts a token's mean from all its entries, and thus one number from the whole row. Equal streams
    that are stored once have equal gradients: the row is written FOLDS times.
    """
    k = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    plain = tl.zeros([BP], tl.float32)
    means = tl.zeros([BP], tl.float32)
    for start in tl.range(0, PROGRAMS, BP):
        p = start + tl.arange(0, BP)
        address = partial_R2P + p * (2 * KP) + k
        plain += tl.load(address, mask=p < PROGRAMS, other=0.0)
        if CENTRED:
            means += tl.load(address + KP, mask=p < PROGRAMS, other=0.0)
    rows = tl.zeros([BS, BC], tl.float32)
    for start in tl.range(0, SPLITS, BS):
        split = start + tl.arange(0, BS)
        address = partial_w_SKW + (split * K + k).to(tl.int64)[:, None] * WIDTH + c[None, :]
        rows += tl.load(address, mask=(split < SPLITS)[:, None] & (c < WIDTH)[None, :], other=0.0)
    row = (tl.sum(rows, axis=0) - tl.sum(means, axis=0)) * SCALE
    for fold in tl.static_range(FOLDS):
        tl.store(grad_weight_KW + (k.to(tl.int64) * FOLDS + fold) * WIDTH + c, row, mask=c < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(grad_bias_K + k, tl.sum(plain, axis=0))


MOST_PARTS = 1024  # more partial sums than this are added up by PyTorch first, which uses the whole device


@functools.cache
def _finish_launcher(spec: Spec, width: int, folds: int) -> tuple[Launcher, int]:
    columns = min(128, power_of_two(width))
    constants = {"WIDTH": width, "FOLDS": folds, "K": spec.logits, "KP": padded(spec.logits), "SCALE": spec.scale}
    centred = spec.norm == "layer"
    return Launcher(_finish_gradients, **constants, CENTRED=centred, BC=columns, BP=512, BS=16, num_warps=4), columns


def _allocate_gradients(x: Tensor, weight: Tensor | None, bias: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.new_empty(t.shape) for t in (x, weight, bias))


def differentiate_read(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    coef: Tensor,
    buffer: Tensor,
    grad_h: Tensor | None,
    grad_link: Tensor | None,
    grad_coef: Tensor | None,
    spec: Spec,
    in_place: bool = False,
    delayed: bool = False,
    streams_step: Callable[[BufferPart, BufferPart, BufferPart], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of the streams, the weight and the bias. `grad_link` is the write's grad z (see write.py).

    With `in_place` and a post-norm the streams' gradient overwrites `grad_link`, which the write made for this read
    alone. Without a post-norm `grad_link` is the gradient of the write's result, which other code may use.

    With `delayed`, h was read with the read weights of another connection, which `coef` has in place of this
    connection's read weights. The gradient of those read weights is not computed here.

    `streams_step` replaces `_streams_backward`: it returns the streams' gradient from the prepared weight, scale · gl,
    and level and along, as in the formula above `_logits_backward`.
    """
    x, bias = aligned(x), aligned(bias)
    grad_h = x.new_zeros((*x.shape[:-2], x.shape[-1])) if grad_h is None else aligned(grad_h)
    grad_coef = torch.zeros_like(coef) if grad_coef is None else aligned(grad_coef)
    grad_link = None if grad_link is None else aligned(grad_link)
    in_place = in_place and spec.post_norm
    tokens = count_tokens(x, spec.d)
    logits, stats, prepared, sums = split_buffer(buffer, layout_of_read(x, weight, bias, spec))
    if weight is None:
        grad_x = _differentiate_streams(x, grad_link, grad_h, None, coef, None, None, spec, in_place)
        grad_read = bias.new_empty(tokens, spec.n)
        differentiate_sum(x, grad_h, grad_read, spec.n, spec)
        grad_bias, none = torch.empty_like(bias), bias.new_empty(0)
        _logits_launcher(spec, None, spec.n * spec.d).launch(
            (1,), logits, bias, none, stats, coef, grad_read.sum(0), grad_coef, grad_bias, none, none, none, 1
        )
        return grad_x, None, grad_bias
    if not tokens:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    # The type in which the logits' gradients are multiplied: they need more range than float16 has.
    operand = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    width, height, parts, widened = x.shape[-2] * spec.d, padded(spec.logits), ceil_div(tokens, 32), operand != x.dtype
    weight_launcher, block = _weight_launcher(spec, x.dtype, operand, width)
    slices = ceil_div(width, _weight_columns(operand, width))
    splits = max(1, min(2 * multiprocessors(x.device) // slices, ceil_div(tokens, block)))
    chunk = ceil_div(ceil_div(tokens, splits), block) * block
    splits = ceil_div(tokens, chunk)
    layout = (
        (tokens * spec.n, torch.float32),  # the read weights' gradient
        (tokens * spec.logits, torch.float32),  # the logits' gradient gl
        (tokens * height, operand),  # scale · gl
        (tokens * 2, torch.float32),  # level and along
        (parts * 2 * height, torch.float32),  # sums over 32 tokens each of gl and of scale · mean · gl
        (splits * spec.logits * width, torch.float32),  # sums over `chunk` tokens each of the weight's gradient
        (height * width * widened, operand),  # the weight in the operands' type
        (height * widened, torch.float32),
    )
    parted = split_buffer(make_buffer(layout, x), layout)
    grad_read_TN, grad_logits, scaled, level_and_along, partial, partial_w, other, other_sums = parted
    if widened:
        prepared, sums = other, other_sums
        prepare(weight, prepared, sums, width, spec)
    if not delayed:
        differentiate_sum(x, grad_h, grad_read_TN, spec.n, spec)
    _logits_launcher(spec, operand, width, delayed).launch(
        (parts,), logits, bias, sums, stats, coef, grad_read_TN, grad_coef, grad_logits, scaled, level_and_along,
        partial, tokens,
    )  # fmt: skip
    if streams_step is None:
        grad_x = _differentiate_streams(x, grad_link, grad_h, prepared, coef, scaled, level_and_along, spec, in_place)
    else:
        grad_x = streams_step(prepared, scaled, level_and_along)
    weight_launcher.launch((slices, splits), x, scaled, partial_w, tokens, chunk)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    rows: BufferPart | Tensor = partial
    if parts > MOST_PARTS:
        rows, parts = partial.tensor().view(parts, 2 * height).sum(0), 1
    finish, columns = _finish_launcher(spec, width, spec.n * spec.d // width)
    grid = (spec.logits, ceil_div(width, columns))
    finish.launch(grid, partial_w, rows, grad_weight, grad_bias, splits, parts)
    return grad_x, grad_weight, grad_bias


read = Pass("read", _forward, replayed(differentiate_read), allocate, _allocate_gradients)


def _weight_column_bytes(spec: Spec, operand: torch.dtype) -> int:
    """Return the bytes that one column of the n streams' weights takes on chip in `_streams_backward`."""
    return spec.n * padded(spec.logits) * (2 if operand == torch.bfloat16 else 8)


def why_not(spec: Spec, dtype: torch.dtype, dynamic: bool = True) -> str | None:
    """Return one sentence that says why the kernels cannot run on streams of this type, or None if they can.

    `dynamic` says whether the connection has a weight.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"x must be float32, bfloat16 or float16, got {dtype}"
    if dynamic and dtype != torch.bfloat16 and 16 * _weight_column_bytes(spec, dtype) > 200 * 1024:
        return f"the weight of {spec.logits} logits for {spec.n} streams fits on chip in bfloat16 only, not in {dtype}"
    return None
