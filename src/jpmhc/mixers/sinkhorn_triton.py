"""Sinkhorn–Knopp for the fused kernels; `TritonForm` describes the arguments m, h, grad and F."""

import triton
import triton.language as tl

from jpmhc.mixers.triton_matrices import entries_by_rows


@triton.jit
def entries(F: tl.constexpr):
    """Return the index of each entry's logit, counted column by column if transposed, and the sign +1. [n, n] each"""
    if F.constants.transposed:
        i = tl.arange(0, F.rows)[:, None]
        j = tl.arange(0, F.columns)[None, :]
        return j * F.rows + i, (i + j >= 0).to(tl.float32)
    else:
        return entries_by_rows(F)


@triton.jit
def _clamp_logits(m, F: tl.constexpr):
    """Return the logits m, clamped to the mixer's bound if it has one. [tokens, n, n]"""
    if F.constants.clamp is None:
        return m
    else:
        return tl.clamp(m, -F.constants.clamp, F.constants.clamp, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _drop_clamped(m, grad, F: tl.constexpr):
    """Turn the gradient of the clamped logits into the gradient of the logits m: zero where the clamp acted."""
    if F.constants.clamp is None:
        return grad
    else:
        return tl.where((m < -F.constants.clamp) | (m > F.constants.clamp), 0.0, grad)


@triton.jit
def _scale_alternately(m, F: tl.constexpr):
    """Return H: the rows and columns of exp(clamp(m)) are scaled alternately to sums of one (Alg. sinkhorn-forward).

    With |logits| ≤ 10 every factor stays inside e^±40, so the paper's logarithms are not needed. With a tolerance, a
    matrix is frozen once its sums over the axis FIRST differ from one by at most the tolerance. Every iteration ends
    with exact sums over the axis SECOND.
    """
    ITERATIONS: tl.constexpr = F.constants.iterations
    FIRST: tl.constexpr = F.constants.first
    SECOND: tl.constexpr = F.constants.second
    x = _clamp_logits(m, F)
    kernel = tl.exp(x - tl.max(x, axis=FIRST, keep_dims=True))
    after = tl.max(x, axis=SECOND, keep_dims=True) * 0.0 + 1.0
    for step in tl.static_range(ITERATIONS):
        if F.constants.tolerance is None or step == 0:
            before = 1.0 / tl.sum(kernel * after, axis=FIRST, keep_dims=True)
            after = 1.0 / tl.sum(kernel * before, axis=SECOND, keep_dims=True)
        else:
            sums = tl.sum(kernel * after, axis=FIRST, keep_dims=True)
            converged = tl.max(tl.abs(before * sums - 1.0), axis=SECOND, keep_dims=True) <= F.constants.tolerance
            new = 1.0 / sums
            after = tl.where(converged, after, 1.0 / tl.sum(kernel * new, axis=SECOND, keep_dims=True))
            before = tl.where(converged, before, new)
    return kernel * before * after


@triton.jit
def _softmax_first(m, F: tl.constexpr):
    """Return the softmax of the clamped logits m over the axis that is normalised first. [tokens, n, n]"""
    FIRST: tl.constexpr = F.constants.first
    x = _clamp_logits(m, F)
    e = tl.exp(x - tl.max(x, axis=FIRST, keep_dims=True))
    return e / tl.sum(e, axis=FIRST, keep_dims=True)


@triton.jit
def _iterate(m, F: tl.constexpr):
    """Return H after the settings' number of iterations, with `eps` added as in DeepSeek-V4. [tokens, n, n]"""
    ITERATIONS: tl.constexpr = F.constants.iterations
    EPS: tl.constexpr = F.constants.eps
    FIRST: tl.constexpr = F.constants.first
    SECOND: tl.constexpr = F.constants.second
    h = _softmax_first(m, F) + EPS
    for step in tl.static_range(ITERATIONS):
        if step > 0:
            h = h / (tl.sum(h, axis=FIRST, keep_dims=True) + EPS)
        h = h / (tl.sum(h, axis=SECOND, keep_dims=True) + EPS)
    return h


@triton.jit
def _iterate_derivative(m, h, grad, F: tl.constexpr):
    r"""Turn the gradient of H into the logits' gradient, through the scalings of `_iterate`, which are computed again.

    For a normalisation C' = C / (s + eps) with sums s, a gradient G of C' becomes (G - Σ G ⊙ C') / (s + eps).
    """
    ITERATIONS: tl.constexpr = F.constants.iterations
    EPS: tl.constexpr = F.constants.eps
    FIRST: tl.constexpr = F.constants.first
    SECOND: tl.constexpr = F.constants.second
    p = _softmax_first(m, F)
    kernel = p + EPS
    befores = (tl.max(p, axis=FIRST, keep_dims=True) * 0.0 + 1.0,)
    afters = (tl.max(p, axis=SECOND, keep_dims=True) * 0.0 + 1.0,)
    for step in tl.static_range(ITERATIONS):
        before = befores[step]
        after = afters[step]
        if step > 0:
            before = before / (before * tl.sum(kernel * after, axis=FIRST, keep_dims=True) + EPS)
        after = after / (after * tl.sum(kernel * before, axis=SECOND, keep_dims=True) + EPS)
        befores = befores + (before,)
        afters = afters + (after,)
    for back in tl.static_range(ITERATIONS):
        before = befores[ITERATIONS - back]
        after = afters[ITERATIONS - back]
        previous = afters[ITERATIONS - 1 - back]
        c = kernel * before * after
        grad = (grad - tl.sum(grad * c, axis=SECOND, keep_dims=True)) * (after / previous)
        if back < ITERATIONS - 1:
            c = kernel * before * previous
            factor = before / befores[ITERATIONS - 1 - back]
            grad = (grad - tl.sum(grad * c, axis=FIRST, keep_dims=True)) * factor
    return _drop_clamped(m, p * (grad - tl.sum(p * grad, axis=FIRST, keep_dims=True)), F)


@triton.jit
def _gauss_seidel_derivative(m, h, grad, F: tl.constexpr):
    r"""Return the logits' gradient $P \odot (G - u 1^\top - 1 v^\top)$ (eq. implicit-grad); P is h, and G is grad.

    One iteration is $u = (P \odot G) 1 - P v$, then $v = (P \odot G)^\top 1 - P^\top u$ (Alg. sinkhorn-implicit-bwd).
    """
    STEPS: tl.constexpr = F.constants.steps
    FIRST: tl.constexpr = F.constants.first
    SECOND: tl.constexpr = F.constants.second
    weighted = h * grad
    along_first = tl.sum(weighted, axis=FIRST, keep_dims=True)
    along_second = tl.sum(weighted, axis=SECOND, keep_dims=True)
    v = along_second * 0.0
    for _ in tl.static_range(STEPS):
        u = along_first - tl.sum(h * v, axis=FIRST, keep_dims=True)
        v = along_second - tl.sum(h * u, axis=SECOND, keep_dims=True)
    return _drop_clamped(m, weighted - h * u - h * v, F)


@triton.jit
def _direct_derivative(m, h, grad, F: tl.constexpr):
    r"""Return the logits' gradient $P \odot (G - u 1^\top - 1 v^\top)$ (eq. implicit-grad) exactly; P is h, G is grad.

    Eliminating v leaves a linear system for u with the Laplacian of a graph, whose weights are P diag(1/c) Pᵀ with the
    column sums c. The graph's nodes are eliminated one by one without subtractions, so that nothing cancels when P is
    near a permutation.
    """
    N: tl.constexpr = F.streams
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    node = tl.arange(0, N)[None, :]
    q = h / tl.sum(h, axis=1)[:, None, :]
    mean = tl.sum(q * grad, axis=1)[:, None, :]  # weighted mean of each column of G
    centred = grad - mean
    right = tl.sum(h * centred, axis=2)  # [tokens, n]
    weights = tl.sum(q[:, :, None, :] * h[:, None, :, :], axis=3)
    links = ()
    loads = ()
    for k in tl.static_range(N - 1):
        row = tl.sum(tl.where((i == k) & (j > k), weights, 0.0), axis=1)  # [tokens, n]
        degree = tl.sum(row, axis=1)[:, None]
        link = tl.where(degree > 0.0, row / tl.where(degree > 0.0, degree, 1.0), 0.0)
        load = tl.sum(tl.where(node == k, right, 0.0), axis=1)[:, None]
        right += link * load
        weights += row[:, :, None] * link[:, None, :]
        links = links + (link,)
        loads = loads + (tl.where(degree > 0.0, load / tl.where(degree > 0.0, degree, 1.0), 0.0),)
    u = right * 0.0
    for step in tl.static_range(N - 1):
        value = loads[N - 2 - step] + tl.sum(links[N - 2 - step] * u, axis=1)[:, None]
        u = tl.where(node == N - 2 - step, value, u)
    across = tl.sum(q * u[:, :, None], axis=1)[:, None, :]
    return _drop_clamped(m, h * (centred - (u[:, :, None] - across)), F)


@triton.jit
def mix(m, F: tl.constexpr):
    """Return H, the Sinkhorn matrix of the logits m. [tokens, n, n]"""
    if F.constants.gradient == "unrolled":
        return _iterate(m, F)
    else:
        return _scale_alternately(m, F)


@triton.jit
def derivative(m, h, grad, F: tl.constexpr):
    """Turn the gradient of H into the gradient of the logits m, by the mixer's kind of gradient."""
    if F.constants.gradient == "unrolled":
        return _iterate_derivative(m, h, grad, F)
    elif F.constants.gradient == "direct":
        return _direct_derivative(m, h, grad, F)
    else:
        return _gauss_seidel_derivative(m, h, grad, F)
