r"""Triton functions that the kernels share, on the streams and on the logits of a block of tokens.

Names end in shapes. T: tokens, N: streams, M: stored streams (N, or 1 if all are equal), D: width of a stream, W: width
of all stored streams, M · D, K: logits, P: logits padded for the tensor cores, C: coefficients, which are n read
weights r, n write weights w and the skip matrix H by rows. A pointer is named after the tensor in memory, a value after
its tile: z_TD is [BT, BD]. `token` contains the indices of a program's tokens, and `inside` says which of these indices
are below T. S is the connection's `Spec`.

A kind of read or write with n logits repeats them along the rows (read) or the columns (write) of an n × n matrix, so
that one formula serves all kinds. The derivatives are in docs/derivations/kernels.md.
"""

import triton
import triton.language as tl

# --- streams ---


@triton.jit
def norm_factor(square, eps, OUTSIDE: tl.constexpr = False):
    """Return 1 / sqrt(square + eps), or 1 / (sqrt(square) + eps) if OUTSIDE; NaN if the square has overflowed."""
    factor = 1.0 / (tl.sqrt(square) + eps) if OUTSIDE else tl.rsqrt(square + eps)
    return tl.where(square < float("inf"), factor, float("nan"))


@triton.jit
def load_streams(x_TMD, token, c, mask, M: tl.constexpr, D: tl.constexpr):
    """Load the columns c of each stream of each token, as M tiles [T, D] in float32."""
    streams = ()
    for j in tl.static_range(M):
        value = tl.load(x_TMD + token[:, None] * (M * D) + j * D + c[None, :], mask=mask, other=0.0)
        streams = streams + (value.to(tl.float32),)
    return streams


@triton.jit
def load_coefficient(coef_TC, token, inside, index, N: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Load coefficient number `index` of each token; without PER_TOKEN all tokens share it. [T, 1]"""
    return tl.load(coef_TC + token * (PER_TOKEN * N * (N + 2)) + index, mask=inside, other=0.0)[:, None]


@triton.jit
def load_mixing(coef_TC, token, inside, N: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Load each token's write weights w, then its skip matrix H by rows, as a tuple of N(N+1) columns [T, 1]."""
    entries = ()
    for entry in tl.static_range(N, N * (N + 2)):
        entries = entries + (load_coefficient(coef_TC, token, inside, entry, N, PER_TOKEN),)
    return entries


@triton.jit
def mix_stream(streams, y_TD, mixing, i, N: tl.constexpr):
    """Return the new stream i: z_i = w_i y + Σ_j H_ij x_j, with w and H from `load_mixing`. [T, D]

    The kernels of write.py, write_read.py and decode.py all compute new streams by this function.
    """
    z_TD = mixing[i] * y_TD
    for j in tl.static_range(N):
        z_TD += mixing[N + i * N + j] * streams[j % len(streams)]
    return z_TD


@triton.jit
def replaced(values, index: tl.constexpr, value):
    """Return the tuple `values`, with the entry at position `index` replaced by `value`."""
    new = ()
    for i in tl.static_range(len(values)):
        new = new + (value if i == index else values[i],)
    return new


@triton.jit
def _side_by_side(values):
    """Return 2^k tensors joined into one tensor with k more dimensions, each of size 2."""
    if len(values) == 1:
        return values[0]
    else:
        return tl.join(_side_by_side(values[0::2]), _side_by_side(values[1::2]))


@triton.jit
def inner_products(g_TD, streams, BT: tl.constexpr, N: tl.constexpr):
    """Return ⟨g, x_j⟩ for every stream x_j, by one reduction for all streams. [T, N]"""
    products = ()
    for m in tl.static_range(len(streams)):
        products = products + (g_TD * streams[m],)
    sums = tl.sum(_side_by_side(products), axis=1)
    return tl.broadcast_to(tl.reshape(sums, [BT, len(streams)]), [BT, N])


# --- gates ---
# A gate constrains a matrix of logits along AXIS: the rows of R (2) for the read, the columns of V (1) for the write.


@triton.jit
def _gate_entries(AXIS: tl.constexpr, S: tl.constexpr):
    """Return the index of the logit at each entry of the gate's matrix. [N, N]"""
    i = tl.arange(0, S.n)[:, None]
    j = tl.arange(0, S.n)[None, :]
    FIRST: tl.constexpr = 0 if AXIS == 2 else S.read_logits
    if (S.read if AXIS == 2 else S.write) == "softmax_matrix":
        return FIRST + i * S.n + j
    elif AXIS == 2:
        return i * 0 + j
    else:
        return FIRST + i + j * 0


@triton.jit
def _probabilities(logits_TNN, AXIS: tl.constexpr, S: tl.constexpr):
    """Return a gate's logits / temperature after a softmax over AXIS, or a sigmoid. [T, N, N]"""
    z_TNN = logits_TNN / S.temperature
    if (S.read if AXIS == 2 else S.write) == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-z_TNN))
    else:
        e_TNN = tl.exp(z_TNN - tl.max(z_TNN, axis=AXIS, keep_dims=True))
        return e_TNN / tl.sum(e_TNN, axis=AXIS, keep_dims=True)


@triton.jit
def _read_weights(r_TNN, S: tl.constexpr):
    """Return the read weights r: the mean over the rows of the read's probabilities, plus `read_eps`. [T, N]"""
    return tl.sum(_probabilities(r_TNN, 2, S), axis=1) / S.n + S.read_eps


@triton.jit
def _write_weights(v_TNN, S: tl.constexpr):
    """Return the write weights w: the row sums of the write's `_probabilities`, plus `write_eps`. [T, N]

    For a sigmoid the row sums are multiplied by `write_peak` / n.
    """
    total = tl.sum(_probabilities(v_TNN, 1, S), axis=2)
    if S.write == "sigmoid":
        total = total * (S.write_peak / S.n)
    return total + S.write_eps


@triton.jit
def _differentiate_gate(logits_T11, grad_T1, grad_T11, grad_TN, mask_T1, mask_T11, AXIS: tl.constexpr, S: tl.constexpr):
    """Store the gradient of a gate's logits, from the gradient `grad_TN` of the read weights or the write weights.

    `logits` points to each token's first logit, `grad_T1` and `grad_T11` to its gradient. The masks say which tokens
    are below T.
    """
    KIND: tl.constexpr = S.read if AXIS == 2 else S.write
    entries = _gate_entries(AXIS, S)[None, :, :]
    p_TNN = _probabilities(tl.load(logits_T11 + entries, mask=mask_T11, other=0.0), AXIS, S)
    if AXIS == 2:
        g_TNN = grad_TN[:, None, :] / S.n / S.temperature
    else:
        g_TNN = grad_TN[:, :, None] / S.temperature
    if KIND == "sigmoid":
        g_TNN = g_TNN * p_TNN * (1.0 - p_TNN)
        if AXIS == 1:
            g_TNN = g_TNN * (S.write_peak / S.n)
    else:
        g_TNN = p_TNN * (g_TNN - tl.sum(p_TNN * g_TNN, axis=AXIS, keep_dims=True))
    if KIND == "softmax_matrix":
        tl.store(grad_T11 + entries, g_TNN, mask=mask_T11)
    else:
        FIRST: tl.constexpr = 0 if AXIS == 2 else S.read_logits
        tl.store(grad_T1 + FIRST + tl.arange(0, S.n)[None, :], tl.sum(g_TNN, axis=3 - AXIS), mask=mask_T1)


# --- logits ---


@triton.jit
def centre_moments(near_T, total_T, square_T, COUNT: tl.constexpr):
    """Return the mean of COUNT numbers, and the sum of the squared distances from the mean.

    `total` is the sum of the distances from `near`, and `square` is the sum of the squares of these distances. `near`
    is the mean of some of the numbers, because with zero in its place a large offset would make the squares inexact.
    """
    return near_T + total_T / COUNT, tl.maximum(square_T - total_T * (total_T / COUNT), 0.0, tl.PropagateNan.ALL)


@triton.jit
def store_logits(
    product_TP, mean_T, square_T, sums_P, bias_K, logits_TK, stats_T2, token, inside,
    ND: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Store the logits (W x - mean · W 1) · scale + b, and the norm's statistics: mean and scale.

    `product` is W x, `sums` is W 1, and `square` is the sum of the squares of the numbers that the norm divides.
    """
    scale_T = norm_factor(square_T / ND, S.eps, S.norm == "rms_outside")
    tl.store(stats_T2 + token * 2, mean_T, mask=inside)
    tl.store(stats_T2 + token * 2 + 1, scale_T, mask=inside)
    k = tl.arange(0, KP)
    value_TP = (product_TP - mean_T[:, None] * tl.load(sums_P + k)[None, :]) * scale_T[:, None]
    known = k < S.logits
    value_TP += tl.load(bias_K + k, mask=known, other=0.0)[None, :]
    tl.store(logits_TK + token[:, None] * S.logits + k[None, :], value_TP, mask=inside[:, None] & known[None, :])


@triton.jit
def load_read_weights(logits_TK, token, inside, S: tl.constexpr):
    """Return each token's read weights, computed from the logits in memory. [T, N]"""
    entries = _gate_entries(2, S)[None, :, :]
    r_TNN = tl.load((logits_TK + token * S.logits)[:, None, None] + entries, mask=inside[:, None, None], other=0.0)
    return _read_weights(r_TNN, S)


@triton.jit
def _load_mixer_logits(base, mask, S: tl.constexpr):
    """Return each token's matrix of mixer logits, the index of each entry among all logits, and its sign.

    `base` points to each token's first logit, and `mask` says which tokens are below T. [T, 1, 1]
    """
    F: tl.constexpr = S.mixer
    index, sign = F.entries(F)
    position = S.gate_logits + index[None, :, :]
    m = tl.load(base + position, mask=mask & (sign != 0.0)[None, :, :], other=0.0) * sign[None, :, :]
    return m, position, sign


@triton.jit
def constrain_tokens(logits_TK, coef_TC, token, inside, S: tl.constexpr):
    """Compute the coefficients r, w and H from the logits in memory, and store them."""
    logits = (logits_TK + token * S.logits)[:, None, None]
    mask = inside[:, None, None]
    r_TNN = tl.load(logits + _gate_entries(2, S)[None, :, :], mask=mask, other=0.0)
    v_TNN = tl.load(logits + _gate_entries(1, S)[None, :, :], mask=mask, other=0.0)
    F: tl.constexpr = S.mixer
    m, _, _ = _load_mixer_logits(logits, mask, S)
    h_TNN = F.mix(m, F)
    r_TN = _read_weights(r_TNN, S)
    w_TN = _write_weights(v_TNN, S)
    N: tl.constexpr = S.n
    i = tl.arange(0, N)
    base = coef_TC + token * (N * (N + 2))
    tl.store(base[:, None] + i[None, :], r_TN, mask=inside[:, None])
    tl.store(base[:, None] + N + i[None, :], w_TN, mask=inside[:, None])
    entries = 2 * N + i[:, None] * N + i[None, :]
    tl.store(base[:, None, None] + entries[None, :, :], h_TNN, mask=inside[:, None, None])


@triton.jit
def differentiate_logits(
    logits_TK, coef_TC, grad_read_TN, grad_coef_TC, grad_logits_TK, token, inside,
    DELAYED: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Load the gradients of the coefficients, and store the gradient of the logits.

    `grad_read` is the part of the read weights' gradient that comes from the sum of streams h = Σ_j r_j x_j. With
    DELAYED it goes to the connection before, whose read weights gave h.
    """
    N: tl.constexpr = S.n
    gbase = grad_coef_TC + token * (N * (N + 2))
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    row = inside[:, None]
    mask = inside[:, None, None]
    base = (logits_TK + token * S.logits)[:, None, None]
    line = (grad_logits_TK + token * S.logits)[:, None]
    out = line[:, :, None]
    dr_TN = tl.load(gbase[:, None] + j, mask=row, other=0.0)
    if not DELAYED:
        dr_TN += tl.load((grad_read_TN + token * N)[:, None] + j, mask=row, other=0.0)
    dw_TN = tl.load(gbase[:, None] + N + j, mask=row, other=0.0)
    _differentiate_gate(base, line, out, dr_TN, row, mask, 2, S)
    _differentiate_gate(base, line, out, dw_TN, row, mask, 1, S)
    if S.mixer.logits > 0:
        matrix = (2 * N + i * N + j)[None, :, :]
        h_TNN = tl.load((coef_TC + token * (N * (N + 2)))[:, None, None] + matrix, mask=mask, other=0.0)
        dh_TNN = tl.load(gbase[:, None, None] + matrix, mask=mask, other=0.0)
        F: tl.constexpr = S.mixer
        m, position, sign = _load_mixer_logits(base, mask, S)
        g = F.derivative(m, h_TNN, dh_TNN, F)
        tl.store(out + position, g, mask=mask & (sign > 0.0)[None, :, :])
