"""The fused steps with their derivatives as operators, which `torch.compile` puts into its graphs.

Those that have a derivative are traced by it, and run as `NAME_plain`, which has none: at run time autograd's part
would be a second way through the dispatcher. A connection's `Spec` passes through as its key.
"""

from typing import Any

import torch
from torch import Tensor

from jpmhc.kernels import steps
from jpmhc.kernels.autograd import read_gradients, write_gradients, write_read_gradients
from jpmhc.kernels.launch import buffer_bytes, count_tokens
from jpmhc.kernels.projection import kept_layout
from jpmhc.kernels.spec import Spec, find_spec
from jpmhc.kernels.stream_sums import gradient_room

_LIBRARY = torch.library.Library("jpmhc", "FRAGMENT")
_OPERATORS: list[str] = []


def read(x: Tensor, weight: Tensor | None, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None, Tensor]:
    """Do what `autograd.read` does, as an operator."""
    if torch.is_grad_enabled():
        h, link, coef, _ = torch.ops.jpmhc.read(x, weight, bias, spec.key)
        return h, link, coef
    h, coef = torch.ops.jpmhc.read_only(x, weight, bias, spec.key)
    return h, None, coef


def write(x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, mean: bool) -> Tensor:
    """Do what `autograd.write` does, as an operator."""
    return torch.ops.jpmhc.write(x, link, y, coef, spec.key, mean)


def write_read(
    x: Tensor, link: Tensor | None, y: Tensor, coef: Tensor, spec: Spec, weight: Tensor, bias: Tensor, following: Spec
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Do what `autograd.write_read` does, as an operator."""
    if torch.is_grad_enabled():
        return torch.ops.jpmhc.write_read(x, link, y, coef, spec.key, weight, bias, following.key)[:4]
    out, h, new = torch.ops.jpmhc.write_read_only(x, y, coef, spec.key, weight, bias, following.key)
    return out, h, None, new


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
    lambda *given: steps.read_backward_step(*given[:-1], find_spec(given[-1])),
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
    lambda *given: steps.write_read_backward_step(*given[:-2], find_spec(given[-2]), find_spec(given[-1])),
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
    return *read_gradients(run, ctx.saved_tensors, ctx.key, *gradients[:3]), None


def _save_write(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, link, y, coef, ctx.key, ctx.mean = inputs
    ctx.linked = link is not None
    ctx.save_for_backward(x, y, coef)


def _write_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    def run(*given: Any) -> tuple[Tensor | None, ...]:
        found, *others = torch.ops.jpmhc.write_backward(*given)
        return None if gradient_room(given[1], find_spec(ctx.key), *given[-2:]) is None else found, *others

    return *write_gradients(run, ctx.saved_tensors, grad, ctx.linked, ctx.mean, ctx.key), None, None


def _save_write_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, link, y, coef, ctx.key, weight, bias, ctx.following = inputs
    ctx.linked = link is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, y, coef, output[0], weight, bias, *output[3:])


def _write_read_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    run = torch.ops.jpmhc.write_read_backward
    found = write_read_gradients(run, ctx.saved_tensors, gradients[:4], ctx.linked, ctx.key, ctx.following)
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
