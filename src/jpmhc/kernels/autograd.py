"""The fused steps with their derivatives as autograd functions, for eager mode; operators.py has them for compilers.

Both forms share what they save and how they differentiate. The eager form calls the steps directly, because the
operators' dispatch would cost more time on the host than the steps themselves. Streams are [..., n or 1, d] here: to
line up the tokens outside would make autograd keep a node for every reshape.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from jpmhc.kernels import steps
from jpmhc.kernels.spec import Spec


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return h [..., d], the link [..., n, d] (None without gradients) and the coefficients [T or 1, n(n+2)]."""
    if torch.is_grad_enabled():
        return _Read.apply(x, weight, bias, spec)
    h, coef = steps.read_only(x, weight, bias, spec)
    return h, None, coef


def write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Return the new streams [..., n, d], or their mean [..., d]."""
    if torch.is_grad_enabled():
        return _Write.apply(x, link, y, coef, spec, mean)
    return steps.write(x, y, coef, spec, mean)


def write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the new streams [..., n, d], and what `read` returns for the connection that follows."""
    if torch.is_grad_enabled():
        return _WriteRead.apply(x, link, y, coef, spec, weight, bias, following)
    out, h, new = steps.write_read_only(x, y, coef, spec, weight, bias, following)
    return out, h, None, new


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, ...]:
        h, link, coef, kept = steps.read(x, weight, bias, spec)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, coef, kept)
        ctx.spec = spec
        return h, link, coef

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing unpacks them a single time
        found = read_gradients(_in_place_of_link(steps.read_backward_step, ctx.spec), saved, ctx.spec, *gradients)
        return *_first_derivatives_only(found, (*saved, *gradients)), None


class _Write(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
        ctx.save_for_backward(x, y, coef)
        ctx.linked, ctx.spec, ctx.mean = link is not None, spec, mean
        return steps.write(x, y, coef, spec, mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        found = write_gradients(steps.write_backward_step, saved, gradients[0], ctx.linked, ctx.mean, ctx.spec)
        return *_first_derivatives_only(found, (*saved, *gradients)), None, None


class _WriteRead(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        link: Tensor | None,
        y: Tensor,
        coef: Tensor,
        spec: Spec,
        weight: Tensor,
        bias: Tensor,
        following: Spec,
    ) -> tuple[Tensor, ...]:
        out, h, new_link, new, kept = steps.write_read(x, y, coef, spec, weight, bias, following)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, coef, out, weight, bias, new, kept)
        ctx.linked, ctx.spec, ctx.following = link is not None, spec, following
        return out, h, new_link, new

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        run = _in_place_of_link(steps.write_read_backward_step, ctx.following)
        found = write_read_gradients(run, saved, gradients, ctx.linked, ctx.spec, ctx.following)
        grads = _first_derivatives_only(found, (*saved, *gradients))
        return *grads[:4], None, *grads[4:], None


def _in_place_of_link(step: Callable[..., Any], spec: Spec) -> Callable[..., Any]:
    """Let a step of a read's derivative put its result where the link's gradient is, if that is this module's own.

    After a post-norm the write has made it for the read alone; without one it is the gradient of what the write
    returned, which others may hold. An operator must not change its arguments, so that only eager mode does this.
    """
    return lambda *given: step(*given, spec.post_norm)


def write_read_gradients(
    run: Any, saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], linked: bool, spec: Any, following: Any
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of streams, link, y, coefficients, weight and bias, whichever of the four arrive."""
    grad_out, grad_h, grad_link, grad_new = gradients
    _, y, _, _, _, _, new, _ = saved
    grad_h = torch.zeros_like(y) if grad_h is None else grad_h
    grad_new = torch.zeros_like(new) if grad_new is None else grad_new
    grad_x, *others = run(*saved, grad_h, grad_link, grad_new, grad_out, linked, spec, following)
    return (None, grad_x, *others) if linked else (grad_x, None, *others)


def read_gradients(
    run: Any,
    saved: tuple[Tensor, ...],
    spec: Any,
    grad_h: Tensor | None,
    grad_link: Tensor | None,
    grad_coef: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute what read's derivative returns, whichever of its three gradients arrive."""
    x, weight, _, coef, _ = saved
    if grad_h is None:
        grad_h = x.new_zeros((*x.shape[:-2], x.shape[-1]))
    if grad_coef is None:
        grad_coef = torch.zeros_like(coef)
    grad_x, grad_weight, grad_bias = run(*saved, grad_h, grad_link, grad_coef, spec)
    return grad_x, None if weight is None else grad_weight, grad_bias


def write_gradients(
    run: Any, saved: tuple[Tensor, ...], grad: Tensor, linked: bool, mean: bool, spec: Any
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute the gradients of the streams, the link, y and the coefficients."""
    x, y, coef = saved
    grad_x, grad_y, grad_coef = run(grad, x, y, coef, spec, mean, not linked)
    if not linked:
        return grad_x, None, grad_y, grad_coef
    return None, grad if grad_x is None else grad_x, grad_y, grad_coef


class _Refuse(Function):
    """Passes gradients through as functions of what they were computed from, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError('the fused kernels have no second derivatives; kernels="reference" does')


def _first_derivatives_only(
    gradients: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients; where someone keeps their graph, in a form that refuses a second derivative."""
    return _Refuse.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else gradients
