r"""The constraints on a token's logits, and their derivatives, as Triton functions over [tokens, n, n] blocks.

Read and write logits arrive as full n × n matrices R and V whatever their kind: a kind with n logits repeats them along
the rows (read) or the columns (write), and then the same formula serves both. The mixer's logits arrive as the matrix M
that `mixer_entries` describes. S is the connection's `Spec`. See docs/derivations/kernels.md for the derivatives.
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
def read_entries(S: tl.constexpr):
    """Which logit is entry (i, j) of R. [n, n]"""
    i = tl.arange(0, S.n)[:, None]
    j = tl.arange(0, S.n)[None, :]
    if S.read == "softmax_matrix":
        return i * S.n + j
    else:
        return i * 0 + j


@triton.jit
def write_entries(S: tl.constexpr):
    """Which logit is entry (i, j) of V. [n, n]"""
    i = tl.arange(0, S.n)[:, None]
    j = tl.arange(0, S.n)[None, :]
    if S.write == "softmax_matrix":
        return S.read_logits + i * S.n + j
    else:
        return S.read_logits + i + j * 0


@triton.jit
def mixer_entries(S: tl.constexpr):
    """Which logit is entry (i, j) of M, and its sign: 0 where M has no logit there. [rows, columns] each"""
    i = tl.arange(0, S.mixer_rows)[:, None]
    j = tl.arange(0, S.mixer_columns)[None, :]
    if S.mixer == "identity":
        index = i + j
        sign = (i < 0).to(tl.float32) + (j < 0).to(tl.float32)
    elif S.mixer == "cayley":
        low = tl.minimum(i, j)
        high = tl.maximum(i, j)
        # torch.triu_indices(n, n, 1) counts the strict upper triangle by rows.
        index = tl.where(i == j, 0, low * S.n - low * (low + 1) // 2 + high - low - 1)
        sign = (i < j).to(tl.float32) - (i > j).to(tl.float32)
    else:
        width = S.mixer_logits // S.mixer_rows
        index = tl.where(j < width, i * width + j, 0)
        sign = (j < width).to(tl.float32) + (i < 0).to(tl.float32)
    return S.read_logits + S.write_logits + index, sign


@triton.jit
def read_probabilities(r_logits, S: tl.constexpr):
    """softmax over the last axis, or the sigmoid, of R / tau. [tokens, n, n]"""
    z = r_logits / S.temperature
    if S.read == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        e = tl.exp(z - tl.max(z, axis=2)[:, :, None])
        return e / tl.sum(e, axis=2)[:, :, None]


@triton.jit
def write_probabilities(v_logits, S: tl.constexpr):
    """softmax over the axis before the last, or the sigmoid, of V / tau. [tokens, n, n]"""
    z = v_logits / S.temperature
    if S.write == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        e = tl.exp(z - tl.max(z, axis=1)[:, None, :])
        return e / tl.sum(e, axis=1)[:, None, :]


@triton.jit
def read_weights(r_logits, S: tl.constexpr):
    """r_j: the mean over the rows. [tokens, n]"""
    return tl.sum(read_probabilities(r_logits, S), axis=1) / S.n


@triton.jit
def write_weights(v_logits, S: tl.constexpr):
    """w_i: the sum over the columns, or twice the sigmoid. [tokens, n]"""
    total = tl.sum(write_probabilities(v_logits, S), axis=2)
    if S.write == "sigmoid":
        total = total * (2.0 / S.n)
    return total


@triton.jit
def read_derivative(r_logits, grad, S: tl.constexpr):
    """The gradient of R from that of r. grad: [tokens, n] → [tokens, n, n]"""
    p = read_probabilities(r_logits, S)
    g = grad[:, None, :] / S.n / S.temperature
    if S.read == "sigmoid":
        return g * p * (1.0 - p)
    else:
        return p * (g - tl.sum(p * g, axis=2)[:, :, None])


@triton.jit
def write_derivative(v_logits, grad, S: tl.constexpr):
    """The gradient of V from that of w. grad: [tokens, n] → [tokens, n, n]"""
    p = write_probabilities(v_logits, S)
    g = grad[:, :, None] / S.temperature
    if S.write == "sigmoid":
        return g * p * (1.0 - p) * (2.0 / S.n)
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
def cayley(skew, S: tl.constexpr):
    """eq. cayley-iter-main, or exactly (I + A/2)(I - A/2)⁻¹ = 2 (I - A/2)⁻¹ - I. skew: A"""
    if S.iterations is None:
        return 2.0 * inverse(identity(S.n) - 0.5 * skew, S.n) - identity(S.n)
    else:
        ITERATIONS: tl.constexpr = S.iterations
        y = identity(S.n) + skew
        for _ in tl.static_range(ITERATIONS):
            y = identity(S.n) + 0.5 * (skew + product(skew, y))
        return y


@triton.jit
def cayley_derivative(skew, mixer, grad, S: tl.constexpr):
    """The gradient of A from that of H: exactly MᵀGMᵀ with M = (I - A/2)⁻¹ = (I + H)/2."""
    if S.iterations is None:
        m = 0.5 * tl.permute(identity(S.n) + mixer, (0, 2, 1))
        return product(m, product(grad, m))
    else:
        ITERATIONS: tl.constexpr = S.iterations
        iterates = (identity(S.n) + skew,)
        for k in tl.static_range(ITERATIONS):
            iterates = iterates + (identity(S.n) + 0.5 * (skew + product(skew, iterates[k])),)
        total = skew * 0.0
        for step in tl.static_range(ITERATIONS):
            total += 0.5 * product(grad, tl.permute(identity(S.n) + iterates[ITERATIONS - 1 - step], (0, 2, 1)))
            grad = -0.5 * product(skew, grad)
        return total + grad


@triton.jit
def gram_inverse(frame, S: tl.constexpr):
    """(FᵀF)⁻¹, with ones on the diagonal of the padding. [tokens, columns, columns]"""
    a = tl.arange(0, S.mixer_columns)[None, :, None]
    b = tl.arange(0, S.mixer_columns)[None, None, :]
    gram = tl.sum(frame[:, :, :, None] * frame[:, :, None, :], axis=1)
    return inverse(tl.where((a == b) & (a >= S.rank), 1.0, gram), S.mixer_columns)


@triton.jit
def spread(frame, weight):
    """F C. frame: [tokens, n, columns]; weight: [tokens, columns, columns]"""
    return tl.sum(frame[:, :, :, None] * weight[:, None, :, :], axis=2)


@triton.jit
def permutation_matrix(CODE: tl.constexpr, N: tl.constexpr):
    """P with P[σ(j), j] = 1, from three bits an image. [1, n, n]"""
    i = tl.arange(0, N)[None, :, None]
    j = tl.arange(0, N)[None, None, :]
    return (((CODE >> (3 * j)) & 7) == i).to(tl.float32)


@triton.jit
def softmax_row(logits, S: tl.constexpr):
    """softmax of [tokens, 1, columns] logits, zero behind the last of them. [tokens, columns]"""
    column = tl.arange(0, S.mixer_columns)[None, :]
    z = tl.where(column < S.mixer_logits, tl.sum(logits, axis=1), float("-inf"))
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def kronecker_factor(a, F: tl.constexpr, S: tl.constexpr):
    """[[a, 1 - a], [1 - a, a]] of factor F at every entry of H, and its sign. a: [tokens, columns]

    The first factor is the leftmost of the product: the highest bit of the indices.
    """
    i = tl.arange(0, S.n)[None, :, None]
    j = tl.arange(0, S.n)[None, None, :]
    same = (((i ^ j) >> (S.mixer_logits - 1 - F)) & 1) == 0
    value = tl.sum(tl.where(tl.arange(0, S.mixer_columns)[None, :] == F, a, 0.0), axis=1)[:, None, None]
    return tl.where(same, value, 1.0 - value), tl.where(same, 1.0, -1.0)


@triton.jit
def mix(m, S: tl.constexpr):
    """H from the mixer's logits. m: [tokens, rows, columns] → [tokens, n, n]"""
    COUNT: tl.constexpr = S.mixer_logits
    if S.mixer == "unconstrained":
        return m
    elif S.mixer == "sinkhorn":
        return sinkhorn(m, S.iterations)
    elif S.mixer == "cayley":
        return cayley(S.scale * m, S)
    elif S.mixer == "grassmann" and S.rank < S.n:
        weighted = spread(m, gram_inverse(m, S))
        return tl.sum(weighted[:, :, None, :] * m[:, None, :, :], axis=3)
    elif S.mixer == "permutation":
        p = softmax_row(m, S)
        h = tl.sum(p, axis=1)[:, None, None] * (identity(S.n) * 0.0)
        for k in tl.static_range(COUNT):
            p_k = tl.sum(tl.where(tl.arange(0, S.mixer_columns)[None, :] == k, p, 0.0), axis=1)
            h += p_k[:, None, None] * permutation_matrix(S.packed_permutations[k], S.n)
        return h
    elif S.mixer == "kronecker":
        a = 1.0 / (1.0 + tl.exp(-tl.sum(m, axis=1)))
        h, _ = kronecker_factor(a, 0, S)
        for f in tl.static_range(1, COUNT):
            factor, _ = kronecker_factor(a, f, S)
            h *= factor
        return h
    else:  # the identity, or a projector of full rank
        return tl.sum(m, axis=1)[:, :, None] * 0.0 + identity(S.n)


@triton.jit
def mix_derivative(m, h, grad, S: tl.constexpr):
    """The gradient of the logits M from that of H, given both. grad: [tokens, n, n] → [tokens, rows, columns]"""
    COUNT: tl.constexpr = S.mixer_logits
    if S.mixer == "unconstrained":
        return grad
    elif S.mixer == "sinkhorn":
        return sinkhorn_derivative(m, h, grad, S.n)
    elif S.mixer == "cayley":
        g = cayley_derivative(S.scale * m, h, grad, S)
        return S.scale * (g - tl.permute(g, (0, 2, 1)))
    elif S.mixer == "grassmann" and S.rank == S.n:
        return m * 0.0
    elif S.mixer == "grassmann":
        # dP = (I - P) dF C Fᵀ + its transpose, with C = (FᵀF)⁻¹.
        symmetric = grad + tl.permute(grad, (0, 2, 1))
        side = product(identity(S.n) - h, symmetric)
        weighted = spread(m, gram_inverse(m, S))
        return tl.sum(side[:, :, :, None] * weighted[:, None, :, :], axis=2)
    elif S.mixer == "permutation":
        p = softmax_row(m, S)
        column = tl.arange(0, S.mixer_columns)[None, :]
        g = p * 0.0
        for k in tl.static_range(COUNT):
            inner = tl.sum(tl.sum(grad * permutation_matrix(S.packed_permutations[k], S.n), axis=2), axis=1)
            g = tl.where(column == k, inner[:, None], g)
        return (p * (g - tl.sum(p * g, axis=1)[:, None]))[:, None, :]
    else:  # kronecker
        a = 1.0 / (1.0 + tl.exp(-tl.sum(m, axis=1)))
        column = tl.arange(0, S.mixer_columns)[None, :]
        g = a * 0.0
        for f in tl.static_range(COUNT):
            _, term = kronecker_factor(a, f, S)
            term = term * grad
            for other in tl.static_range(COUNT):
                if other != f:
                    factor, _ = kronecker_factor(a, other, S)
                    term = term * factor
            inner = tl.sum(tl.sum(term, axis=2), axis=1)
            g = tl.where(column == f, inner[:, None], g)
        return (g * a * (1.0 - a))[:, None, :]
