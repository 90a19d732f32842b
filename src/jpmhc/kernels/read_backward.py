r"""The derivative of the read.

The logits' gradient must be known before the streams' can be: `_logits_backward` turns the coefficients' gradients
into the logits'. Then `_streams_backward` returns the streams' gradient and `_weight_backward` partial sums of the
weight's (parameter_backward.py).
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import gates
from jpmhc.kernels.launch import (
    SHARED_BYTES,
    BufferPart,
    Launcher,
    ceil_div,
    count_tokens,
    kernel,
    make_buffer,
    multiprocessors,
    padded,
    split_buffer,
    stages,
)
from jpmhc.kernels.parameter_backward import cut_tokens, parameters_backward
from jpmhc.kernels.projection import kept_layout, load_mixer_logits, precision, prepare
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.stream_sums import combine_backward, load_streams


@triton.jit
def _derive(logits, coef, grad_read, grad_coef, grad_logits, token, inside, S: tl.constexpr):
    """The logits' gradient from the coefficients'; what the sublayer's input adds to r's is in grad_read."""
    N: tl.constexpr = S.n
    gbase = grad_coef + token * (N * (N + 2))
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    row = inside[:, None]
    here = inside[:, None, None]
    base = (logits + token * S.logits)[:, None, None]
    line = (grad_logits + token * S.logits)[:, None]
    out = line[:, :, None]
    dr = tl.load(gbase[:, None] + j, mask=row, other=0.0)
    dr += tl.load((grad_read + token * N)[:, None] + j, mask=row, other=0.0)
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
        h = tl.load((coef + token * (N * (N + 2)))[:, None, None] + matrix, mask=here, other=0.0)
        dh = tl.load(gbase[:, None, None] + matrix, mask=here, other=0.0)
        F: tl.constexpr = S.mixer
        m, place, sign = load_mixer_logits(base, here, S)
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
    scaled_gradient,
    level_and_along,
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
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    _derive(logits, coef, grad_read, grad_coef, grad_logits, token, inside, S)
    if DYNAMIC:
        tl.debug_barrier()  # read back in another layout
        k = tl.arange(0, KP)
        known = inside[:, None] & (k < S.logits)[None, :]
        place = token[:, None] * S.logits + k[None, :]
        gl = tl.load(grad_logits + place, mask=known, other=0.0)
        raw = tl.load(logits + place, mask=known, other=0.0)
        raw -= tl.load(bias + k, mask=k < S.logits, other=0.0)[None, :]
        mean = tl.load(stats + token * 2, mask=inside, other=0.0)
        scale = tl.load(stats + token * 2 + 1, mask=inside, other=0.0)
        along = tl.sum(gl * raw, axis=1) * scale * scale / ND
        if S.norm == "rms_outside":  # 1 - eps · scale is the share of the root in what x was divided by
            along = along / tl.maximum(1.0 - S.eps * scale, 1e-7)
        level = mean * along
        if S.norm == "layer":
            level -= tl.sum(gl * tl.load(sums + k)[None, :], axis=1) * scale / ND
        scaled = gl * scale[:, None]
        place = scaled_gradient + token[:, None] * KP + k[None, :]
        tl.store(place, scaled.to(scaled_gradient.dtype.element_ty), mask=inside[:, None])
        tl.store(level_and_along + token * 2, level, mask=inside)
        tl.store(level_and_along + token * 2 + 1, along, mask=inside)
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
    scaled_gradient,
    level_and_along,
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
        token = (start + tl.arange(0, BT)).to(tl.int64)
        inside = token < T
        mask = inside[:, None] & within[None, :]
        cbase = coef + token * (DYNAMIC * N * (N + 2))
        gh = tl.load(grad_h + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DYNAMIC:
            scaled = tl.load(scaled_gradient + token[:, None] * KP + k[None, :], mask=inside[:, None], other=0.0)
            level = tl.load(level_and_along + token * 2, mask=inside, other=0.0)[:, None]
            along = tl.load(level_and_along + token * 2 + 1, mask=inside, other=0.0)[:, None]
        if WRITTEN:
            grads = load_streams(grad, token, c, mask, N, D)
        for m in tl.static_range(M):
            held = token[:, None] * (M * D) + m * D + c[None, :]
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
                total += tl.dot(scaled, weight[m], input_precision=PRECISION)
            tl.store(grad_x + held, total.to(grad_x.dtype.element_ty), mask=mask)


@functools.cache
def _static_launcher(spec: Spec) -> Launcher:
    constants = {"ND": spec.n * spec.d, "KP": padded(spec.logits), "S": spec}
    return Launcher(_logits_backward, DYNAMIC=False, BT=1, **constants, num_warps=1)


def static_backward(
    x: Tensor, bias: Tensor, coef: Tensor, kept: Tensor, grad_h: Tensor, grad_coef: Tensor, spec: Spec
) -> Tensor:
    """Compute the bias's gradient where the logits are the bias. [K]"""
    logits, stats, *_ = split_buffer(kept, kept_layout(0, 0, bias.dtype, spec))
    tokens = count_tokens(x, spec.d)
    grad_read = bias.new_empty(tokens, spec.n)
    combine_backward(x, grad_h, grad_read, tokens, spec)
    grad_bias, none = torch.empty_like(bias), bias.new_empty(0)
    _static_launcher(spec).launch(
        (1,), logits, bias, none, stats, coef, grad_read.sum(0), grad_coef, grad_bias, none, none, none, 1
    )
    return grad_bias


@functools.cache
def _logits_launcher(spec: Spec, operand: torch.dtype, width: int) -> Launcher:
    constants = {"ND": width, "KP": padded(spec.logits), "S": spec}
    return Launcher(_logits_backward, DYNAMIC=True, BT=32, **constants, num_warps=2)


def dynamic_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    coef: Tensor,
    kept: Tensor,
    grad_h: Tensor,
    grad_link: Tensor | None,
    grad_coef: Tensor,
    spec: Spec,
    in_place: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of streams, weight and bias where the logits are a projection of the streams."""
    tokens, width, operand = count_tokens(x, spec.d), x.shape[-2] * spec.d, gradient_type(x.dtype)
    if not tokens:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    logits, stats, prepared, sums = split_buffer(kept, kept_layout(tokens, width, x.dtype, spec))
    height, parts, again = padded(spec.logits), ceil_div(tokens, 32), operand != x.dtype
    splits, chunk = cut_tokens(x, tokens, operand, width, spec)
    layout = (
        (tokens * spec.n, torch.float32),  # the read weights' gradient
        (tokens * spec.logits, torch.float32),  # the logits' gradient gl
        (tokens * height, operand),  # scale · gl
        (tokens * 2, torch.float32),  # level and along of grad x = Wᵀ (scale gl) + level - along · x
        (parts * 2 * height, torch.float32),  # sums over 32 tokens each of gl and of scale · mean · gl
        (splits * spec.logits * width, torch.float32),  # sums over `chunk` tokens each of the weight's gradient
        (height * width * again, operand),  # the weight in the operands' type
        (height * again, torch.float32),
    )
    room = split_buffer(make_buffer(layout, x), layout)
    grad_read, grad_logits, scaled_gradient, level_and_along, partial, partial_w, other, other_sums = room
    if again:
        prepared, sums = other, other_sums
        prepare(weight, prepared, sums, width, spec)
    combine_backward(x, grad_h, grad_read, tokens, spec)
    _logits_launcher(spec, operand, width).launch(
        (parts,), logits, bias, sums, stats, coef, grad_read, grad_coef, grad_logits, scaled_gradient, level_and_along,
        partial, tokens,
    )  # fmt: skip
    grad_x = streams_backward(x, grad_link, grad_h, prepared, coef, scaled_gradient, level_and_along, spec, in_place)
    counts = (parts, splits, chunk)
    return grad_x, *parameters_backward(x, scaled_gradient, partial, partial_w, counts, weight, bias, spec)


def gradient_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which the logits' gradients are multiplied: they need more range than float16 has."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@functools.cache
def _streams_launcher(
    spec: Spec, dtype: torch.dtype, operand: torch.dtype | None, held: int, written: bool
) -> tuple[Launcher, int]:
    column = 0 if operand is None else weight_column_bytes(spec, operand)
    width = 128
    while width > 16 and (width >= 2 * spec.d or column * width > SHARED_BYTES // 2):
        width //= 2  # the weight's slices stay on chip
    depth = stages(16 * (2 * spec.n + 1) * width * dtype.itemsize, 2, taken=column * width)
    sizes = {"N": spec.n, "M": held, "D": spec.d, "KP": padded(spec.logits)}
    parts = {"DYNAMIC": operand is not None, "WRITTEN": written, "PRECISION": precision(operand or dtype)}
    return Launcher(_streams_backward, **sizes, **parts, BT=16, BD=width, STAGES=depth, num_warps=4), width


def streams_backward(
    x: Tensor,
    grad: Tensor | None,
    grad_h: Tensor,
    prepared: BufferPart | None,
    coef: Tensor,
    scaled_gradient: BufferPart | None,
    level_and_along: BufferPart | None,
    spec: Spec,
    in_place: bool,
) -> Tensor:
    """Compute the gradient of the streams; `grad` is that of H x, if they were written back. Shape of x

    Where the coefficients are the same for all tokens there is no weight and no part that comes from the logits. With
    `in_place` the result overwrites `grad`: each tile is read before it is written.
    """
    tokens, held = count_tokens(x, spec.d), x.shape[-2]
    grad_x = grad if in_place and grad is not None and grad.shape == x.shape else torch.empty_like(x)
    if tokens:
        operand = None if prepared is None else prepared.dtype
        launcher, width = _streams_launcher(spec, x.dtype, operand, held, grad is not None)
        slices = ceil_div(spec.d, width)
        chunk = _choose_chunk(tokens, slices, multiprocessors(x))
        grid = (slices, ceil_div(tokens, chunk))
        launcher.launch(grid, x, grad, grad_h, prepared, coef, scaled_gradient, level_and_along, grad_x, tokens, chunk)
    return grad_x


def _choose_chunk(tokens: int, slices: int, processors: int) -> int:
    """Return how many tokens a program takes: many, as it loads its weights once, if there are programs enough that the
    last ones to run leave few processors idle.
    """
    chunk = 256
    while chunk > 64 and slices * ceil_div(tokens, chunk) < 16 * processors:
        chunk //= 2
    return chunk


def weight_column_bytes(spec: Spec, operand: torch.dtype) -> int:
    """Return what one column of the n streams' weights takes on chip in `_streams_backward`: float32 in two parts."""
    return spec.n * padded(spec.logits) * (2 if operand == torch.bfloat16 else 8)


def why_not(spec: Spec, dtype: torch.dtype, dynamic: bool = True) -> str | None:
    """Say why the kernels do not take this connection in that type; None if they do. `dynamic`: it has a weight."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"x must be float32, bfloat16 or float16, got {dtype}"
    if dynamic and dtype != torch.bfloat16 and 16 * weight_column_bytes(spec, dtype) > 200 * 1024:
        return f"the weight of {spec.logits} logits for {spec.n} streams fits on chip in bfloat16 only, not in {dtype}"
    return None
