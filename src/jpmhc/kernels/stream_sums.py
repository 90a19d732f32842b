"""Weighted sums of a token's streams: the read's sum, the write, and the derivatives of both.

In each kernel a program takes one token and holds its streams in registers, so that every tensor is moved once and a
sum over a stream costs no memory. The read is h = Σ r_j x_j. The write is z = H x + w ⊗ y, with a post-norm followed by
a weightless RMS norm of every stream; it may return the mean of the new streams instead of them.

N is the number of streams, M how many of them the tensor x holds: all, or one where they are equal. The write's
derivative returns the inner products of which the coefficients' gradients are made, the gradient of y, and with `pull`
that of the streams, Hᵀ grad z. Without `pull` it returns grad z, which the read's derivative multiplies by Hᵀ (see
steps.py).
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import BufferPart, Launcher, count_tokens, kernel, power_of_two
from jpmhc.kernels.spec import Spec

ROW_ELEMENTS = 16  # of one stream that a thread holds: enough loads in flight, few enough registers


def row_launch(spec: Spec, whole: bool = True) -> dict[str, int]:
    """Choose one token a program, and up to 512 numbers of a row a warp: sums over a short row never leave its warp.

    A longer row is shared out to several warps, if it is wanted as a whole.
    """
    width = power_of_two(spec.d)
    if not whole:
        width = min(width, 32 * ROW_ELEMENTS)
    return {"BT": 1, "BD": width, "num_warps": max(1, width // (32 * ROW_ELEMENTS))}


@triton.jit
def norm_factor(square, eps, OUTSIDE: tl.constexpr = False):
    """1 / sqrt(square + eps), or 1 / (sqrt(square) + eps); NaN where the square has overflowed and they are zero."""
    factor = 1.0 / (tl.sqrt(square) + eps) if OUTSIDE else tl.rsqrt(square + eps)
    return tl.where(square < float("inf"), factor, float("nan"))


@triton.jit
def load_streams(x, token, c, mask, M: tl.constexpr, D: tl.constexpr):
    """The columns c of the rows that each token holds, in float32."""
    streams = ()
    for j in tl.static_range(M):
        value = tl.load(x + token[:, None] * (M * D) + j * D + c[None, :], mask=mask, other=0.0)
        streams = streams + (value.to(tl.float32),)
    return streams


@triton.jit
def _coefficient(coef, token, inside, index, N: tl.constexpr, PER_TOKEN: tl.constexpr):
    return tl.load(coef + token * (PER_TOKEN * N * (N + 2)) + index, mask=inside, other=0.0)[:, None]


@triton.jit
def _backwards(BT: tl.constexpr):
    """This program's tokens, from the last to the first: the last are those that the pass before left in the cache."""
    return ((tl.num_programs(0) - 1 - tl.program_id(0)) * BT + tl.arange(0, BT)).to(tl.int64)


@kernel
def _combine(
    x,
    coef,
    h,
    T,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    token = _backwards(BT)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x, token, c, mask, M, D)
    total = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(N):
        total += _coefficient(coef, token, inside, j, N, PER_TOKEN) * streams[j % M]
    tl.store(h + token[:, None] * D + c[None, :], total.to(h.dtype.element_ty), mask=mask)


@functools.cache
def _combine_launcher(spec: Spec, dtype: torch.dtype, held: int, per_token: bool) -> Launcher:
    return Launcher(_combine, N=spec.n, M=held, D=spec.d, PER_TOKEN=int(per_token), **row_launch(spec))


def combine(x: Tensor, coef: Tensor, spec: Spec) -> Tensor:
    """Compute the sublayer's input, Σ_j r_j x_j. x: [..., n or 1, d] → [..., d]"""
    tokens = count_tokens(x, spec.d)
    h = x.new_empty((*x.shape[:-2], spec.d))
    if tokens:
        launcher = _combine_launcher(spec, x.dtype, x.shape[-2], coef.shape[0] == tokens)
        launcher.launch((tokens,), x, coef, h, tokens)
    return h


@triton.jit
def _side_by_side(values):
    """2^k tensors as one with k more dimensions."""
    if len(values) == 1:
        return values[0]
    else:
        return tl.join(_side_by_side(values[0::2]), _side_by_side(values[1::2]))


@triton.jit
def _inner_products(g, streams, BT: tl.constexpr, N: tl.constexpr):
    """⟨g, x_j⟩ of all N streams, in one reduction: each costs a barrier where a row has several warps. [tokens, N]"""
    products = ()
    for m in tl.static_range(len(streams)):
        products = products + (g * streams[m],)
    sums = tl.sum(_side_by_side(products), axis=1)
    return tl.broadcast_to(tl.reshape(sums, [BT, len(streams)]), [BT, N])


@kernel
def _combine_backward(
    x,
    grad_h,
    grad_read,
    T,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    token = _backwards(BT)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x, token, c, mask, M, D)
    gh = tl.load(grad_h + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    place = grad_read + token[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(place, _inner_products(gh, streams, BT, N), mask=inside[:, None])


@functools.cache
def _combine_backward_launcher(spec: Spec, dtype: torch.dtype, held: int) -> Launcher:
    return Launcher(_combine_backward, N=spec.n, M=held, D=spec.d, **row_launch(spec))


def combine_backward(x: Tensor, grad_h: Tensor, grad_read: BufferPart | Tensor, tokens: int, spec: Spec) -> None:
    """Fill in the gradient of the read weights [T, n]: grad h's inner products with the streams."""
    if tokens:
        _combine_backward_launcher(spec, x.dtype, x.shape[-2]).launch((tokens,), x, grad_h, grad_read, tokens)


@triton.jit
def replaced(values, index: tl.constexpr, value):
    """The tuple with one entry changed."""
    new = ()
    for i in tl.static_range(len(values)):
        new = new + (value if i == index else values[i],)
    return new


@triton.jit
def mixed(streams, y, mixing, i, N: tl.constexpr):
    """Stream i of H x + w ⊗ y, with w and H by rows in `mixing`. [tokens, d]"""
    z = mixing[i] * y
    for j in tl.static_range(N):
        z += mixing[N + i * N + j] * streams[j % len(streams)]
    return z


@triton.jit
def mixing_entries(coef, token, inside, N: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Each token's w, then its H by rows. [tokens, 1] each"""
    entries = ()
    for entry in tl.static_range(N, N * (N + 2)):
        entries = entries + (_coefficient(coef, token, inside, entry, N, PER_TOKEN),)
    return entries


@kernel
def _write(
    x,
    y,
    coef,
    out,
    T,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    POST_NORM: tl.constexpr,
    MEAN: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x, token, c, mask, M, D)
    yv = tl.load(y + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    mixing = mixing_entries(coef, token, inside, N, PER_TOKEN)
    total = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(N):
        z = mixed(streams, yv, mixing, i, N)
        if POST_NORM:
            z *= norm_factor(tl.sum(z * z, axis=1) / D, EPS)[:, None]
        if MEAN:
            total += z
        else:
            tl.store(out + token[:, None] * (N * D) + i * D + c[None, :], z.to(out.dtype.element_ty), mask=mask)
    if MEAN:
        tl.store(out + token[:, None] * D + c[None, :], (total / N).to(out.dtype.element_ty), mask=mask)


@functools.cache
def _write_launcher(spec: Spec, dtype: torch.dtype, held: int, per_token: bool, mean: bool) -> Launcher:
    constants = {"N": spec.n, "M": held, "D": spec.d, "PER_TOKEN": int(per_token)}
    return Launcher(_write, **constants, POST_NORM=spec.post_norm, MEAN=mean, EPS=spec.eps, **row_launch(spec))


def write(x: Tensor, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Write to the streams. x: [..., n or 1, d]; y: [..., d]; coef: [T or 1, n(n+2)] → [..., n, d], or the mean."""
    tokens = count_tokens(x, spec.d)
    out = x.new_empty(y.shape if mean else (*y.shape[:-1], spec.n, spec.d))
    if tokens:
        launcher = _write_launcher(spec, x.dtype, x.shape[-2], coef.shape[0] == tokens, mean)
        launcher.launch((tokens,), x, y, coef, out, tokens)
    return out


@kernel
def _write_backward(
    grad,
    x,
    y,
    coef,
    grad_x,
    grad_y,
    grad_coef,
    T,
    N: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    POST_NORM: tl.constexpr,
    PULL: tl.constexpr,
    EPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Slice by slice of a row, if it is longer than BD; a post-norm needs the whole row. `grad` holds G of the N rows:
    all, or one if it is the gradient of the mean.
    """
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    mixing = mixing_entries(coef, token, inside, N, PER_TOKEN)
    along_y = ()
    along_x = ()
    for _ in tl.static_range(N):
        along_y = along_y + (tl.zeros([BT], tl.float32),)
        along_x = along_x + (tl.zeros([BT, N], tl.float32),)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        streams = load_streams(x, token, c, mask, M, D)
        yv = tl.load(y + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        gy = tl.zeros([BT, BD], tl.float32)
        if not POST_NORM:  # all loads in flight at once; a post-norm needs the registers
            loaded = load_streams(grad, token, c, mask, G, D)
        grads = ()
        for i in tl.static_range(N):
            if POST_NORM:
                place = grad + token[:, None] * (G * D) + (i % G) * D + c[None, :]
                g = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            else:
                g = loaded[i % G]
            g *= G / N
            if POST_NORM:
                # out = z/ρ with ρ = sqrt(mean z² + eps): grad z = (g - out · mean(g · out)) / ρ
                z = mixed(streams, yv, mixing, i, N)
                square, along = tl.split(tl.sum(tl.join(z * z, z * g), axis=1) / D)
                factor = norm_factor(square, EPS)
                g = factor[:, None] * (g - z * (along * factor * factor)[:, None])
            if (POST_NORM or G < N) and not PULL:
                place = grad_x + token[:, None] * (N * D) + i * D + c[None, :]
                tl.store(place, g.to(grad_x.dtype.element_ty), mask=mask)
            gy += mixing[i] * g
            along_y = replaced(along_y, i, along_y[i] + tl.sum(g * yv, axis=1))
            along_x = replaced(along_x, i, along_x[i] + _inner_products(g, streams, BT, N))
            if PULL:
                grads = grads + (g,)
        tl.store(grad_y + token[:, None] * D + c[None, :], gy.to(grad_y.dtype.element_ty), mask=mask)
        if PULL:
            for m in tl.static_range(M):
                gx = tl.zeros([BT, BD], tl.float32)
                for j in tl.static_range(m, N, M):
                    for i in tl.static_range(N):
                        gx += mixing[N + i * N + j] * grads[i]
                place = grad_x + token[:, None] * (M * D) + m * D + c[None, :]
                tl.store(place, gx.to(grad_x.dtype.element_ty), mask=mask)
    base = grad_coef + token * (N * (N + 2))
    for i in tl.static_range(N):
        tl.store(base + i, tl.zeros([BT], tl.float32), mask=inside)
        tl.store(base + N + i, along_y[i], mask=inside)
        place = base[:, None] + (2 + i) * N + tl.arange(0, N)[None, :]
        tl.store(place, along_x[i], mask=inside[:, None])


@functools.cache
def _write_backward_launcher(
    spec: Spec, dtype: torch.dtype, held: int, graded: int, per_token: bool, pull: bool
) -> Launcher:
    constants = {"N": spec.n, "M": held, "G": graded, "D": spec.d, "PER_TOKEN": int(per_token), "PULL": pull}
    launch = row_launch(spec, whole=spec.post_norm)
    if spec.n <= 4 and not spec.post_norm and not pull:
        # Short slices, and as many programs side by side as fit: 3 to 13 % faster at all widths (docs/LOG.md).
        launch["BD"] = min(launch["BD"], 256)
        launch["maxnreg"] = 128 if spec.d > 512 else 112
    return Launcher(_write_backward, **constants, POST_NORM=spec.post_norm, EPS=spec.eps, **launch)


def write_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    coef: Tensor,
    spec: Spec,
    mean: bool,
    pull: bool,
    room: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Compute the gradients of the streams, of y and of the coefficients.

    Without `pull` the first is the gradient of z = H x + w ⊗ y, which the read's derivative multiplies by Hᵀ; it is
    None where that is `grad` itself. It is written to `room` if there is such a tensor, which may be `grad`.
    """
    tokens = count_tokens(x, spec.d)
    grad_x = gradient_room(x, spec, mean, pull) if room is None else room
    grad_y = torch.empty_like(y)
    grad_coef = coef.new_empty(tokens, spec.coefficients)
    per_token = coef.shape[0] == tokens
    if tokens:
        launcher = _write_backward_launcher(spec, x.dtype, x.shape[-2], 1 if mean else spec.n, per_token, pull)
        launcher.launch((tokens,), grad, x, y, coef, grad_x, grad_y, grad_coef, tokens)
    return grad_x, grad_y, grad_coef if per_token else grad_coef.sum(0, keepdim=True)


def gradient_room(x: Tensor, spec: Spec, mean: bool, pull: bool) -> Tensor | None:
    """Make room for the first thing that `write_backward` returns, if it needs any."""
    if pull:
        return torch.empty_like(x)
    # Without a norm and a mean, the gradient of z is that of what `write` returned.
    return x.new_empty((*x.shape[:-2], spec.n, spec.d)) if spec.post_norm or mean else None
