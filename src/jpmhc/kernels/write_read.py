r"""The pass from one sublayer to the next: the write of a connection and the read of the next connection.

One kernel computes $z_i = \sum_j H_{ij} x_j + w_i y$, the next connection's logits from z, and $h = \sum_i r_i z_i$. A
program goes over its tokens' streams slice by slice. It mixes each slice, stores it and multiplies it by the next
connection's weight. The sums over all slices give the norm's statistics, the logits and the read weights. Then the
program goes over the slices again, from the last one, which is still in the cache, to the first, and adds them up to
the next sublayer's input. The factors of a post-norm are known only after the first pass. With a post-norm the second
pass therefore mixes the slices again, normalises and stores them, and the projection, which is linear, is multiplied by
the factors after the first pass.

A delayed read takes the read weights of the connection that writes. They are known from the start, so that the first
pass adds up h too, and there is no second pass.

The derivative runs the read's derivative and then the write's, or computes the gradient of z and all gradients that
follow from it in one kernel (`_write_read_backward`). Names end in shapes, see device.py.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels import read as reading
from jpmhc.kernels.decode import are_few, decode
from jpmhc.kernels.device import (
    centre_moments,
    load_coefficient,
    load_mixing,
    load_read_weights,
    load_streams,
    mix_stream,
    norm_factor,
    replaced,
    store_logits,
)
from jpmhc.kernels.launch import (
    SHARED_BYTES,
    BufferPart,
    Launcher,
    aligned,
    ceil_div,
    count_tokens,
    kernel,
    make_buffer,
    padded,
    power_of_two,
    precision,
    split_buffer,
    stages,
)
from jpmhc.kernels.passes import Pass
from jpmhc.kernels.replay import replayed
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.write import differentiate_write


@triton.jit
def _opaque(value, COMPILED: tl.constexpr):
    """Return the value through an instruction that the compiler must not repeat.

    Without this instruction the compiler computes the streams twice, once in the layout of the store and once in the
    layout of the tensor cores, instead of converting them. The interpreter does not have the instruction.
    """
    if COMPILED:
        PACK: tl.constexpr = 32 // value.dtype.primitive_bitwidth  # values per register
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], value.dtype, is_pure=False, pack=PACK)
    else:
        return value


@triton.jit
def _split(value, TYPE: tl.constexpr):
    """Return the value rounded to TYPE, and the rounding error, in the same type."""
    rounded = value.to(TYPE)
    return rounded, (value - rounded.to(tl.float32)).to(TYPE)


# z_i = Σ_j H_ij x_j + w_i y, normed with a post-norm; logits = (W z - mean · W 1) · scale + b; h = Σ_i r_i z_i,
# with r of these logits or, if DELAYED, with r of `old`
@triton.jit  # compiled anew if T is not a multiple of 16: whole tiles need 45 registers less
def _write_read(
    x_TMD, y_TD, old_TC, out_TND, w_PW, sums_P, bias_K, logits_TK, stats_T2, h_TD, T,
    OLD_PER_TOKEN: tl.constexpr, POST_NORM: tl.constexpr, OLD_EPS: tl.constexpr, KP: tl.constexpr,
    PRECISION: tl.constexpr, COMPILED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    BACK: tl.constexpr, BACK_STAGES: tl.constexpr, M: tl.constexpr, DELAYED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Write the streams of BT tokens with the coefficients `old`, and read them for the next connection S."""
    N: tl.constexpr = S.n
    D: tl.constexpr = S.d
    ND: tl.constexpr = N * D
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    k = tl.arange(0, KP)
    mixing = load_mixing(old_TC, token, inside, N, OLD_PER_TOKEN)
    weights = ()  # the read weights
    if DELAYED:
        for i in tl.static_range(N):
            weights = weights + (load_coefficient(old_TC, token, inside, i, N, OLD_PER_TOKEN),)
    products = ()  # with a post-norm each stream has its own sums, because its factor is not known yet
    squares = ()
    for _ in tl.static_range(N if POST_NORM else 1):
        products = products + (tl.zeros([BT, KP], tl.float32),)
        squares = squares + (tl.zeros([BT], tl.float32),)
    near_T = tl.zeros([BT], tl.float32)
    total_T = tl.zeros([BT], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        y = tl.load(y_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        streams = load_streams(x_TMD, token, c, mask, M, D)
        for i in tl.static_range(N):
            rounded_TD = _opaque(mix_stream(streams, y, mixing, i, N).to(out_TND.dtype.element_ty), COMPILED)
            if not POST_NORM:
                tl.store(out_TND + token[:, None] * ND + i * D + c[None, :], rounded_TD, mask=mask)
            w_DP = tl.load(w_PW + k[None, :] * ND + i * D + c[:, None], mask=(c < D)[:, None], other=0.0)
            z_TD = rounded_TD.to(tl.float32)
            if DELAYED:
                if i == 0:
                    sum_TD = weights[i] * z_TD
                else:
                    sum_TD += weights[i] * z_TD
            product_TP = tl.dot(rounded_TD, w_DP, products[i * POST_NORM], input_precision=PRECISION)
            products = replaced(products, i * POST_NORM, product_TP)
            if S.norm == "layer":
                if i == 0:  # the mean of the first tile is near enough to the mean of all
                    near_T = tl.where(start == 0, tl.sum(z_TD, axis=1) / min(BD, D), near_T)
                z_TD -= near_T[:, None]
                if D % BD != 0:
                    z_TD = tl.where((c < D)[None, :], z_TD, 0.0)
            if POST_NORM:
                squares = replaced(squares, i, squares[i] + tl.sum(z_TD * z_TD, axis=1))
            elif i == 0:
                line_TD = z_TD
                squared_TD = z_TD * z_TD
            else:
                line_TD += z_TD
                squared_TD += z_TD * z_TD
        if DELAYED:
            tl.store(h_TD + token[:, None] * D + c[None, :], sum_TD.to(h_TD.dtype.element_ty), mask=mask)
        if not POST_NORM:  # one reduction for all streams
            if S.norm == "layer":
                total_T += tl.sum(line_TD, axis=1)
            squares = replaced(squares, 0, squares[0] + tl.sum(squared_TD, axis=1))
    mean_T = tl.zeros([BT], tl.float32)
    factors = ()
    if POST_NORM:
        acc_TP = tl.zeros([BT, KP], tl.float32)
        square_T = tl.zeros([BT], tl.float32)
        for i in tl.static_range(N):
            factor_T = norm_factor(squares[i] / D, OLD_EPS)
            factors = factors + (factor_T[:, None],)
            acc_TP += products[i] * factor_T[:, None]
            square_T += squares[i] * factor_T * factor_T
    else:
        acc_TP = products[0]
        square_T = squares[0]
        if S.norm == "layer":
            mean_T, square_T = centre_moments(near_T, total_T, square_T, ND)
    store_logits(acc_TP, mean_T, square_T, sums_P, bias_K, logits_TK, stats_T2, token, inside, ND, KP, S)
    if not DELAYED:
        tl.debug_barrier()  # the stored numbers are read back in another layout
        r_TN = load_read_weights(logits_TK, token, inside, S)
        for i in tl.static_range(N):
            weights = weights + (tl.sum(tl.where(tl.arange(0, N)[None, :] == i, r_TN, 0.0), axis=1)[:, None],)
        for step in tl.range(0, tl.cdiv(D, BACK), num_stages=BACK_STAGES):
            c = (tl.cdiv(D, BACK) - 1 - step) * BACK + tl.arange(0, BACK)
            mask = inside[:, None] & (c < D)[None, :]
            sum_TD = tl.zeros([BT, BACK], tl.float32)
            if POST_NORM:
                y = tl.load(y_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
                streams = load_streams(x_TMD, token, c, mask, M, D)
            for i in tl.static_range(N):
                address = out_TND + token[:, None] * ND + i * D + c[None, :]
                if POST_NORM:
                    z_TD = (mix_stream(streams, y, mixing, i, N) * factors[i]).to(out_TND.dtype.element_ty)
                    tl.store(address, z_TD, mask=mask)
                else:
                    z_TD = tl.load(address, mask=mask, other=0.0)
                sum_TD += weights[i] * z_TD.to(tl.float32)
            tl.store(h_TD + token[:, None] * D + c[None, :], sum_TD.to(h_TD.dtype.element_ty), mask=mask)


def one_kernel_pays(spec: Spec, following: Spec) -> bool:
    """Return whether one kernel for the write and the next read is no slower than two kernels.

    The one kernel keeps the weights of a slice of n streams for every logit, and with a post-norm n sums per logit. It
    does not combine a post-norm with a layer norm, which would need even more sums.
    """
    size = spec.n * padded(following.logits)
    return size <= 64 and following.norm != "layer" if spec.post_norm else size <= 256


@functools.cache
def _launcher(
    spec: Spec,
    following: Spec,
    dtype: torch.dtype,
    stored_streams: int,
    per_token: bool,
    delayed: bool,
    compiled: bool,
    whole: bool,
    one: bool,
) -> Launcher:
    """Return a launcher of `_write_read`, which Triton compiles again for multiples of 16 tokens and for one token."""
    kp, size = padded(following.logits), dtype.itemsize
    width = 64
    while width > 16 and (width >= 2 * spec.d or spec.n * kp * width * size > SHARED_BYTES // 4):
        width //= 2
    depth = stages((16 * (stored_streams + 1) + spec.n * kp) * width * size, 3)
    # The second pass only adds up, in wide slices and without a pipeline, unless a post-norm makes it mix again.
    back = (width, depth) if spec.post_norm else (2 * width, 1)
    old = {"OLD_PER_TOKEN": int(per_token), "POST_NORM": int(spec.post_norm), "OLD_EPS": spec.eps}
    blocks = {"BT": 16, "BD": width, "STAGES": depth, "BACK": back[0], "BACK_STAGES": back[1], "num_warps": 2}
    new = {"KP": kp, "PRECISION": precision(dtype), "COMPILED": compiled, "M": stored_streams, "DELAYED": delayed}
    return Launcher(_write_read, **old, **new, **blocks, S=following)


# The rows of a tile are the streams of its tokens, a = (t, j), and every step is a product of matrices. With H and w of
# the write (`old`), z = H x + w ⊗ y, and with H', r' of the next connection, whose new streams have the gradient g,
#     grad z_tj = Σ_i H'_ij g_ti + r'_j grad h_t + Wᵀ_j (scale gl)_t + level_t - along_t (Σ_l H_jl x_tl + w_j y_t)
# (read.py) is a sum of four products: of H'ᵀ with the rows of g, of -along H with the rows of x, of [r', -along w] with
# the lines grad h and y, and of scale gl with W. A delayed read has the write's r in place of r'. H' and r' carry the
# gradient through all layers; each is therefore split into two numbers of the tensor cores' type. From grad z, rounded
# as it is stored, follow
#     grad H_jl = ⟨grad z_tj, x_tl⟩, grad w_j = ⟨grad z_tj, y_t⟩, grad y_t = Σ_j w_j grad z_tj.
# A group of 16 rows has 16 / N tokens and belongs to one warp. Its matrices are 16 × 16 with a token's N × N block on
# the diagonal, and the inner products are the diagonal blocks of (grad z) xᵀ and of (grad z) yᵀ, which the tensor cores
# add up over the slices. So no sum over a row crosses warps.
@kernel
def _write_read_backward(
    x_RD, y_TD, old_TC, grad_RD, grad_h_TD, new_TC, w_PW, scaled_TP, level_and_along_T2,
    grad_z_RD, grad_y_TD, grad_old_TC, T,
    N: tl.constexpr, D: tl.constexpr, KP: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    DELAYED: tl.constexpr, GROUPS: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the gradients of z = H x + w ⊗ y, of y, and of w and H. R: rows, G: groups of 16 rows."""
    TOKENS: tl.constexpr = 16 // N  # of a group
    BT: tl.constexpr = GROUPS * TOKENS
    C: tl.constexpr = N * (N + 2)
    first = tl.program_id(0).to(tl.int64) * BT
    group = first + tl.arange(0, GROUPS)[:, None, None] * TOKENS
    a = tl.arange(0, 16)[None, :, None]
    b = tl.arange(0, 16)[None, None, :]
    token = group + a // N  # of a row. [G, 16, 1]
    inside = token < T
    j = a % N
    base = token * C
    level = tl.load(level_and_along_T2 + token * 2, mask=inside, other=0.0)
    along = tl.load(level_and_along_T2 + token * 2 + 1, mask=inside, other=0.0)
    write = tl.load(old_TC + base + N + j, mask=inside, other=0.0)
    same = (a // N == b // N) & inside
    old_entry = base + 2 * N + j * N + b % N  # H_jl
    mixing = tl.load(new_TC + base + 2 * N + (b % N) * N + j, mask=same, other=0.0)  # H'_ij
    back = (-along * tl.load(old_TC + old_entry, mask=same, other=0.0)).to(x_RD.dtype.element_ty)
    # The lines of a group are the rows of grad h, then the rows of y; the others are zero.
    of_y = (a // N == b - TOKENS) & inside
    old_write = base + N + j + b * 0
    lines = tl.load((old_TC if DELAYED else new_TC) + base + j + b * 0, mask=(a // N == b) & inside, other=0.0)
    lines -= along * tl.load(old_TC + old_write, mask=of_y, other=0.0)
    mixing, mixing_rest = _split(mixing, x_RD.dtype.element_ty)
    lines, lines_rest = _split(lines, x_RD.dtype.element_ty)
    line = group + a % TOKENS
    known = (a < 2 * TOKENS) & (line < T)
    # The logits' gradients of a token stand in each of its rows, in the columns of the row's stream.
    q = tl.arange(0, N * KP)
    mine = inside & (j == (q // KP)[None, None, :])
    spread = tl.load(scaled_TP + token * KP + (q % KP)[None, None, :], mask=mine, other=0.0)
    spread = tl.reshape(spread, [GROUPS * 16, N * KP])
    weight = (q % KP) * (N * D) + (q // KP) * D
    t = first + tl.arange(0, BT)
    along_x = tl.zeros([GROUPS, 16, 16], tl.float32)
    along_lines = tl.zeros([GROUPS, 16, 16], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        within = (c < D)[None, None, :]
        rows = (group * N + a) * D + c[None, None, :]
        g_GRD = tl.load(grad_RD + rows, mask=inside & within, other=0.0)
        x_GRD = tl.load(x_RD + rows, mask=inside & within, other=0.0)
        offset = line * D + c[None, None, :]
        lines_GRD = tl.load(tl.where(a < TOKENS, grad_h_TD + offset, y_TD + offset), mask=known & within, other=0.0)
        w_PD = tl.load(w_PW + weight[:, None] + c[None, :], mask=(c < D)[None, :], other=0.0)
        gz_GRD = tl.reshape(tl.dot(spread, w_PD, input_precision=PRECISION), [GROUPS, 16, BD])
        gz_GRD = tl.dot(mixing, g_GRD, gz_GRD, input_precision=PRECISION)
        gz_GRD = tl.dot(back, x_GRD, gz_GRD, input_precision=PRECISION)
        gz_GRD = tl.dot(lines, lines_GRD, gz_GRD, input_precision=PRECISION)
        if SPLIT:
            gz_GRD = tl.dot(mixing_rest, g_GRD, gz_GRD, input_precision=PRECISION)
            gz_GRD = tl.dot(lines_rest, lines_GRD, gz_GRD, input_precision=PRECISION)
        rounded = (gz_GRD + level).to(grad_z_RD.dtype.element_ty)
        tl.store(grad_z_RD + rows, rounded, mask=inside & within)
        along_x = tl.dot(rounded, tl.trans(x_GRD, 0, 2, 1), along_x, input_precision=PRECISION)
        along_lines = tl.dot(rounded, tl.trans(lines_GRD, 0, 2, 1), along_lines, input_precision=PRECISION)
        gy_TD = tl.sum(tl.reshape(write * rounded.to(tl.float32), [BT, N, BD]), axis=1)
        mask = (t < T)[:, None] & (c < D)[None, :]
        tl.store(grad_y_TD + t[:, None] * D + c[None, :], gy_TD.to(grad_y_TD.dtype.element_ty), mask=mask)
    tl.store(grad_old_TC + base + j, tl.zeros([GROUPS, 16, 1], tl.float32), mask=inside)
    tl.store(grad_old_TC + old_write, along_lines, mask=of_y)
    tl.store(grad_old_TC + old_entry, along_x, mask=same)


def one_gradient_kernel_pays(spec: Spec, following: Spec, dtype: torch.dtype) -> bool:
    """Return whether one kernel for the gradients of the write and the next read is faster than two kernels.

    More than 64 rows of weights would leave room for one program per multiprocessor. The work that a program does once
    takes as long as half a slice, so that streams of fewer than two slices gain nothing.
    """
    rows = spec.n * padded(following.logits)
    return dtype == torch.bfloat16 and not spec.post_norm and rows <= 64 and spec.d >= 128


@functools.cache
def _backward_launcher(following: Spec, dtype: torch.dtype, delayed: bool) -> tuple[Launcher, int]:
    """Return `_write_read_backward`'s launcher and the tokens per program. Two programs fit on a multiprocessor."""
    n, width = following.n, min(64, max(16, power_of_two(following.d)))
    sizes = {"N": n, "D": following.d, "KP": padded(following.logits), "PRECISION": precision(dtype)}
    blocks = {"GROUPS": 4, "BD": width, "STAGES": 3, "num_warps": 4}
    forms = {"SPLIT": dtype != torch.float32, "DELAYED": delayed}
    return Launcher(_write_read_backward, **sizes, **forms, **blocks), 4 * 16 // n


def _differentiate_both(
    x: Tensor, y: Tensor, coef: Tensor, grad: Tensor, grad_h: Tensor, new: Tensor, grad_y: Tensor, grad_coef: Tensor,
    following: Spec, delayed: bool, prepared: BufferPart, scaled: BufferPart, level_and_along: BufferPart,
) -> Tensor:  # fmt: skip
    """Return the gradient of z = H x + w ⊗ y. Store the others in `grad_y` and `grad_coef`."""
    tokens, grad_z = count_tokens(x, following.d), torch.empty_like(x)
    launcher, block = _backward_launcher(following, x.dtype, delayed)
    launcher.launch(
        (ceil_div(tokens, block),), x, y, coef, grad, grad_h, new, prepared, scaled, level_and_along, grad_z, grad_y,
        grad_coef, tokens,
    )  # fmt: skip
    return grad_z


def one_kernel_decodes(tokens: int, spec: Spec) -> bool:
    """Return whether the decoding kernel applies: few tokens, no gradients, and no post-norm of the write."""
    return not torch.is_grad_enabled() and not spec.post_norm and are_few(tokens)


def _allocate(
    x: Tensor, y: Tensor, coef: Tensor, weight: Tensor, bias: Tensor, spec: Spec, following: Spec, *settings: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Allocate the results of `_forward`, without their values. The last of `settings` is `keeps`."""
    out = x.new_empty((*y.shape[:-1], spec.n, spec.d))
    h, link, coef, buffer = reading.allocate(out, weight, bias, following, settings[-1])
    return h, link, out, coef, buffer


@replayed
def _forward(
    x: Tensor,
    y: Tensor,
    coef: Tensor,
    weight: Tensor,
    bias: Tensor,
    spec: Spec,
    following: Spec,
    delayed: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Return h, the link, the new streams, the coefficients and the buffer for the derivative.

    All but the new streams are the results of the read for the connection `following`.

    Args:
        x, y, coef: The write's inputs: streams, the sublayer's output and coefficients of the connection `spec`.
        weight, bias, following, keeps: The read's inputs.
        delayed: Whether h is read with the read weights in `coef`, and not with those of `following`.
    """
    x, y, bias = aligned(x), aligned(y), aligned(bias)
    tokens, stored_streams, width = count_tokens(x, spec.d), x.shape[-2], spec.n * spec.d
    h, _, out, new, buffer = results = _allocate(x, y, coef, weight, bias, spec, following, delayed, keeps)
    if not keeps and not spec.post_norm and are_few(tokens):
        decode(x, weight, bias, following, h, new, y, coef, out, delayed)
        return results
    layout = reading.buffer_layout(tokens, width, x.dtype, following)
    logits, stats, prepared, sums = split_buffer(make_buffer(layout, x) if buffer is None else buffer, layout)
    reading.prepare(weight, prepared, sums, width, following)
    if tokens:
        whole, one = tokens % 16 == 0, tokens == 1
        per_token = coef.shape[0] == tokens
        launcher = _launcher(spec, following, x.dtype, stored_streams, per_token, delayed, x.is_cuda, whole, one)
        launcher.launch((ceil_div(tokens, 16),), x, y, coef, out, prepared, sums, bias, logits, stats, h, tokens)
        reading.constrain(logits, new, following)
    return results


def _allocate_gradients(
    x: Tensor, y: Tensor, coef: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *others: object
) -> tuple[Tensor, ...]:
    pull = others[-1]
    return tuple(t.new_empty(t.shape) for t in (x if pull else out, y, coef, weight, bias))


@replayed
def _backward(
    x: Tensor,
    y: Tensor,
    coef: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    new: Tensor,
    buffer: Tensor,
    grad_h: Tensor | None,
    grad_link: Tensor | None,
    grad_out: Tensor | None,
    grad_new: Tensor | None,
    spec: Spec,
    following: Spec,
    delayed: bool,
    pull: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the streams (without `pull`: of H x + w ⊗ y), y, coefficients, weight and bias."""
    x, y = aligned(x), aligned(y)
    given = buffer, grad_h, grad_link, grad_new, following, in_place, delayed
    if (
        grad_h is not None
        and grad_link is not None
        and grad_out is None
        and not pull
        and coef.shape[0] == new.shape[0]
        and x.shape == out.shape
        and one_gradient_kernel_pays(spec, following, x.dtype)
    ):
        grad_y, grad_coef = torch.empty_like(y), torch.empty_like(coef)
        tensors = x, y, coef, aligned(grad_link), aligned(grad_h), new, grad_y, grad_coef
        differentiate = functools.partial(_differentiate_both, *tensors, following, delayed)
        grad_x, grad_weight, grad_bias = reading.differentiate_read(out, weight, bias, new, *given, differentiate)
    else:
        read_by = torch.cat([coef[:, : spec.n], new[:, spec.n :]], 1) if delayed else new
        grad, grad_weight, grad_bias = reading.differentiate_read(out, weight, bias, read_by, *given)
        if grad_out is not None:
            grad += grad_out
        written, grad_y, grad_coef = differentiate_write(x, y, coef, grad, spec, False, pull, overwrite=True)
        grad_x = grad if written is None else written
    assert grad_weight is not None
    if delayed and grad_h is not None:  # after the write's gradients, which set the read weights' to zero
        reading.differentiate_sum(out, aligned(grad_h), grad_coef, spec.coefficients, following)
    return grad_x, grad_y, grad_coef, grad_weight, grad_bias


write_read = Pass("write_read", _forward, _backward, _allocate, _allocate_gradients)
