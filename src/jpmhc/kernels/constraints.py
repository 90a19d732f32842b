r"""The constraints on a token's logits, and their derivatives, as Triton functions over [tokens, n, n] blocks.

Read and write logits arrive as full n × n matrices R and V whatever their kind: a kind with n logits repeats them along
the rows (read) or the columns (write), and then the same formula serves both. The mixer's logits arrive as the matrix M
that `mixer_entries` describes. See docs/derivations/kernels.md for the derivatives.
"""

# Triton's compiler knows no starred tuples, and mypy no tuples that grow in a loop.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

LOGIT_BOUND = tl.constexpr(10.0)  # Alg. sinkhorn-forward clamps the logits to ±10


@triton.jit
def product(a, b):
    """The matrix product of two [tokens, m, m] blocks."""
    return tl.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)


@triton.jit
def inverse(m, SIZE: tl.constexpr):
    """Gauss–Jordan without pivoting: for matrices whose symmetric part is positive definite. [tokens, size, size]"""
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    for k in tl.static_range(SIZE):
        row = tl.sum(tl.where(i == k, m, 0.0), axis=1)[:, None, :]
        column = tl.sum(tl.where(j == k, m, 0.0), axis=2)[:, :, None]
        pivot = 1.0 / tl.sum(tl.where(j == k, row, 0.0), axis=2)[:, :, None]
        m = tl.where((i == k) & (j == k), pivot, tl.where(i == k, row * pivot, m - column * row * pivot))
        m = tl.where((i != k) & (j == k), -column * pivot, m)
    return m


@triton.jit
def identity(N: tl.constexpr):
    """[1, n, n]"""
    i = tl.arange(0, N)
    return (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]


@triton.jit
def read_entries(READ: tl.constexpr, N: tl.constexpr):
    """Which logit is entry (i, j) of R. [n, n]"""
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    if READ == "softmax_matrix":
        return i * N + j
    else:
        return i * 0 + j


@triton.jit
def write_entries(WRITE: tl.constexpr, N: tl.constexpr, KR: tl.constexpr):
    """Which logit is entry (i, j) of V. [n, n]"""
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    if WRITE == "softmax_matrix":
        return KR + i * N + j
    else:
        return KR + i + j * 0


@triton.jit
def mixer_entries(
    MIXER: tl.constexpr,
    N: tl.constexpr,
    KR: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    MA: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    """Which logit is entry (i, j) of M, and its sign: 0 where M has no logit there. [ma, mb] each"""
    i = tl.arange(0, MA)[:, None]
    j = tl.arange(0, MB)[None, :]
    if MIXER == "identity":
        index = i + j
        sign = (i < 0).to(tl.float32) + (j < 0).to(tl.float32)
    elif MIXER == "cayley":
        low = tl.minimum(i, j)
        high = tl.maximum(i, j)
        # torch.triu_indices(n, n, 1) counts the strict upper triangle by rows.
        index = tl.where(i == j, 0, low * N - low * (low + 1) // 2 + high - low - 1)
        sign = (i < j).to(tl.float32) - (i > j).to(tl.float32)
    else:
        width = N
        if MIXER == "grassmann":
            width = RANK
        elif MIXER == "permutation":
            width = len(PERMUTATIONS)
        elif MIXER == "kronecker":
            width = (N >= 2) + (N >= 4) + (N >= 8)
        index = tl.where(j < width, i * width + j, 0)
        sign = (j < width).to(tl.float32) + (i < 0).to(tl.float32)
    return KR + KW + index, sign


@triton.jit
def read_probabilities(r_logits, READ: tl.constexpr, TAU: tl.constexpr):
    """softmax over the last axis, or the sigmoid, of R / tau. [tokens, n, n]"""
    z = r_logits / TAU
    if READ == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
        return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def write_probabilities(v_logits, WRITE: tl.constexpr, TAU: tl.constexpr):
    """softmax over the axis before the last, or the sigmoid, of V / tau. [tokens, n, n]"""
    z = v_logits / TAU
    if WRITE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        e = tl.exp(z - tl.max(z, axis=1)[:, None, :])
        return e / tl.sum(e, axis=1)[:, None, :]


@triton.jit
def read_weights(r_logits, READ: tl.constexpr, N: tl.constexpr, TAU: tl.constexpr):
    """r_j: the mean over the rows. [tokens, n]"""
    return tl.sum(read_probabilities(r_logits, READ, TAU), axis=1) / N


@triton.jit
def write_weights(v_logits, WRITE: tl.constexpr, N: tl.constexpr, TAU: tl.constexpr):
    """w_i: the sum over the columns, or twice the sigmoid. [tokens, n]"""
    total = tl.sum(write_probabilities(v_logits, WRITE, TAU), axis=2)
    if WRITE == "sigmoid":
        total = total * (2.0 / N)
    return total


@triton.jit
def read_derivative(r_logits, grad, READ: tl.constexpr, N: tl.constexpr, TAU: tl.constexpr):
    """The gradient of R from that of r. grad: [tokens, n] → [tokens, n, n]"""
    p = read_probabilities(r_logits, READ, TAU)
    g = grad[:, None, :] / (N * TAU)
    if READ == "sigmoid":
        return g * p * (1.0 - p)
    else:
        return p * (g - tl.sum(p * g, axis=2)[:, :, None])


@triton.jit
def write_derivative(v_logits, grad, WRITE: tl.constexpr, N: tl.constexpr, TAU: tl.constexpr):
    """The gradient of V from that of w. grad: [tokens, n] → [tokens, n, n]"""
    p = write_probabilities(v_logits, WRITE, TAU)
    g = grad[:, :, None] / TAU
    if WRITE == "sigmoid":
        return g * p * (1.0 - p) * (2.0 / N)
    else:
        return p * (g - tl.sum(p * g, axis=1)[:, None, :])


@triton.jit
def sinkhorn(logits, ITERATIONS: tl.constexpr):
    """Row-then-column normalisations of exp(clamp(logits)), kept as two scalings.

    With |logits| ≤ 10 every factor stays inside e^±40, so this is the log-space iteration without its logarithms.
    """
    x = tl.minimum(tl.maximum(logits, -LOGIT_BOUND), LOGIT_BOUND)
    kernel = tl.exp(x - tl.max(x, axis=2)[:, :, None])
    column = tl.max(x, axis=1) * 0.0 + 1.0
    for _ in tl.static_range(ITERATIONS):
        row = 1.0 / tl.sum(kernel * column[:, None, :], axis=2)
        column = 1.0 / tl.sum(kernel * row[:, :, None], axis=1)
    return kernel * row[:, :, None] * column[:, None, :]


@triton.jit
def sinkhorn_derivative(logits, p, grad, N: tl.constexpr):
    r"""eq. implicit-grad solved directly: $P \odot (G - u 1^\top - 1 v^\top)$, with P's true row and column sums.

    Eliminating v leaves the Laplacian of the graph with weights P diag(1/c) Pᵀ. Its nodes are eliminated one by one
    without a subtraction, so that a sharp P, a nearly disconnected graph, costs no accuracy.
    """
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    node = tl.arange(0, N)[None, :]
    q = p / tl.sum(p, axis=1)[:, None, :]
    mean = tl.sum(q * grad, axis=1)[:, None, :]  # of G down each column
    centred = grad - mean
    right = tl.sum(p * centred, axis=2)  # [tokens, n]
    weights = tl.sum(q[:, :, None, :] * p[:, None, :, :], axis=3)
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
    inside = (logits >= -LOGIT_BOUND) & (logits <= LOGIT_BOUND)
    return tl.where(inside, p * (centred - (u[:, :, None] - across)), 0.0)


@triton.jit
def cayley(skew, N: tl.constexpr, ITERATIONS: tl.constexpr):
    """eq. cayley-iter-main, or exactly (I + A/2)(I - A/2)⁻¹ = 2 (I - A/2)⁻¹ - I. skew: A"""
    if ITERATIONS < 0:
        return 2.0 * inverse(identity(N) - 0.5 * skew, N) - identity(N)
    else:
        y = identity(N) + skew
        for _ in tl.static_range(ITERATIONS):
            y = identity(N) + 0.5 * (skew + product(skew, y))
        return y


@triton.jit
def cayley_derivative(skew, mixer, grad, N: tl.constexpr, ITERATIONS: tl.constexpr):
    """The gradient of A from that of H: exactly MᵀGMᵀ with M = (I - A/2)⁻¹ = (I + H)/2."""
    if ITERATIONS < 0:
        m = 0.5 * tl.permute(identity(N) + mixer, (0, 2, 1))
        return product(m, product(grad, m))
    else:
        iterates = (identity(N) + skew,)
        for k in tl.static_range(ITERATIONS):
            iterates = iterates + (identity(N) + 0.5 * (skew + product(skew, iterates[k])),)
        total = skew * 0.0
        for step in tl.static_range(ITERATIONS):
            total += 0.5 * product(grad, tl.permute(identity(N) + iterates[ITERATIONS - 1 - step], (0, 2, 1)))
            grad = -0.5 * product(skew, grad)
        return total + grad


@triton.jit
def gram_inverse(frame, RANK: tl.constexpr, MB: tl.constexpr):
    """(FᵀF)⁻¹, with ones on the diagonal of the padding. [tokens, mb, mb]"""
    a = tl.arange(0, MB)[None, :, None]
    b = tl.arange(0, MB)[None, None, :]
    gram = tl.sum(frame[:, :, :, None] * frame[:, :, None, :], axis=1)
    return inverse(tl.where((a == b) & (a >= RANK), 1.0, gram), MB)


@triton.jit
def spread(frame, weight):
    """F C. frame: [tokens, n, mb]; weight: [tokens, mb, mb]"""
    return tl.sum(frame[:, :, :, None] * weight[:, None, :, :], axis=2)


@triton.jit
def permutation_matrix(CODE: tl.constexpr, N: tl.constexpr):
    """P with P[σ(j), j] = 1, from three bits an image. [1, n, n]"""
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    return (((CODE >> (3 * j)) & 7) == i).to(tl.float32)


@triton.jit
def softmax_row(logits, COUNT: tl.constexpr, MB: tl.constexpr):
    """softmax of the first COUNT of [tokens, 1, mb] logits, zero behind them. [tokens, mb]"""
    column = tl.arange(0, MB)[None, :]
    z = tl.where(column < COUNT, tl.sum(logits, axis=1), float("-inf"))
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def kronecker_factor(a, F: tl.constexpr, N: tl.constexpr, MB: tl.constexpr):
    """[[a, 1 - a], [1 - a, a]] of factor F at every entry of H, and its sign. a: [tokens, mb]

    The first factor is the leftmost of the product: the highest bit of the indices.
    """
    FACTORS: tl.constexpr = (N >= 2) + (N >= 4) + (N >= 8)
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    same = (((i ^ j) >> (FACTORS - 1 - F)) & 1) == 0
    value = tl.sum(tl.where(tl.arange(0, MB)[None, :] == F, a, 0.0), axis=1)[:, None, None]
    return tl.where(same, value, 1.0 - value), tl.where(same, 1.0, -1.0)


@triton.jit
def mix(
    m,
    MIXER: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    RANK: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    """H from the mixer's logits. m: [tokens, ma, mb] → [tokens, n, n]"""
    if MIXER == "unconstrained":
        return m
    elif MIXER == "sinkhorn":
        return sinkhorn(m, ITERATIONS)
    elif MIXER == "cayley":
        return cayley(SCALE * m, N, ITERATIONS)
    elif MIXER == "grassmann":
        weighted = spread(m, gram_inverse(m, RANK, MB))
        return tl.sum(weighted[:, :, None, :] * m[:, None, :, :], axis=3)
    elif MIXER == "permutation":
        p = softmax_row(m, len(PERMUTATIONS), MB)
        h = tl.sum(p, axis=1)[:, None, None] * (identity(N) * 0.0)
        for k in tl.static_range(len(PERMUTATIONS)):
            p_k = tl.sum(tl.where(tl.arange(0, MB)[None, :] == k, p, 0.0), axis=1)
            h += p_k[:, None, None] * permutation_matrix(PERMUTATIONS[k], N)
        return h
    elif MIXER == "kronecker":
        a = 1.0 / (1.0 + tl.exp(-tl.sum(m, axis=1)))
        h, _ = kronecker_factor(a, 0, N, MB)
        for f in tl.static_range(1, (N >= 2) + (N >= 4) + (N >= 8)):
            factor, _ = kronecker_factor(a, f, N, MB)
            h *= factor
        return h
    else:
        return tl.sum(m, axis=1)[:, :, None] * 0.0 + identity(N)


@triton.jit
def mix_derivative(
    m,
    h,
    grad,
    MIXER: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    RANK: tl.constexpr,
    MB: tl.constexpr,
    PERMUTATIONS: tl.constexpr,
):
    """The gradient of the mixer's logits M from that of H, given both. grad: [tokens, n, n] → [tokens, ma, mb]"""
    if MIXER == "unconstrained":
        return grad
    elif MIXER == "sinkhorn":
        return sinkhorn_derivative(m, h, grad, N)
    elif MIXER == "cayley":
        g = cayley_derivative(SCALE * m, h, grad, N, ITERATIONS)
        return SCALE * (g - tl.permute(g, (0, 2, 1)))
    elif MIXER == "grassmann":
        # dP = (I - P) dF C Fᵀ + its transpose, with C = (FᵀF)⁻¹.
        symmetric = grad + tl.permute(grad, (0, 2, 1))
        side = product(identity(N) - h, symmetric)
        weighted = spread(m, gram_inverse(m, RANK, MB))
        return tl.sum(side[:, :, :, None] * weighted[:, None, :, :], axis=2)
    elif MIXER == "permutation":
        p = softmax_row(m, len(PERMUTATIONS), MB)
        column = tl.arange(0, MB)[None, :]
        g = p * 0.0
        for k in tl.static_range(len(PERMUTATIONS)):
            inner = tl.sum(tl.sum(grad * permutation_matrix(PERMUTATIONS[k], N), axis=2), axis=1)
            g = tl.where(column == k, inner[:, None], g)
        return (p * (g - tl.sum(p * g, axis=1)[:, None]))[:, None, :]
    else:  # kronecker
        FACTORS: tl.constexpr = (N >= 2) + (N >= 4) + (N >= 8)
        a = 1.0 / (1.0 + tl.exp(-tl.sum(m, axis=1)))
        column = tl.arange(0, MB)[None, :]
        g = a * 0.0
        for f in tl.static_range(FACTORS):
            _, term = kronecker_factor(a, f, N, MB)
            term = term * grad
            for other in tl.static_range(FACTORS):
                if other != f:
                    factor, _ = kronecker_factor(a, other, N, MB)
                    term = term * factor
            inner = tl.sum(tl.sum(term, axis=2), axis=1)
            g = tl.where(column == f, inner[:, None], g)
        return (g * a * (1.0 - a))[:, None, :]
