"""The gradients of a connection's parameters: partial sums over stretches of tokens, added up without atomics."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.kernels.launch import (
    BufferPart,
    Launcher,
    ceil_div,
    count_tokens,
    kernel,
    multiprocessors,
    padded,
    power_of_two,
    stages,
)
from jpmhc.kernels.projection import precision
from jpmhc.kernels.spec import Spec


@kernel
def _weight_backward(
    x,
    scaled_gradient,
    partial_w,
    T,
    CHUNK,
    ND: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A partial sum over CHUNK tokens of (scale gl) xᵀ, for a slice of the streams."""
    k = tl.arange(0, KP)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    split = tl.program_id(1)
    first = split * CHUNK
    acc = tl.zeros([BC, KP], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, T), BT, num_stages=STAGES):
        token = (start + tl.arange(0, BT)).to(tl.int64)
        inside = (token < T)[:, None]
        xv = tl.load(x + token[:, None] * ND + c[None, :], mask=inside & (c < ND)[None, :], other=0.0)
        scaled = tl.load(scaled_gradient + token[:, None] * KP + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(tl.trans(xv.to(scaled.dtype)), scaled, acc, input_precision=PRECISION)
    out = partial_w + split.to(tl.int64) * (K * ND)
    tl.store(out + k[None, :] * ND + c[:, None], acc, mask=(k < K)[None, :] & (c < ND)[:, None])


@functools.partial(triton.jit, do_not_specialize=["SPLITS", "PROGRAMS"])
def _finish_gradients(
    partial_w,
    partial,
    grad_weight,
    grad_bias,
    SPLITS,
    PROGRAMS,
    WIDTH: tl.constexpr,
    FOLDS: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SCALE: tl.constexpr,
    CENTRED: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """Add up the partial sums of one row of the weight's gradient, in a fixed order, and of the bias's.

    A layer norm subtracts the mean from every entry of a token, so its part is the same in the whole row. Equal streams
    that are held once have equal gradients: the row is written FOLDS times.
    """
    k = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    plain = tl.zeros([BP], tl.float32)
    means = tl.zeros([BP], tl.float32)
    for start in tl.range(0, PROGRAMS, BP):
        p = start + tl.arange(0, BP)
        place = partial + p * (2 * KP) + k
        plain += tl.load(place, mask=p < PROGRAMS, other=0.0)
        if CENTRED:
            means += tl.load(place + KP, mask=p < PROGRAMS, other=0.0)
    rows = tl.zeros([BS, BC], tl.float32)
    for start in tl.range(0, SPLITS, BS):
        split = start + tl.arange(0, BS)
        place = partial_w + (split * K + k).to(tl.int64)[:, None] * WIDTH + c[None, :]
        rows += tl.load(place, mask=(split < SPLITS)[:, None] & (c < WIDTH)[None, :], other=0.0)
    row = (tl.sum(rows, axis=0) - tl.sum(means, axis=0)) * SCALE
    for fold in tl.static_range(FOLDS):
        tl.store(grad_weight + (k.to(tl.int64) * FOLDS + fold) * WIDTH + c, row, mask=c < WIDTH)
    if tl.program_id(1) == 0:
        tl.store(grad_bias + k, tl.sum(plain, axis=0))


MOST_PARTS = 1024  # more partial sums than this are added up by PyTorch first, which uses the whole device


def _weight_columns(operand: torch.dtype, width: int) -> int:
    return min(128 if operand.itemsize == 2 else 64, max(16, power_of_two(width)))


@functools.cache
def _weight_launcher(spec: Spec, dtype: torch.dtype, operand: torch.dtype, width: int) -> tuple[Launcher, int]:
    kp, size = padded(spec.logits), operand.itemsize
    block, columns = 64 if size == 2 else 32, _weight_columns(operand, width)
    depth = stages(block * (columns + kp) * size, 3)
    constants = {"ND": width, "K": spec.logits, "KP": kp, "PRECISION": precision(operand)}
    return Launcher(_weight_backward, **constants, BT=block, BC=columns, STAGES=depth, num_warps=8), block


def cut_tokens(x: Tensor, tokens: int, operand: torch.dtype, width: int, spec: Spec) -> tuple[int, int]:
    """Return into how many stretches of tokens the weight's gradient is cut, and how long each is."""
    block = _weight_launcher(spec, x.dtype, operand, width)[1]
    slices = ceil_div(width, _weight_columns(operand, width))
    splits = max(1, min(2 * multiprocessors(x) // slices, ceil_div(tokens, block)))
    chunk = ceil_div(ceil_div(tokens, splits), block) * block
    return ceil_div(tokens, chunk), chunk


@functools.cache
def _finish_launcher(spec: Spec, width: int, folds: int) -> tuple[Launcher, int]:
    columns = min(128, power_of_two(width))
    constants = {"WIDTH": width, "FOLDS": folds, "K": spec.logits, "KP": padded(spec.logits), "SCALE": spec.scale}
    centred = spec.norm == "layer"
    return Launcher(_finish_gradients, **constants, CENTRED=centred, BC=columns, BP=512, BS=16, num_warps=4), columns


def parameters_backward(
    x: Tensor,
    scaled_gradient: BufferPart,
    partial: BufferPart,
    partial_w: BufferPart,
    counts: tuple[int, int, int],
    weight: Tensor,
    bias: Tensor,
    spec: Spec,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of weight and bias.

    Args:
        x: The streams. [..., n or 1, d]
        scaled_gradient: scale · gl of each token. [T, KP]
        partial: Sums over tokens of gl and of scale · mean · gl. [parts, 2, KP]
        partial_w: Room for the sums of the weight's gradient. [splits, K, width]
        counts: How many sums there are of the first and of the second kind, and over how many tokens the second go.
        weight, bias, spec: Of the connection.
    """
    parts, splits, chunk = counts
    width, operand = x.shape[-2] * spec.d, scaled_gradient.dtype
    columns = _weight_columns(operand, width)
    launcher, _ = _weight_launcher(spec, x.dtype, operand, width)
    launcher.launch((ceil_div(width, columns), splits), x, scaled_gradient, partial_w, count_tokens(x, spec.d), chunk)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
    sums: BufferPart | Tensor = partial
    if parts > MOST_PARTS:
        sums, parts = partial.tensor().view(parts, 2 * padded(spec.logits)).sum(0), 1
    finish, columns = _finish_launcher(spec, width, spec.n * spec.d // width)
    grid = (spec.logits, ceil_div(width, columns))
    finish.launch(grid, partial_w, sums, grad_weight, grad_bias, splits, parts)
    return grad_weight, grad_bias
