"""The fused steps with their derivatives: as autograd functions in eager mode, as operators under `torch.compile`.

Both forms share what they save and how they differentiate. The eager form calls the steps directly, because the
operators' dispatch would cost more time on the host than the steps themselves. Streams are [..., n or 1, d] here: to
line up the tokens outside would make autograd keep a node for every reshape.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from jpmhc.kernels import steps
from jpmhc.kernels.launch import buffer_bytes, count_tokens
from jpmhc.kernels.projection import kept_layout
from jpmhc.kernels.rows import gradient_room
from jpmhc.kernels.spec import Spec, find_spec

_LIBRARY = torch.library.Library("jpmhc", "FRAGMENT")


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return h [..., d], the link [..., n, d] (None without gradients) and the coefficients [T or 1, n(n+2)]."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled():
        h, coef = (
            torch.ops.jpmhc.read_only(x, weight, bias, spec.key)
            if compiling
            else steps.read_only(x, weight, bias, spec)
        )
        return h, None, coef
    if compiling:
        h, link, coef, _ = torch.ops.jpmhc.read(x, weight, bias, spec.key)
        return h, link, coef
    return _Read.apply(x, weight, bias, spec)


def write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Return the new streams [..., n, d], or their mean [..., d]."""
    if torch.compiler.is_compiling():
        return torch.ops.jpmhc.write(x, link, y, coef, spec.key, mean)
    if torch.is_grad_enabled():
        return _Write.apply(x, link, y, coef, spec, mean)
    return steps.write(x, y, coef, spec, mean)


def write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the new streams [..., n, d], and what `read` returns for the connection that follows."""
    compiling = torch.compiler.is_compiling()
    if not torch.is_grad_enabled():
        out, h, new = (
            torch.ops.jpmhc.write_read_only(x, y, coef, spec.key, weight, bias, following.key)
            if compiling
            else steps.write_read_only(x, y, coef, spec, weight, bias, following)
        )
        return out, h, None, new
    if compiling:
        return torch.ops.jpmhc.write_read(x, link, y, coef, spec.key, weight, bias, following.key)[:4]
    return _WriteRead.apply(x, link, y, coef, spec, weight, bias, following)


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
        found = _read_gradients(steps.read_backward_step, saved, ctx.spec, *gradients)
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
        found = _write_gradients(steps.write_backward_step, saved, gradients[0], ctx.linked, ctx.mean, ctx.spec)
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
        run = steps.write_read_backward_step
        found = _write_read_gradients(run, saved, gradients, ctx.linked, ctx.spec, ctx.following)
        grads = _first_derivatives_only(found, (*saved, *gradients))
        return *grads[:4], None, *grads[4:], None


def _write_read_gradients(
    run: Any, saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], linked: bool, spec: Any, following: Any
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of streams, link, y, coefficients, weight and bias, whichever of the four arrive."""
    grad_out, grad_h, grad_link, grad_new = gradients
    _, y, _, _, _, _, new, _ = saved
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
    x, weight, _, coef, _ = saved
    if grad_h is None:
        grad_h = x.new_zeros((*x.shape[:-2], x.shape[-1]))
    if grad_coef is None:
        grad_coef = torch.zeros_like(coef)
    grad_x, grad_weight, grad_bias = run(*saved, grad_h, grad_link, grad_coef, spec)
    return grad_x, None if weight is None else grad_weight, grad_bias


def _write_gradients(
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


# The operators that a compiled graph calls. Those that have a derivative are traced by it, and run as `NAME_plain`,
# which has none: at run time autograd's part would be a second way through the dispatcher.


_OPERATORS: list[str] = []


def _define(name: str, schema: str, run: Any, fake: Any) -> None:
    for name_ in (name, f"{name}_plain"):
        _LIBRARY.define(f"{name_}{schema}")
        _LIBRARY.impl(name_, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"jpmhc::{name_}", fake, lib=_LIBRARY)
    _LIBRARY.impl(f"{name}_plain", torch.library.fallthrough_kernel, "Autograd")
    _OPERATORS.append(name)


def _fake_read(x: Tensor, weight: Tensor | None, bias: Tensor, key: str) -> tuple[Tensor, ...]:
    spec = find_spec(key)
    tokens, width = (0, 0) if weight is None else (count_tokens(x, spec.d), x.shape[-2] * spec.d)
    kept = buffer_bytes(kept_layout(tokens, width, bias.dtype if weight is None else x.dtype, spec))
    return (
        x.new_empty((*x.shape[:-2], spec.d)),
        steps.make_link(x, spec.n),
        bias.new_empty(1 if weight is None else tokens, spec.coefficients),
        x.new_empty(kept, dtype=torch.uint8),
    )


_define(
    "read",
    "(Tensor x, Tensor? weight, Tensor bias, str key) -> (Tensor h, Tensor link, Tensor coef, Tensor kept)",
    lambda x, weight, bias, key: steps.read(x, weight, bias, find_spec(key)),
    _fake_read,
)


def _fake_read_backward(x: Tensor, weight: Tensor | None, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    grad_weight = bias.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), grad_weight, bias.new_empty(bias.shape)


_define(
    "read_backward",
    "(Tensor x, Tensor? weight, Tensor bias, Tensor coef, Tensor kept, Tensor grad_h, Tensor? grad_link,"
    " Tensor grad_coef, str key) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    lambda *given: steps.read_backward_step(*given[:-1], find_spec(given[-1])),  # type: ignore[call-arg]
    _fake_read_backward,
)


def _fake_write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, mean: bool) -> Tensor:
    return x.new_empty(y.shape if mean else (*y.shape[:-1], find_spec(key).n, y.shape[-1]))


_define(
    "write",
    "(Tensor x, Tensor? link, Tensor y, Tensor coef, str key, bool mean) -> Tensor",
    lambda x, link, y, coef, key, mean: steps.write(x, y, coef, find_spec(key), mean),
    _fake_write,
)


def _fake_write_backward(
    grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, key: str, mean: bool, pull: bool
) -> tuple[Tensor, ...]:
    room = gradient_room(x, find_spec(key), mean, pull)
    return x.new_empty(0) if room is None else room, y.new_empty(y.shape), torch.empty_like(coef)


def _run_write_backward(
    grad: Tensor, x: Tensor, y: Tensor, coef: Tensor, key: str, mean: bool, pull: bool
) -> tuple[Tensor, ...]:
    found, grad_y, grad_coef = steps.write_backward_step(grad, x, y, coef, find_spec(key), mean, pull)
    return x.new_empty(0) if found is None else found, grad_y, grad_coef  # an operator cannot return None


_define(
    "write_backward",
    "(Tensor grad, Tensor x, Tensor y, Tensor coef, str key, bool mean, bool pull) -> (Tensor, Tensor, Tensor)",
    _run_write_backward,
    _fake_write_backward,
)


def _fake_write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, key: str, weight: Tensor, bias: Tensor, following: str
) -> tuple[Tensor, ...]:
    spec = find_spec(following)
    out = x.new_empty((*y.shape[:-1], spec.n, spec.d))
    return out, *_fake_read(out, weight, bias, following)


_define(
    "write_read",
    "(Tensor x, Tensor? link, Tensor y, Tensor coef, str key, Tensor weight, Tensor bias, str following)"
    " -> (Tensor out, Tensor h, Tensor new_link, Tensor new, Tensor kept)",
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
    "(Tensor x, Tensor y, Tensor coef, Tensor out, Tensor weight, Tensor bias, Tensor new, Tensor kept,"
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
    lambda x, weight, bias, key: _fake_read(x, weight, bias, key)[0:3:2],
)
_define(
    "write_read_only",
    "(Tensor x, Tensor y, Tensor coef, str key, Tensor weight, Tensor bias, str following)"
    " -> (Tensor out, Tensor h, Tensor new)",
    lambda x, y, coef, key, weight, bias, following: steps.write_read_only(
        x, y, coef, find_spec(key), weight, bias, find_spec(following)
    ),
    lambda x, y, coef, key, weight, bias, following: (
        (found := _fake_write_read(x, None, y, coef, key, weight, bias, following))[0:2] + found[3:4]
    ),
)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.key = inputs[3]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output[2:])


def _read_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    run = torch.ops.jpmhc.read_backward
    return *_read_gradients(run, ctx.saved_tensors, ctx.key, *gradients[:3]), None


def _save_write(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, link, y, coef, ctx.key, ctx.mean = inputs
    ctx.linked = link is not None
    ctx.save_for_backward(x, y, coef)


def _write_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    def run(*given: Any) -> tuple[Tensor | None, ...]:
        found, *others = torch.ops.jpmhc.write_backward(*given)
        return None if gradient_room(given[1], find_spec(ctx.key), *given[-2:]) is None else found, *others

    return *_write_gradients(run, ctx.saved_tensors, grad, ctx.linked, ctx.mean, ctx.key), None, None


def _save_write_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, link, y, coef, ctx.key, weight, bias, ctx.following = inputs
    ctx.linked = link is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, coef, output[0], weight, bias, *output[3:])


def _write_read_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    run = torch.ops.jpmhc.write_read_backward
    found = _write_read_gradients(run, ctx.saved_tensors, gradients[:4], ctx.linked, ctx.key, ctx.following)
    return *found[:4], None, *found[4:], None


for _name, _backward, _save in (
    ("read", _read_backward, _save_read),
    ("write", _write_backward, _save_write),
    ("write_read", _write_read_backward, _save_write_read),
):
    torch.library.register_autograd(f"jpmhc::{_name}", _backward, setup_context=_save, lib=_LIBRARY)


def declare_to_inductor() -> None:
    """Tell Inductor which operators to call for ours, and that it calls them as they are.

    Otherwise it decides so when it meets one for the first time, and torch 2.11 then writes the whole expression behind
    the operator's arguments into a log line that nobody reads, in time exponential in the depth of the model.
    """
    from torch._inductor import lowering

    for name in _OPERATORS:
        operator = getattr(torch.ops.jpmhc, name).default
        if operator not in lowering.lowerings:
            plain = getattr(torch.ops.jpmhc, f"{name}_plain").default
            lowering.make_fallback(operator, warn=False)
            lowering.register_lowering(operator, type_promotion_kind=None)(lowering.fallback_handler(plain))
