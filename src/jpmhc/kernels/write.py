r"""The pass of the write: $z_i = \sum_j H_{ij} x_j + w_i y$. A post-norm divides $z_i$ by $\sqrt{\mathrm{mean}\,z_i^2 +
\epsilon}$.

z are the new streams before the post-norm, x the old streams, y the sublayer's output, w the write weights, and H the
skip matrix.

In each kernel one program handles one token and keeps its streams in registers, so that every tensor is moved once and
a sum over a stream needs no memory. Names end in shapes, see device.py; G is the number of a gradient's rows: N, or one
for the gradient of the mean over the streams.

A connection reads and writes the same streams, and the streams' gradient has a term from each. With autograd alone, the
write's derivative would store its term Hᵀ grad z, the read's derivative would store its own term, and a third kernel
would add the terms. So the read also returns a *link*: a tensor with the shape of n streams and with memory for one
number. The write takes the link as an input, and its derivative returns grad z, the gradient of H x + w ⊗ y, as the
link's gradient. The read's derivative multiplies grad z by Hᵀ in the kernel that computes everything else. Without a
link (`pull`), the write's derivative multiplies grad z by Hᵀ.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.device import inner_products, load_mixing, load_streams, mix_stream, norm_factor, replaced
from jpmhc.kernels.launch import Launcher, aligned, count_tokens, kernel, row_launch
from jpmhc.kernels.passes import Pass
from jpmhc.kernels.replay import replayed
from jpmhc.kernels.spec import Spec


# z_i = Σ_j H_ij x_j + w_i y; out_i = z_i or z_i / sqrt(mean z_i² + eps); with MEAN, out = Σ_i out_i / n
@kernel
def _write(
    x_TMD, y_TD, coef_TC, out_TND, T,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, PER_TOKEN: tl.constexpr, POST_NORM: tl.constexpr,
    MEAN: tl.constexpr, EPS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    c = tl.arange(0, BD)
    mask = inside[:, None] & (c < D)[None, :]
    streams = load_streams(x_TMD, token, c, mask, M, D)
    y = tl.load(y_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
    mixing = load_mixing(coef_TC, token, inside, N, PER_TOKEN)
    total_TD = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(N):
        z_TD = mix_stream(streams, y, mixing, i, N)
        if POST_NORM:
            z_TD *= norm_factor(tl.sum(z_TD * z_TD, axis=1) / D, EPS)[:, None]
        if MEAN:
            total_TD += z_TD
        else:
            address = out_TND + token[:, None] * (N * D) + i * D + c[None, :]
            tl.store(address, z_TD.to(out_TND.dtype.element_ty), mask=mask)
    if MEAN:
        address = out_TND + token[:, None] * D + c[None, :]
        tl.store(address, (total_TD / N).to(out_TND.dtype.element_ty), mask=mask)


@functools.cache
def _write_launcher(spec: Spec, dtype: torch.dtype, stored_streams: int, per_token: bool, mean: bool) -> Launcher:
    constants = {"N": spec.n, "M": stored_streams, "D": spec.d, "PER_TOKEN": int(per_token)}
    return Launcher(_write, **constants, POST_NORM=spec.post_norm, MEAN=mean, EPS=spec.eps, **row_launch(spec))


# grad w_i = ⟨grad z_i, y⟩, grad H_ij = ⟨grad z_i, x_j⟩, grad y = Σ_i w_i grad z_i; PULL: grad x_j = Σ_i H_ij grad z_i
@kernel
def _write_backward(
    grad_TGD, x_TMD, y_TD, coef_TC, grad_x_TMD, grad_y_TD, grad_coef_TC, T,
    N: tl.constexpr, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PER_TOKEN: tl.constexpr,
    POST_NORM: tl.constexpr, PULL: tl.constexpr, EPS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store the gradients of y, the coefficients and, with PULL, the streams x; without PULL `grad_x` gets grad z.

    A row longer than BD is processed in slices; a post-norm needs the whole row in one slice.
    """
    token = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    inside = token < T
    mixing = load_mixing(coef_TC, token, inside, N, PER_TOKEN)
    along_y = ()
    along_x = ()
    for _ in tl.static_range(N):
        along_y = along_y + (tl.zeros([BT], tl.float32),)
        along_x = along_x + (tl.zeros([BT, N], tl.float32),)
    for start in tl.range(0, D, BD):
        c = start + tl.arange(0, BD)
        mask = inside[:, None] & (c < D)[None, :]
        streams = load_streams(x_TMD, token, c, mask, M, D)
        y = tl.load(y_TD + token[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        gy_TD = tl.zeros([BT, BD], tl.float32)
        if not POST_NORM:  # all loads in flight at once; a post-norm needs the registers
            loaded = load_streams(grad_TGD, token, c, mask, G, D)
        grads = ()
        for i in tl.static_range(N):
            if POST_NORM:
                address = grad_TGD + token[:, None] * (G * D) + (i % G) * D + c[None, :]
                g_TD = tl.load(address, mask=mask, other=0.0).to(tl.float32)
            else:
                g_TD = loaded[i % G]
            g_TD *= G / N
            if POST_NORM:
                # out = z/ρ with ρ = sqrt(mean z² + eps): grad z = (g - out · mean(g · out)) / ρ
                z_TD = mix_stream(streams, y, mixing, i, N)
                square_T, along_T = tl.split(tl.sum(tl.join(z_TD * z_TD, z_TD * g_TD), axis=1) / D)
                factor_T = norm_factor(square_T, EPS)
                g_TD = factor_T[:, None] * (g_TD - z_TD * (along_T * factor_T * factor_T)[:, None])
            if (POST_NORM or G < N) and not PULL:
                address = grad_x_TMD + token[:, None] * (N * D) + i * D + c[None, :]
                tl.store(address, g_TD.to(grad_x_TMD.dtype.element_ty), mask=mask)
            gy_TD += mixing[i] * g_TD
            along_y = replaced(along_y, i, along_y[i] + tl.sum(g_TD * y, axis=1))
            along_x = replaced(along_x, i, along_x[i] + inner_products(g_TD, streams, BT, N))
            if PULL:
                grads = grads + (g_TD,)
        tl.store(grad_y_TD + token[:, None] * D + c[None, :], gy_TD.to(grad_y_TD.dtype.element_ty), mask=mask)
        if PULL:
            for m in tl.static_range(M):
                gx_TD = tl.zeros([BT, BD], tl.float32)
                for j in tl.static_range(m, N, M):
                    for i in tl.static_range(N):
                        gx_TD += mixing[N + i * N + j] * grads[i]
                address = grad_x_TMD + token[:, None] * (M * D) + m * D + c[None, :]
                tl.store(address, gx_TD.to(grad_x_TMD.dtype.element_ty), mask=mask)
    base = grad_coef_TC + token * (N * (N + 2))
    for i in tl.static_range(N):
        tl.store(base + i, tl.zeros([BT], tl.float32), mask=inside)
        tl.store(base + N + i, along_y[i], mask=inside)
        address = base[:, None] + (2 + i) * N + tl.arange(0, N)[None, :]
        tl.store(address, along_x[i], mask=inside[:, None])


@functools.cache
def _write_backward_launcher(
    spec: Spec, dtype: torch.dtype, stored_streams: int, graded: int, per_token: bool, pull: bool
) -> Launcher:
    constants = {"N": spec.n, "M": stored_streams, "G": graded, "D": spec.d, "PER_TOKEN": int(per_token), "PULL": pull}
    launch = row_launch(spec, whole=spec.post_norm)
    if spec.n <= 4 and not spec.post_norm and not pull:
        # Short slices, and as many programs side by side as fit: 3 to 13 % faster at all widths (docs/LOG.md).
        launch["BD"] = min(launch["BD"], 256)
        launch["maxnreg"] = 128 if spec.d > 512 else 112
    return Launcher(_write_backward, **constants, POST_NORM=spec.post_norm, EPS=spec.eps, **launch)


def _allocate(x: Tensor, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    return x.new_empty(y.shape if mean else (*y.shape[:-1], spec.n, spec.d))


@replayed
def _forward(x: Tensor, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Return the new streams [..., n, d], or their mean [..., d]. x: [..., n or 1, d]; coef: [T or 1, C]"""
    x, y = aligned(x), aligned(y)
    tokens, out = count_tokens(x, spec.d), _allocate(x, y, coef, spec, mean)
    if tokens:
        launcher = _write_launcher(spec, x.dtype, x.shape[-2], coef.shape[0] == tokens, mean)
        launcher.launch((tokens,), x, y, coef, out, tokens)
    return out


def _allocate_gradients(
    x: Tensor, y: Tensor, coef: Tensor, grad_out: Tensor, spec: Spec, mean: bool, pull: bool, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    first = None  # without a post-norm and a mean, grad z is the gradient of the write's result
    if pull:
        first = x.new_empty(x.shape)
    elif spec.post_norm or mean:
        first = grad_out if overwrite else x.new_empty((*y.shape[:-1], spec.n, spec.d))
    return first, y.new_empty(y.shape), coef.new_empty(coef.shape)


def differentiate_write(
    x: Tensor, y: Tensor, coef: Tensor, grad_out: Tensor, spec: Spec, mean: bool, pull: bool, overwrite: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the streams, of y and of the coefficients.

    Without `pull` the first result is grad z, the gradient of z = H x + w ⊗ y, or None if grad z equals `grad_out`.
    If all tokens share one row of coefficients, their gradient is one row, too.

    Args:
        grad_out: The gradient of the write's result.
        mean: Whether the result is the mean of the new streams.
        pull: Whether the first result is the gradient of x instead of grad z.
        overwrite: Whether grad z may be stored in `grad_out`, which needs the shape of z.
    """
    x, y, grad = aligned(x), aligned(y), aligned(grad_out)
    grad_x, grad_y, grad_coef = _allocate_gradients(x, y, coef, grad, spec, mean, pull, overwrite)
    tokens = count_tokens(x, spec.d)
    per_token = coef.shape[0] == tokens
    if not per_token:
        grad_coef = coef.new_empty(tokens, spec.coefficients)
    if tokens:
        launcher = _write_backward_launcher(spec, x.dtype, x.shape[-2], 1 if mean else spec.n, per_token, pull)
        launcher.launch((tokens,), grad, x, y, coef, grad_x, grad_y, grad_coef, tokens)
    return grad_x, grad_y, grad_coef if per_token else grad_coef.sum(0, keepdim=True)


write = Pass("write", _forward, replayed(differentiate_write), _allocate, _allocate_gradients)
