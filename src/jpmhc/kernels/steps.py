"""The host's side of the fused steps: allocate, launch, return. No autograd and no dispatcher here.

One connection is a read and a write of the same streams, and the streams' gradient has a part from each. Left to
autograd, the write would store Hᵀ grad, the read its own part, and a third kernel would add them. Here the read
returns, beside its results, a *link*: a tensor with the shape of n streams and memory for one number. The write takes
it in place of the streams, and what it sends back through it is the gradient of H x: the bare gradient of its output
or, with a post-norm, that of the streams before the norm. The read's derivative multiplies it by Hᵀ in the pass that
computes everything else.
"""

from torch import Tensor

from jpmhc.kernels import decode, projection, read_backward, stream_sums, write_to_read
from jpmhc.kernels.launch import aligned, count_tokens
from jpmhc.kernels.replay import replayed
from jpmhc.kernels.spec import Spec


def make_link(x: Tensor, streams: int) -> Tensor:
    """Make the tensor that carries the streams' gradient from the write to the read. [..., n, d]"""
    return x.new_empty_strided((*x.shape[:-2], streams, x.shape[-1]), (0,) * x.ndim)


def _read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h [..., d], the link, the coefficients [T or 1, n(n+2)], and what is kept for the derivative."""
    x, bias = aligned(x), aligned(bias)
    if weight is None:
        coef, kept = projection.project_static(bias, spec)
    else:
        coef, kept = projection.project_streams(x, weight, bias, spec)
    return stream_sums.combine(x, coef, spec), make_link(x, spec.n), coef, kept


def _read_backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor,
    coef: Tensor,
    kept: Tensor,
    grad_h: Tensor,
    grad_link: Tensor | None,
    grad_coef: Tensor,
    spec: Spec,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the streams, the weight (empty without one) and the bias.

    With `in_place` the streams' gradient takes the memory of `grad_link`, which nobody must need any more.
    """
    x, bias, grad_h, grad_coef = aligned(x), aligned(bias), aligned(grad_h), aligned(grad_coef)
    grad_link = None if grad_link is None else aligned(grad_link)
    if weight is None:
        grad_x = read_backward.streams_backward(x, grad_link, grad_h, None, coef, None, None, spec, in_place)
        grad_bias = read_backward.static_backward(x, bias, coef, kept, grad_h, grad_coef, spec)
        return grad_x, bias.new_empty(0), grad_bias
    return read_backward.dynamic_backward(x, weight, bias, coef, kept, grad_h, grad_link, grad_coef, spec, in_place)


@replayed
def write(x: Tensor, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Return the new streams [..., n, d], or their mean [..., d]."""
    return stream_sums.write(aligned(x), aligned(y), coef, spec, mean)


@replayed
def write_backward_step(
    grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, spec: Spec, mean: bool, pull: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the streams, of y and of the coefficients.

    Without `pull`, the first is the gradient of H x + w ⊗ y instead: the read's derivative will multiply it by Hᵀ.
    """
    return stream_sums.write_backward(aligned(grad), aligned(x), aligned(y), coef, spec, mean, pull)


def _write_read(
    x: Tensor, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the new streams, then what `read` returns for the connection that follows."""
    x, y, bias = aligned(x), aligned(y), aligned(bias)
    out, h, new, kept = write_to_read.write_to_read(x, y, coef, spec, weight, bias, following)
    return out, h, make_link(out, following.n), new, kept


@replayed
def write_read_backward_step(
    x: Tensor,
    y: Tensor,
    coef: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: Tensor,
    new: Tensor,
    kept: Tensor,
    grad_h: Tensor,
    grad_link: Tensor | None,
    grad_new: Tensor,
    grad_out: Tensor | None,
    linked: bool,
    spec: Spec,
    following: Spec,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the streams (of the link, where it is `linked`), y, coefficients, weight and bias."""
    grad, grad_weight, grad_bias = _read_backward(
        out, weight, bias, new, kept, grad_h, grad_link, grad_new, following, in_place
    )
    if grad_out is not None:
        grad += grad_out
    room = grad if linked and spec.post_norm else None
    grad_x, grad_y, grad_coef = stream_sums.write_backward(
        grad, aligned(x), aligned(y), coef, spec, False, not linked, room
    )
    return grad if grad_x is None else grad_x, grad_y, grad_coef, grad_weight, grad_bias


@replayed
def read_only(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Return h and the coefficients, where nothing will be differentiated."""
    if weight is not None and decode.are_few(count_tokens(x, spec.d)):
        return decode.read(x, weight, aligned(bias), spec)
    h, _, coef, _ = _read(x, weight, bias, spec)
    return h, coef


@replayed
def write_read_only(
    x: Tensor, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new streams, h and the coefficients of the next connection, where nothing will be differentiated."""
    if decode.are_few(count_tokens(x, spec.d)) and not spec.post_norm:
        return decode.write_read(x, y, coef, weight, aligned(bias), following)
    out, h, _, new, _ = _write_read(x, y, coef, spec, weight, bias, following)
    return out, h, new


# These three are parts of other steps too, which are replayed as a whole.
read, read_backward_step, write_read = replayed(_read), replayed(_read_backward), replayed(_write_read)
