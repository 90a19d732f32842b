"""The write of one connection fused with the read of the next: one kernel between two sublayers.

A program takes its tokens' streams slice by slice: it mixes them, stores them and multiplies them by the next
connection's weight, which gives the statistics, the logits and the read weights. Then it goes back over the slices, the
last one first, because that is still in the cache, and sums them up to the next sublayer's input. A post-norm's factors
are known only after the first pass: then it is the second one that mixes the slices again, norms and stores them, and
the projection, being linear, is multiplied by the factors afterwards.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,misc,var-annotated"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import (
    SHARED_BYTES,
    Launcher,
    ceil_div,
    count_tokens,
    make_buffer,
    padded,
    split_buffer,
    stages,
)
from jpmhc.kernels.projection import (
    centre_moments,
    constrain,
    kept_layout,
    load_read_weights,
    precision,
    prepare,
    store_logits,
)
from jpmhc.kernels.spec import Spec
from jpmhc.kernels.stream_sums import load_streams, mixed, mixing_entries, norm_factor, replaced


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


@triton.jit  # compiled anew where T is no multiple of 16: whole tiles need 45 registers less
def _write_to_read(
    x,
    y,
    old,
    out,
    w,
    sums,
    bias,
    logits,
    stats,
    h,
    T,
    OLD_PER_TOKEN: tl.constexpr,
    POST_NORM: tl.constexpr,
    OLD_EPS: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
    BACK: tl.constexpr,
    BACK_STAGES: tl.constexpr,
    M: tl.constexpr,
    S: tl.constexpr,
):
    """S is the connection that begins."""
    N: tl.constexpr = S.n
    D: tl.constexpr = S.d
    ND: tl.constexpr = N * D
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    k = tl.arange(0, KP)
    mixing = mixing_entries(old, token, inside, N, OLD_PER_TOKEN)
    products = ()  # with a post-norm each stream has its own sums, as its factor comes only after them
    squares = ()
    for _ in tl.static_range(N if POST_NORM else 1):
        products = products + (tl.zeros([BT, KP], tl.float32),)
        squares = squares + (tl.zeros([BT], tl.float32),)
    near = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    for start in tl.range(0, D, BD, num_stages=STAGES):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        yv = tl.load(y + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        streams = load_streams(x, token, c, mask, M, D)
        for i in tl.static_range(N):
            rounded = _opaque(mixed(streams, yv, mixing, i, N).to(out.dtype.element_ty), COMPILED)
            if not POST_NORM:
                tl.store(out + token[:, None] * ND + i * D + c[None, :], rounded, mask=mask)
            wv = tl.load(w + k[None, :] * ND + i * D + c[:, None], mask=(c < D)[:, None], other=0.0)
            z = rounded.to(tl.float32)
            product = tl.dot(rounded, wv, products[i * POST_NORM], input_precision=PRECISION)
            products = replaced(products, i * POST_NORM, product)
            if S.norm == "layer":
                if i == 0:  # the mean of the first tile is near enough to that of all
                    near = tl.where(start == 0, tl.sum(z, axis=1) / min(BD, D), near)
                z -= near[:, None]
                if D % BD != 0:
                    z = tl.where((c < D)[None, :], z, 0.0)
            if POST_NORM:
                squares = replaced(squares, i, squares[i] + tl.sum(z * z, axis=1))
            elif i == 0:
                line = z
                squared = z * z
            else:
                line += z
                squared += z * z
        if not POST_NORM:  # one reduction for all streams
            if S.norm == "layer":
                total += tl.sum(line, axis=1)
            squares = replaced(squares, 0, squares[0] + tl.sum(squared, axis=1))
    mean = tl.zeros([BT], tl.float32)
    factors = ()
    if POST_NORM:
        acc = tl.zeros([BT, KP], tl.float32)
        square = tl.zeros([BT], tl.float32)
        for i in tl.static_range(N):
            factor = norm_factor(squares[i] / D, OLD_EPS)
            factors = factors + (factor[:, None],)
            acc += products[i] * factor[:, None]
            square += squares[i] * factor * factor
    else:
        acc = products[0]
        square = squares[0]
        if S.norm == "layer":
            mean, square = centre_moments(near, total, square, ND)
    store_logits(acc, mean, square, sums, bias, logits, stats, token, inside, ND, KP, S)
    tl.debug_barrier()  # what was stored is read back in another layout
    r = load_read_weights(logits, token, inside, S)
    weights = ()
    for i in tl.static_range(N):
        weights = weights + (tl.sum(tl.where(tl.arange(0, N)[None, :] == i, r, 0.0), axis=1)[:, None],)
    for step in tl.range(0, tl.cdiv(D, BACK), num_stages=BACK_STAGES):
        c = (tl.cdiv(D, BACK) - 1 - step) * BACK + tl.arange(0, BACK)
        mask = inside[:, None] & (c < D)[None, :]
        hv = tl.zeros([BT, BACK], tl.float32)
        if POST_NORM:
            yv = tl.load(y + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            streams = load_streams(x, token, c, mask, M, D)
        for i in tl.static_range(N):
            place = out + token[:, None] * ND + i * D + c[None, :]
            if POST_NORM:
                z = (mixed(streams, yv, mixing, i, N) * factors[i]).to(out.dtype.element_ty)
                tl.store(place, z, mask=mask)
            else:
                z = tl.load(place, mask=mask, other=0.0)
            hv += weights[i] * z.to(tl.float32)
        tl.store(h + token[:, None] * D + c[None, :], hv.to(h.dtype.element_ty), mask=mask)


def one_kernel_pays(spec: Spec, following: Spec) -> bool:
    """Say whether one kernel is no slower than two: it keeps the weights of a slice of n streams for every logit, and
    with a post-norm n sums of each. With a post-norm it has no layer norm, which would need still more of them.
    """
    size = spec.n * padded(following.logits)
    return size <= 64 and following.norm != "layer" if spec.post_norm else size <= 256


@functools.cache
def _launcher(
    spec: Spec, following: Spec, dtype: torch.dtype, held: int, per_token: bool, compiled: bool, whole: bool, one: bool
) -> Launcher:
    """`whole`, `one`: whether the number of tokens is a multiple of 16, or one; the kernel is compiled for that too."""
    kp, size = padded(following.logits), dtype.itemsize
    width = 64
    while width > 16 and (width >= 2 * spec.d or spec.n * kp * width * size > SHARED_BYTES // 4):
        width //= 2
    depth = stages((16 * (held + 1) + spec.n * kp) * width * size, 3)
    # The way back only adds up, in wide slices and without a pipeline, unless it has to mix again.
    back = (width, depth) if spec.post_norm else (2 * width, 1)
    old = {"OLD_PER_TOKEN": int(per_token), "POST_NORM": int(spec.post_norm), "OLD_EPS": spec.eps}
    blocks = {"BT": 16, "BD": width, "STAGES": depth, "BACK": back[0], "BACK_STAGES": back[1], "num_warps": 2}
    new = {"KP": kp, "PRECISION": precision(dtype), "COMPILED": compiled, "M": held, "S": following}
    return Launcher(_write_to_read, **old, **new, **blocks)


def write_to_read(
    x: Tensor, y: Tensor, old: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Write to the streams of one connection and read them for the next.

    Returns:
        The new streams [..., n, d], the next sublayer's input [..., d], and for `following` what `project_streams`
        returns.
    """
    tokens, held, width = count_tokens(x, spec.d), x.shape[-2], spec.n * spec.d
    layout = kept_layout(tokens, width, x.dtype, following)
    out, h = x.new_empty((*y.shape[:-1], spec.n, spec.d)), torch.empty_like(y)
    coef, kept = bias.new_empty(tokens, following.coefficients), make_buffer(layout, x)
    logits, stats, prepared, sums = split_buffer(kept, layout)
    prepare(weight, prepared, sums, width, following)
    if tokens:
        whole, one = tokens % 16 == 0, tokens == 1
        launcher = _launcher(spec, following, x.dtype, held, old.shape[0] == tokens, x.is_cuda, whole, one)
        launcher.launch((ceil_div(tokens, 16),), x, y, old, out, prepared, sums, bias, logits, stats, h, tokens)
        constrain(logits, coef, following)
    return out, h, coef, kept
