"""Functions of small matrices for the Triton forms of mixers, one matrix per token. [tokens, rows, columns]

F is the `TritonForm`, whose docstring describes the entries of M: the index of each entry's logit, and a sign.
"""

import triton
import triton.language as tl


@triton.jit
def entries_by_rows(F: tl.constexpr):
    """Return the logit index, row by row, and the sign of each entry, 0 in padding columns. [rows, columns] each"""
    i = tl.arange(0, F.rows)[:, None]
    j = tl.arange(0, F.columns)[None, :]
    WIDTH: tl.constexpr = F.logits // F.rows
    # The last term is zero and broadcasts the signs to M's shape.
    return tl.where(j < WIDTH, i * WIDTH + j, 0), (j < WIDTH).to(tl.float32) + (i < 0).to(tl.float32)


@triton.jit
def no_entries(F: tl.constexpr):
    """Return arbitrary indices and the sign 0 (padding), for mixers without logits. [rows, columns] each"""
    i = tl.arange(0, F.rows)[:, None]
    j = tl.arange(0, F.columns)[None, :]
    return i + j, (i + j < 0).to(tl.float32)


@triton.jit
def skew_entries(F: tl.constexpr):
    """Return each entry's logit index and sign, for logits that fill the upper triangle of a skew matrix."""
    i = tl.arange(0, F.rows)[:, None]
    j = tl.arange(0, F.columns)[None, :]
    ORDER: tl.constexpr = F.constants.order
    low = tl.minimum(i, j)
    high = tl.maximum(i, j)
    known = (i != j) & (high < ORDER)
    # The strict upper triangle counted by rows, as torch.triu_indices does.
    index = tl.where(known, low * ORDER - low * (low + 1) // 2 + high - low - 1, 0)
    return index, tl.where(known, (i < j).to(tl.float32) - (i > j).to(tl.float32), 0.0)


@triton.jit
def identity_matrix(N: tl.constexpr):
    """Return the identity matrix. [1, n, n]"""
    i = tl.arange(0, N)
    return (i[:, None] == i[None, :]).to(tl.float32)[None, :, :]


@triton.jit
def transpose(m):
    """Return each matrix's transpose."""
    return tl.permute(m, (0, 2, 1))


@triton.jit
def product(a, b):
    """Return the matrix product of a and b for each token; one of them may be a single matrix for all tokens."""
    return tl.sum(a[:, :, :, None] * b[:, None, :, :], axis=2)


@triton.jit
def inverse(m, SIZE: tl.constexpr):
    """Return the inverses of matrices with a positive definite symmetric part, by elimination without pivoting."""
    i = tl.arange(0, SIZE)[None, :, None]
    j = tl.arange(0, SIZE)[None, None, :]
    for k in tl.static_range(SIZE):
        row = tl.sum(tl.where(i == k, m, 0.0), axis=1)[:, None, :]
        column = tl.sum(tl.where(j == k, m, 0.0), axis=2)[:, :, None]
        pivot = 1.0 / tl.sum(tl.where(j == k, row, 0.0), axis=2)[:, :, None]
        m = tl.where((i == k) & (j == k), pivot, tl.where(i == k, row * pivot, m - column * row * pivot))
        m = tl.where((i != k) & (j == k), -column * pivot, m)
    return m


# Larger entries of A/2 would leave the inverse fewer than four digits in float32; `cayley` then returns NaN.
LARGEST_SKEW = tl.constexpr(16.0)


@triton.jit
def cayley(skew, SIZE: tl.constexpr):
    """Return (I + A/2)(I - A/2)⁻¹ of skew matrices A; NaN if SIZE > 4 and an entry of A/2 exceeds LARGEST_SKEW."""
    k = 0.5 * skew
    if SIZE == 2:
        return 2.0 * inverse(identity_matrix(SIZE) - k, SIZE) - identity_matrix(SIZE)
    elif SIZE == 4:
        return _cayley_polynomial(k)
    else:
        # Elimination without pivoting loses digits where entries are large.
        h = 2.0 * inverse(identity_matrix(SIZE) - k, SIZE) - identity_matrix(SIZE)
        largest = tl.max(tl.max(tl.abs(k), axis=2), axis=1)[:, None, None]
        return tl.where(largest <= LARGEST_SKEW, h, float("nan"))


@triton.jit
def _above(k, I: tl.constexpr, J: tl.constexpr):
    """Return the entry (I, J) of 4 × 4 matrices k. [tokens, 1, 1]"""
    i = tl.arange(0, 4)[None, :, None]
    j = tl.arange(0, 4)[None, None, :]
    return tl.sum(tl.sum(tl.where((i == I) & (j == J), k, 0.0), axis=2), axis=1)[:, None, None]


@triton.jit
def _cayley_polynomial(k):
    """Return [(1 + s - f²) I + 2K² + 2K + 2f K*] / (1 + s + f²), the Cayley transform of a skew 4 × 4 matrix K.

    s is the sum of the squares above the diagonal, f the Pfaffian and K* the dual (docs/derivations/cayley.md).
    """
    i = tl.arange(0, 4)[None, :, None]
    j = tl.arange(0, 4)[None, None, :]
    a, b, c = _above(k, 0, 1), _above(k, 0, 2), _above(k, 0, 3)
    d, e, f = _above(k, 2, 3), _above(k, 3, 1), _above(k, 1, 2)  # the dual K* has d, e, f where K has a, b, c
    s = a * a + b * b + c * c + d * d + e * e + f * f
    pfaffian = a * d + b * e + c * f
    # Entry (i, j) of the dual is the entry of K at the two other indices.
    low = tl.minimum(i, j)
    high = tl.maximum(i, j)
    dual = tl.where((low == 0) & (high == 1), d, 0.0) + tl.where((low == 0) & (high == 2), e, 0.0)
    dual += tl.where((low == 0) & (high == 3), f, 0.0) + tl.where((low == 2) & (high == 3), a, 0.0)
    dual += tl.where((low == 1) & (high == 2), c, 0.0) - tl.where((low == 1) & (high == 3), b, 0.0)
    dual = tl.where(i < j, dual, -dual)
    square = pfaffian * pfaffian
    numerator = (1.0 + s - square) * identity_matrix(4) + 2.0 * (product(k, k) + k + pfaffian * dual)
    return numerator / (1.0 + s + square)


@triton.jit
def cayley_derivative(h, grad, SIZE: tl.constexpr):
    """Turn the gradient G of H = cayley(A) into the gradient MᵀGMᵀ of A, with M = (I - A/2)⁻¹ = (I + H)/2."""
    m = 0.5 * transpose(identity_matrix(SIZE) + h)
    return product(m, product(grad, m))


@triton.jit
def softmax_row(m, F: tl.constexpr):
    """Return the softmax of one row of logits, zero in the padding. [tokens, 1, columns] → [tokens, columns]"""
    column = tl.arange(0, F.columns)[None, :]
    z = tl.where(column < F.logits, tl.sum(m, axis=1), float("-inf"))
    e = tl.exp(z - tl.max(z, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@triton.jit
def softmax_derivative(p, grad):
    """Turn the gradient of a softmax p into the gradient of its logits. [tokens, columns] → [tokens, 1, columns]"""
    return (p * (grad - tl.sum(p * grad, axis=1)[:, None]))[:, None, :]


@triton.jit
def pick(p, K: tl.constexpr, F: tl.constexpr):
    """Return column K of p as one number per token. [tokens, columns] → [tokens, 1, 1]"""
    return tl.sum(tl.where(tl.arange(0, F.columns)[None, :] == K, p, 0.0), axis=1)[:, None, None]
