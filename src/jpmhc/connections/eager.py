r"""The arithmetic of `reference.py` with a hand-written backward pass, for eager training on any device.

`compute_logits` and `gather` also return x. In the backward pass, one gradient tensor therefore goes from scatter to
gather to compute_logits, and each step adds its share in place. Autograd alone would allocate and add four tensors of
the size of x. On two cores, the hand-written pass makes a training step of one connection 40 % shorter. Compilers and
function transforms use the reference.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from jpmhc import modes, precision
from jpmhc.connections import reference
from jpmhc.connections.streams import flatten_streams

if TYPE_CHECKING:
    from jpmhc.connections.coefficients import Coefficients
    from jpmhc.connections.hyper import HyperConnection


class EagerState(NamedTuple):
    """The state that the eager form's read returns."""

    x: Tensor
    streams: Tensor  # the second result of `gather`, through which the write's gradient reaches the read. [T, n, d]
    coefficients: "Coefficients"

    def fits(self, block: "HyperConnection") -> bool:
        return self.streams.shape[1:] == (block.streams, block.dim)

    def gather(self, x: Tensor) -> Tensor:
        return reference.ReferenceState(x, self.coefficients).gather(x)

    def write(self, block: "HyperConnection", x: Tensor, y: Tensor, mean: bool) -> Tensor:
        if x is not self.x or not is_eager():
            return reference.ReferenceState(x, self.coefficients).write(block, x, y, mean)
        _, write, skip = self.coefficients
        y = reference.scale_output(block, y).reshape(-1, block.dim)
        out = scatter(self.streams, y, write, skip if block.mixer.mixes else None)
        return reference.finish_write(block, x, out, mean)

    def join(self, block: "HyperConnection", x: Tensor, following: "HyperConnection", delayed: bool = False) -> None:
        return None

    def make_rewrite(
        self, block: "HyperConnection", y: Tensor, following: "HyperConnection | None"
    ) -> Callable[[Tensor], Tensor]:
        mixes = block.mixer.mixes

        def step(x: Tensor, y: Tensor, write: Tensor, skip: Tensor) -> Tensor:
            return scatter(x, y, write, skip if mixes else None)

        return reference.repeat_scatter(block, y, self.coefficients, step)


def read(block: "HyperConnection", x: Tensor) -> tuple[Tensor, EagerState] | None:
    """Read the streams. Return the sublayer's input and the state, or None if this form does not apply."""
    if not applies(x, block.map.bias):
        return None
    flat = flatten_streams(x, block.streams, block.dim)
    coefficients, streams = block.map(flat, compute_logits)
    h, streams = gather(flat if streams is None else streams, coefficients.read)
    return h.reshape(*x.shape[:-2], block.dim), EagerState(x, streams, coefficients)


def applies(x: Tensor, coefficient: Tensor) -> bool:
    """Return whether the eager form can replace the reference for the types of the streams x and of a coefficient."""
    return x.dtype == torch.promote_types(coefficient.dtype, torch.float32) and is_eager()


def is_eager() -> bool:
    """Return whether autograd records plain operations now, without a compiler or a function transform."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not modes.is_transformed()


def compute_logits(x: Tensor, weight: Tensor, norm: str, eps: float = reference.EPS) -> tuple[Tensor, Tensor]:
    r"""Return the logits $W\,\mathrm{norm}(x)$ and x; the division by the norm follows the product (eq. fused-proj).

    Args:
        x: Streams. [T, n, d]
        weight: W, the projection. [K, n * d]
        norm: As in `reference.compute_logits`. No norm has weights, because W would absorb them.
    """
    return _run(_Project, x, weight, norm, eps)


def gather(x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sublayer's input Σ_j r_j x_j, with r = `read`, and x. [T, n, d], [T, n] → [T, d], [T, n, d]"""
    return _run(_Gather, x, read)


def scatter(x: Tensor, y: Tensor, write: Tensor, skip: Tensor | None) -> Tensor:
    """Return the new streams H x + w ⊗ y (eq. cayley-fwd), with w = `write` and H = `skip`; None is the identity."""
    # The result has x's type, whatever y's: the other steps of the backward pass add to its gradient in place.
    return _run(_Scatter, x, y.to(x.dtype), write, skip)


def _run(function: type[Function], x: Tensor, *others: Any) -> Any:
    with precision.without_autocast(x):
        return function.apply(x, *others)


def _asks_for_more(*gradients: Tensor | None) -> bool:
    """Return whether autograd wants a graph of the gradients, or several gradients batched in one tensor.

    In both cases no operation may be in place. `is_grads_batched` batches gradients, as in `jacobian(vectorize=True)`.
    """
    batched = torch._C._functorch.is_legacy_batchedtensor
    return torch.is_grad_enabled() or any(g is not None and batched(g) for g in gradients)


def _differentiable(
    plain: Callable[..., Tensor], inputs: tuple[Any, ...], gradient: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the inputs' gradients by autograd through the reference function `plain`, if `_asks_for_more` is true."""
    # Aliases, because one input may have been computed from another, and that path must not count here.
    with torch.enable_grad():
        given = [t.view_as(t) if isinstance(t, Tensor) else t for t in inputs]
    wanted = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    if gradient is None or not wanted:
        return (None,) * len(inputs)
    with torch.enable_grad():
        result = plain(*given)
    results = iter(torch.autograd.grad(result, wanted, gradient, create_graph=torch.is_grad_enabled()))
    return tuple(next(results) if isinstance(t, Tensor) and t.requires_grad else None for t in inputs)


def _total(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: str, eps: float) -> tuple[Tensor, Tensor]:
        flat = x.flatten(1)
        flat = reference.centre(flat) if norm == "layer" else flat
        square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
        scale = 1 / (square.sqrt() + eps) if norm == "rms_outside" else (square + eps).rsqrt()
        scale = torch.where(square < torch.inf, scale, torch.nan)
        logits = (flat @ weight.mT) * scale
        ctx.save_for_backward(x, weight, logits, scale)
        ctx.norm, ctx.eps = norm, eps
        ctx.set_materialize_grads(False)
        return logits, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, logits, scale = ctx.saved_tensors
        grad_logits, grad_x = gradients
        if grad_logits is None:
            return grad_x, None, None, None
        if _asks_for_more(*gradients):
            own = _differentiable(reference.compute_logits, (x, weight, ctx.norm, ctx.eps), grad_logits)
            return _total(grad_x, own[0]), own[1], None, None
        with precision.without_autocast(x):
            centred = ctx.norm == "layer"
            flat = reference.centre(x.flatten(1)) if centred else x.flatten(1)
            raw = grad_logits * scale
            along = -(grad_logits * logits).sum(-1, keepdim=True) * scale.square() / flat.shape[-1]
            if ctx.norm == "rms_outside":  # 1 - eps · scale is the share of the root in the divisor of x
                along = along / (1 - ctx.eps * scale).clamp(min=torch.finfo(scale.dtype).eps)
            grad_weight = raw.mT @ flat
            rows, columns = raw, weight
            if centred:
                # Centring subtracts one number from all entries of a token: one more term of the product.
                shift = -(raw @ weight.sum(-1, keepdim=True)) / flat.shape[-1]
                rows = torch.cat([raw, shift], -1)
                columns = torch.cat([weight, weight.new_ones(1, flat.shape[-1])])
            grad_flat = rows @ columns if grad_x is None else grad_x.flatten(1).addmm_(rows, columns)
            return grad_flat.addcmul_(flat, along).view_as(x), grad_weight, None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, read)
        ctx.set_materialize_grads(False)
        # Not a view, because sublayers may begin with an operation in place.
        h = x.new_empty(x.shape[0], x.shape[2])
        torch.bmm(read.unsqueeze(-2), x, out=h.unsqueeze(-2))
        return h, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, read = ctx.saved_tensors
        grad_h, grad_x = gradients
        if grad_h is None:
            return grad_x, None
        if _asks_for_more(*gradients):
            own = _differentiable(reference.gather, (x, read), grad_h)
            return _total(grad_x, own[0]), own[1]
        with precision.without_autocast(x):
            grad_read = torch.bmm(x, grad_h.unsqueeze(-1)).squeeze(-1)
            if grad_x is None:
                return torch.bmm(read.unsqueeze(-1), grad_h.unsqueeze(-2)), grad_read
            return grad_x.baddbmm_(read.unsqueeze(-1), grad_h.unsqueeze(-2)), grad_read


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, write: Tensor, skip: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, y, write, skip)
        # Not a matrix product: selective checkpointing saves products, and a saved tensor must not change.
        out = write.unsqueeze(-1) * y.unsqueeze(-2)
        return out.add_(x) if skip is None else out.baddbmm_(skip, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, write, skip = ctx.saved_tensors
        (grad,) = gradients
        if _asks_for_more(*gradients):
            mixed = (
                skip
                if skip is not None
                else torch.eye(x.shape[1], dtype=x.dtype, device=x.device).expand(len(x), -1, -1)
            )
            return _differentiable(reference.scatter, (x, y, write, mixed), grad)
        with precision.without_autocast(x):
            grad = grad.contiguous()
            grad_write = torch.bmm(grad, y.unsqueeze(-1)).squeeze(-1)
            grad_y = torch.bmm(write.unsqueeze(-2), grad).squeeze(-2)
            # A new tensor in either case, because the next steps of the backward pass add to it in place.
            grad_x = grad.clone() if skip is None else torch.bmm(skip.mT, grad)
            return grad_x, grad_y, grad_write, None if skip is None else torch.bmm(grad, x.mT)
