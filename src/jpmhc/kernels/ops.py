"""The fused steps as PyTorch operators, with shapes for tracing and derivatives.

One connection is a read and a write of the same streams, and the streams' gradient has a part from each. Left to
autograd, the write would store Hᵀ grad, the read its own part, and a third kernel would add them. Here the read
returns, beside its results, a *link*: a tensor with the shape of n streams and one number of memory. The write takes it
in place of the streams, and what it sends back through it is the gradient of H x: the bare gradient of its output or,
with a post-norm, that of the streams before the norm. The read's derivative multiplies it by Hᵀ in the pass that
computes everything else.
"""

import torch
from torch import Tensor

from jpmhc.kernels import projection, read_backward, rows, write_to_read
from jpmhc.kernels.spec import find_spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COEFFICIENT_DTYPE = torch.float32


def _link(x: Tensor, streams: int) -> Tensor:
    return x.new_empty(()).expand(x.shape[0], streams, x.shape[2])


@torch.library.custom_op("jpmhc::read", mutates_args=())
def read_op(x: Tensor, weight: Tensor | None, bias: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    spec = find_spec(key)
    x = x.contiguous()
    if weight is None:
        small = projection.project_static(bias, spec)
    else:
        small = projection.project(x, weight.contiguous(), bias, spec)
    return rows.combine(x, small[2], spec), _link(x, spec.n), *small


@read_op.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor, key: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    spec = find_spec(key)
    tokens = x.shape[0] if weight is not None else 1
    statistics = bias.new_empty(tokens if weight is not None else 0, 2)
    return (
        x.new_empty(x.shape[0], spec.d),
        _link(x, spec.n),
        bias.new_empty(tokens, spec.logits),
        statistics,
        bias.new_empty(tokens, spec.coefficients),
    )


@torch.library.custom_op("jpmhc::read_backward", mutates_args=())
def read_backward_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    logits: Tensor,
    stats: Tensor,
    coef: Tensor,
    grad_h: Tensor,
    grad_link: Tensor | None,
    grad_coef: Tensor,
    key: str,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = find_spec(key)
    x = x.contiguous()
    grad_h, grad_coef = grad_h.contiguous(), grad_coef.contiguous()
    grad_link = None if grad_link is None else grad_link.contiguous()
    weight = None if weight is None else weight.contiguous()
    prepared, left, affine, grad_bias, shift = read_backward.logits_backward(
        x, weight, bias, logits, stats, coef, grad_h, grad_coef, spec
    )
    grad_x = read_backward.streams_backward(x, grad_link, grad_h, prepared, coef, left, affine, spec)
    if weight is None:
        return grad_x, bias.new_empty(0), grad_bias
    return grad_x, read_backward.weight_backward(x, left, shift, spec), grad_bias.clone()


@read_backward_op.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    logits: Tensor,
    stats: Tensor,
    coef: Tensor,
    grad_h: Tensor,
    grad_link: Tensor | None,
    grad_coef: Tensor,
    key: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weight = (
        bias.new_empty(0) if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format), grad_weight, torch.empty_like(bias)


def _no_second_derivative(ctx, *gradients):
    raise RuntimeError('the fused kernels have no second derivatives; kernels="reference" does')


read_backward_op.register_autograd(_no_second_derivative)


def _save_read(ctx, inputs, output) -> None:
    x, weight, bias, ctx.key = inputs
    _, _, logits, stats, coef = output
    ctx.mark_non_differentiable(logits, stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, logits, stats, coef)


def _read_gradients(saved, grad_h, grad_link, grad_coef, key):
    """What read's derivative returns, whichever of its three gradients arrive."""
    x, weight, bias, logits, stats, coef = saved
    if grad_h is None:
        grad_h = x.new_zeros(x.shape[0], x.shape[2])
    if grad_coef is None:
        grad_coef = torch.zeros_like(coef)
    grad_x, grad_weight, grad_bias = read_backward_op(
        x, weight, bias, logits, stats, coef, grad_h, grad_link, grad_coef, key
    )
    return grad_x, None if weight is None else grad_weight, grad_bias


def _read_backward(ctx, grad_h, grad_link, grad_logits, grad_stats, grad_coef):
    return *_read_gradients(ctx.saved_tensors, grad_h, grad_link, grad_coef, ctx.key), None


read_op.register_autograd(_read_backward, setup_context=_save_read)


@torch.library.custom_op("jpmhc::write", mutates_args=())
def write_op(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, mean: bool) -> Tensor:
    return rows.write(x.contiguous(), y.contiguous(), coef, find_spec(key), mean)


@write_op.register_fake
def _(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, mean: bool) -> Tensor:
    return x.new_empty(x.shape[0], 1 if mean else find_spec(key).n, x.shape[2])


@torch.library.custom_op("jpmhc::write_backward", mutates_args=())
def write_backward_op(
    grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, key: str, pull: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return rows.write_backward(grad.contiguous(), x.contiguous(), y.contiguous(), coef, find_spec(key), pull)


@write_backward_op.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, key: str, pull: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = rows.gradient_room(grad, x, find_spec(key), pull)
    return grad_x, y.new_empty(y.shape), torch.empty_like(coef)


write_backward_op.register_autograd(_no_second_derivative)


def _save_write(ctx, inputs, output) -> None:
    x, link, y, coef, ctx.key, _ = inputs
    ctx.linked = link is not None
    ctx.save_for_backward(x, y, coef)


def _write_gradients(saved, grad, linked, key):
    """Gradients of the streams, the link, y and the coefficients."""
    x, y, coef = saved
    grad_x, grad_y, grad_coef = write_backward_op(grad, x, y, coef, key, not linked)
    if not linked:
        return grad_x, None, grad_y, grad_coef
    return None, grad_x if rows.differs(grad, find_spec(key)) else grad, grad_y, grad_coef


def _write_backward(ctx, grad):
    return *_write_gradients(ctx.saved_tensors, grad, ctx.linked, ctx.key), None, None


write_op.register_autograd(_write_backward, setup_context=_save_write)


@torch.library.custom_op("jpmhc::write_read", mutates_args=())
def write_read_op(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, weight: Tensor, bias: Tensor, next_key: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, h, logits, stats, new = write_to_read.write_to_read(
        x.contiguous(), y.contiguous(), coef, find_spec(key), weight.contiguous(), bias, find_spec(next_key)
    )
    return out, h, _link(out, out.shape[1]), logits, stats, new


@write_read_op.register_fake
def _(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, weight: Tensor, bias: Tensor, next_key: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, spec = x.shape[0], find_spec(next_key)
    out = x.new_empty(tokens, spec.n, spec.d)
    return (
        out,
        x.new_empty(tokens, spec.d),
        _link(out, spec.n),
        bias.new_empty(tokens, spec.logits),
        bias.new_empty(tokens, 2),
        bias.new_empty(tokens, spec.coefficients),
    )


def _save_write_read(ctx, inputs, output) -> None:
    x, link, y, coef, ctx.key, weight, bias, ctx.next_key = inputs
    out, _, _, logits, stats, new = output
    ctx.linked = link is not None
    ctx.mark_non_differentiable(logits, stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, coef, out, weight, bias, logits, stats, new)


def _write_read_backward(ctx, grad_out, grad_h, grad_link, grad_logits, grad_stats, grad_new):
    saved = ctx.saved_tensors  # once: activation checkpointing unpacks them a single time
    written, read = saved[:3], saved[3:]
    grad, grad_weight, grad_bias = _read_gradients(read, grad_h, grad_link, grad_new, ctx.next_key)
    if grad_out is not None:
        grad = grad + grad_out
    return *_write_gradients(written, grad, ctx.linked, ctx.key), None, grad_weight, grad_bias, None


write_read_op.register_autograd(_write_read_backward, setup_context=_save_write_read)
