"""The fused steps with their derivatives: as autograd functions in eager mode, as operators under `torch.compile`.

Both forms share what they save and how they differentiate. The eager form calls the steps directly, because the
operators' dispatch would cost more time on the host than the steps themselves.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from jpmhc.kernels import rows, steps
from jpmhc.kernels.launch import padded
from jpmhc.kernels.spec import Spec, find_spec

_LIBRARY = torch.library.Library("jpmhc", "FRAGMENT")
_SMALL = "Tensor logits, Tensor stats, Tensor coef, Tensor prepared, Tensor sums"


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return h [T, d], the link [T, n, d] (None without gradients) and the coefficients [T or 1, n(n+2)]."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled():
        h, coef = (
            torch.ops.jpmhc.read_only(x, weight, bias, spec.key)
            if compiling
            else steps.read_only(x, weight, bias, spec)
        )
        return h, None, coef
    if compiling:
        out = torch.ops.jpmhc.read(x, weight, bias, spec.key)
        return out[0], out[1], out[4]
    return _Read.apply(x, weight, bias, spec)


def write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Return the new streams [T, n, d], or their mean [T, 1, d]."""
    if torch.compiler.is_compiling():
        return torch.ops.jpmhc.write(x, link, y, coef, spec.key, mean)
    if torch.is_grad_enabled():
        return _Write.apply(x, link, y, coef, spec, mean)
    return steps.write(x, y, coef, spec, mean)


def write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the new streams [T, n, d], and what `read` returns for the connection that follows."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled():
        out, h, new = (
            torch.ops.jpmhc.write_read_only(x, y, coef, spec.key, weight, bias, following.key)
            if compiling
            else steps.write_read_only(x, y, coef, spec, weight, bias, following)
        )
        return out, h, None, new
    if compiling:
        found = torch.ops.jpmhc.write_read(x, link, y, coef, spec.key, weight, bias, following.key)
        return found[0], found[1], found[2], found[5]
    return _WriteRead.apply(x, link, y, coef, spec, weight, bias, following)


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, ...]:
        h, link, *small = steps.read(x, weight, bias, spec)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, *small)
        ctx.spec = spec
        return h, link, small[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing unpacks them a single time
        found = _read_gradients(steps.read_backward_step, saved, ctx.spec, *gradients)
        return *_first_derivatives_only(found, (*saved, *gradients)), None


class _Write(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
        ctx.save_for_backward(x, y, coef)
        ctx.linked, ctx.spec = link is not None, spec
        return steps.write(x, y, coef, spec, mean)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        found = _write_gradients(steps.write_backward_step, saved, gradients[0], ctx.linked, ctx.spec, ctx.spec)
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
        out, h, new_link, *small = steps.write_read(x, y, coef, spec, weight, bias, following)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, coef, out, weight, bias, *small)
        ctx.linked, ctx.spec, ctx.following = link is not None, spec, following
        return out, h, new_link, small[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        run = steps.write_read_backward_step
        found = _write_read_gradients(run, saved, gradients, ctx.linked, ctx.spec, ctx.following)
        grads = _first_derivatives_only(found, (*saved, *gradients))
        return *grads[:4], None, *grads[4:], None


def _write_read_gradients(
    run: Any, saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], linked: bool, spec: Any, following: Any
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of streams, link, y, coefficients, weight and bias, whichever of the four arrive."""
    grad_out, grad_h, grad_link, grad_new = gradients
    y, new = saved[1], saved[8]
    grad_h = torch.zeros_like(y) if grad_h is None else grad_h
    grad_new = torch.zeros_like(new) if grad_new is None else grad_new
    grad_x, *others = run(*saved, grad_h, grad_link, grad_new, grad_out, linked, spec, following)
    return (None, grad_x, *others) if linked else (grad_x, None, *others)


def _read_gradients(
    run: Any,
    saved: tuple[Tensor, ...],
    spec: Any,
    grad_h: Tensor | None,
    grad_link: Tensor | None,
    grad_coef: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute what read's derivative returns, whichever of its three gradients arrive."""
    x, weight, _, _, _, coef = saved[:6]
    if grad_h is None:
        grad_h = x.new_zeros(x.shape[0], x.shape[2])
    if grad_coef is None:
        grad_coef = torch.zeros_like(coef)
    grad_x, grad_weight, grad_bias = run(*saved, grad_h, grad_link, grad_coef, spec)
    return grad_x, None if weight is None else grad_weight, grad_bias


def _write_gradients(
    run: Any, saved: tuple[Tensor, ...], grad: Tensor, linked: bool, spec: Spec, name: Any
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute the gradients of the streams, the link, y and the coefficients."""
    x, y, coef = saved
    grad_x, grad_y, grad_coef = run(grad, x, y, coef, name, not linked)
    if not linked:
        return grad_x, None, grad_y, grad_coef
    return None, grad_x if rows.differs(grad, spec) else grad, grad_y, grad_coef


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


# The operators that a compiled graph calls. Autograd's part of them is traced away when the graph is made.


_OPERATORS: list[str] = []


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    _OPERATORS.append(name)
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jpmhc::{name}", fake, lib=_LIBRARY)


def _fake_small(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, ...]:
    if weight is None:
        shapes = (1, spec.logits), (0, 2), (1, spec.coefficients), (0,), (0,)
        return tuple(bias.new_empty(shape) for shape in shapes)
    height = padded(spec.logits)
    return (
        *(bias.new_empty(x.shape[0], size) for size in (spec.logits, 2, spec.coefficients)),
        x.new_empty(height, x.shape[1] * spec.d),
        bias.new_empty(height),
    )


def _fake_read(x: Tensor, weight: Tensor | None, bias: Tensor, key: str) -> tuple[Tensor, ...]:
    spec = find_spec(key)
    return x.new_empty(x.shape[0], spec.d), steps.link(x, spec.n), *_fake_small(x, weight, bias, spec)


_define(
    "read",
    f"(Tensor x, Tensor? weight, Tensor bias, str key) -> (Tensor h, Tensor link, {_SMALL})",
    lambda x, weight, bias, key: steps.read(x, weight, bias, find_spec(key)),
    _fake_read,
)


def _fake_read_backward(x: Tensor, weight: Tensor | None, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    grad_weight = bias.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), grad_weight, bias.new_empty(bias.shape)


_define(
    "read_backward",
    f"(Tensor x, Tensor? weight, Tensor bias, {_SMALL}, Tensor grad_h, Tensor? grad_link, Tensor grad_coef, str key)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    lambda *given: steps.read_backward_step(*given[:-1], find_spec(given[-1])),  # type: ignore[call-arg]
    _fake_read_backward,
)


def _fake_write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, mean: bool) -> Tensor:
    return x.new_empty(x.shape[0], 1 if mean else find_spec(key).n, x.shape[2])


_define(
    "write",
    "(Tensor x, Tensor? link, Tensor y, Tensor coef, str key, bool mean) -> Tensor",
    lambda x, link, y, coef, key, mean: steps.write(x, y, coef, find_spec(key), mean),
    _fake_write,
)


def _fake_write_backward(grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, key: str, pull: bool) -> tuple[Tensor, ...]:
    return rows.gradient_room(grad, x, find_spec(key), pull), y.new_empty(y.shape), torch.empty_like(coef)


_define(
    "write_backward",
    "(Tensor grad, Tensor x, Tensor y, Tensor coef, str key, bool pull) -> (Tensor, Tensor, Tensor)",
    lambda grad, x, y, coef, key, pull: steps.write_backward_step(grad, x, y, coef, find_spec(key), pull),
    _fake_write_backward,
)


def _fake_write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, weight: Tensor, bias: Tensor, following: str
) -> tuple[Tensor, ...]:
    spec = find_spec(following)
    out = x.new_empty(x.shape[0], spec.n, spec.d)
    return out, *_fake_read(out, weight, bias, following)


_define(
    "write_read",
    "(Tensor x, Tensor? link, Tensor y, Tensor coef, str key, Tensor weight, Tensor bias, str following)"
    f" -> (Tensor out, Tensor h, Tensor new_link, {_SMALL})",
    lambda x, link, y, coef, key, weight, bias, following: steps.write_read(
        x, y, coef, find_spec(key), weight, bias, find_spec(following)
    ),
    _fake_write_read,
)


def _fake_write_read_backward(
    x: Tensor, y: Tensor, coef: Tensor, out: Tensor, weight: Tensor, bias: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    linked = others[-3]
    first = out.new_empty(out.shape) if linked else x.new_empty(x.shape)
    return (
        first,
        y.new_empty(y.shape),
        torch.empty_like(coef),
        weight.new_empty(weight.shape),
        bias.new_empty(bias.shape),
    )


_define(
    "write_read_backward",
    f"(Tensor x, Tensor y, Tensor coef, Tensor out, Tensor weight, Tensor bias, {_SMALL.replace('coef', 'new')},"
    " Tensor grad_h, Tensor? grad_link, Tensor grad_new, Tensor? grad_out, bool linked, str key, str following)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *given: steps.write_read_backward_step(  # type: ignore[call-arg]
        *given[:-2], find_spec(given[-2]), find_spec(given[-1])
    ),
    _fake_write_read_backward,
)
_define(
    "read_only",
    "(Tensor x, Tensor? weight, Tensor bias, str key) -> (Tensor h, Tensor coef)",
    lambda x, weight, bias, key: steps.read_only(x, weight, bias, find_spec(key)),
    lambda x, weight, bias, key: (found := _fake_read(x, weight, bias, key))[0:1] + found[4:5],
)
_define(
    "write_read_only",
    "(Tensor x, Tensor y, Tensor coef, str key, Tensor weight, Tensor bias, str following)"
    " -> (Tensor out, Tensor h, Tensor new)",
    lambda x, y, coef, key, weight, bias, following: steps.write_read_only(
        x, y, coef, find_spec(key), weight, bias, find_spec(following)
    ),
    lambda x, y, coef, key, weight, bias, following: (
        (found := _fake_write_read(x, None, y, coef, key, weight, bias, following))[0:2] + found[5:6]
    ),
)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.key = inputs[3]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[2:])


def _read_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    grad_h, grad_link, grad_coef = gradients[0], gradients[1], gradients[4]
    run = torch.ops.jpmhc.read_backward
    return *_read_gradients(run, ctx.saved_tensors, ctx.key, grad_h, grad_link, grad_coef), None


def _save_write(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, link, y, coef, ctx.key, _ = inputs
    ctx.linked = link is not None
    ctx.save_for_backward(x, y, coef)


def _write_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    run = torch.ops.jpmhc.write_backward
    return *_write_gradients(run, ctx.saved_tensors, grad, ctx.linked, find_spec(ctx.key), ctx.key), None, None


def _save_write_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, link, y, coef, ctx.key, weight, bias, ctx.following = inputs
    ctx.linked = link is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, coef, output[0], weight, bias, *output[3:])


def _write_read_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    used = (*gradients[:3], gradients[5])
    run = torch.ops.jpmhc.write_read_backward
    found = _write_read_gradients(run, ctx.saved_tensors, used, ctx.linked, ctx.key, ctx.following)
    return *found[:4], None, *found[4:], None


for _name, _backward, _save in (
    ("read", _read_backward, _save_read),
    ("write", _write_backward, _save_write),
    ("write_read", _write_read_backward, _save_write_read),
):
    torch.library.register_autograd(f"jpmhc::{_name}", _backward, setup_context=_save, lib=_LIBRARY)


def declare_to_inductor() -> None:
    """Tell Inductor that it calls the operators as they are.

    Otherwise it decides so when it meets one for the first time, and torch 2.11 then writes the whole expression behind
    the operator's arguments into a log line that nobody reads, in time exponential in the depth of the model.
    """
    from torch._inductor import lowering

    for name in _OPERATORS:
        operator = getattr(torch.ops.jpmhc, name).default
        if operator not in lowering.lowerings:
            lowering.make_fallback(operator, warn=False)
