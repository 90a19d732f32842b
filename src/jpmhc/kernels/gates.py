r"""The read and write gates of a token, and their derivatives, as Triton functions over [tokens, n, n] blocks.

Read and write logits arrive as full n × n matrices R and V whatever their kind: a kind with n logits repeats them along
the rows (read) or the columns (write), and then the same formula serves both. S is the connection's `Spec`. See
docs/derivations/kernels.md for the derivatives.
"""

import triton
import triton.language as tl


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
    """r_j: the mean over the rows, plus the read's eps. [tokens, n]"""
    return tl.sum(read_probabilities(r_logits, S), axis=1) / S.n + S.read_eps


@triton.jit
def write_weights(v_logits, S: tl.constexpr):
    """w_i: the sum over the columns, or a multiple of the sigmoid, plus the write's eps. [tokens, n]"""
    total = tl.sum(write_probabilities(v_logits, S), axis=2)
    if S.write == "sigmoid":
        total = total * (S.write_peak / S.n)
    return total + S.write_eps


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
        return g * p * (1.0 - p) * (S.write_peak / S.n)
    else:
        return p * (g - tl.sum(p * g, axis=1)[:, None, :])
