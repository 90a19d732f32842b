"""Fused passes with their derivatives: autograd functions in eager mode, operators under a compiler.

Both forms run the same two steps, `forward` and `backward`, and keep the same tensors between the steps. Eager mode
calls the steps without PyTorch's dispatcher, which would take longer on the host than the steps. A compiler traces the
operator NAME, which has a derivative, but calls NAME_plain, without a derivative, at run time, because autograd's part
would be a second pass through the dispatcher. An operator takes the key of a connection's `Spec` in place of the
`Spec`, and returns an empty tensor where a step returns None.

Streams are [..., n or 1, d] here, because each reshape outside would add a node to autograd's graph.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from jpmhc.kernels.spec import Spec, find_spec

Tensors = tuple[Tensor | None, ...]
Input = Tensor | Spec | bool | None
Step = Callable[..., Any]
_LIBRARY = torch.library.Library("jpmhc", "FRAGMENT")
_TYPES: dict[object, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", Spec: "str", bool: "bool"}


class Pass:
    """A pass, described by the signatures of its two steps. Call it with a link or None, and the inputs of `forward`.

    The link comes from the read of the same streams (see write.py) and gets the gradient that would go to the first
    input.

    Args:
        name: The operator's name.
        forward: The function that computes the results from tensors, followed by settings.
        backward: The function that returns the gradients of these tensors. Its arguments are the tensors, the last
            results of `forward`, the gradients `grad_…` of the first results, the settings in its signature, and `pull`
            (see write.py), which is True without a link. The function may return None for the first gradient if this is
            equal to the first result's gradient. `in_place` is True only in eager mode, because an operator must not
            change its arguments.
        allocate: The function that returns the results of `forward` without their values.
        allocate_gradients: The function that returns the results of `backward` without their values.
    """

    operators: ClassVar[list[str]] = []

    def __init__(self, name: str, forward: Step, backward: Step, allocate: Step, allocate_gradients: Step) -> None:
        self.name, self.forward, self.backward = name, forward, backward
        takes, returns = (_parameters(step) for step in (forward, backward))
        self.tensors = sum(kind.startswith("Tensor") for kind in takes.values())
        self.graded = sum(argument.startswith("grad_") for argument in returns)
        tensors_back = sum(kind.startswith("Tensor") for kind in returns.values())
        self.first_saved = -(tensors_back - self.graded - self.tensors) or None
        self.last_setting = self.tensors + sum(kind[:6] != "Tensor" and key in returns for key, kind in takes.items())
        self.pulls = "pull" in returns
        self.in_eager_mode = (True,) if "in_place" in inspect.signature(backward).parameters else ()
        self.padding = (None,) * (len(takes) - self.tensors)
        _define(name, {"link": "Tensor?", **takes}, forward, allocate, links=1)
        _define(f"{name}_backward", returns, backward, allocate_gradients)
        torch.library.register_autograd(
            f"jpmhc::{name}", self._differentiate_operator, setup_context=self._save_operator, lib=_LIBRARY
        )

    def __call__(self, link: Tensor | None, *inputs: Input) -> Any:
        if torch.compiler.is_compiling():
            return _call_operator(self.name, (link, *inputs))
        if torch.is_grad_enabled():
            return _Differentiable.apply(self, link, *inputs)
        return self.forward(*inputs)

    def save(self, ctx: Any, link: Tensor | None, inputs: Sequence[Any], results: Any) -> None:
        """Save the tensors and settings that the backward step needs."""
        last = results[self.first_saved :] if self.first_saved else ()
        ctx.linked, ctx.settings = link is not None, inputs[self.tensors : self.last_setting]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: self.tensors], *last)

    def differentiate(self, ctx: Any, run: Step, saved: Tensors, gradients: Tensors, *further: bool) -> Tensors:
        """Compute the gradients of the link and the inputs from the results' gradients, by the backward step `run`."""
        pull = (not ctx.linked,) if self.pulls else ()
        first, *others = run(*saved, *gradients[: self.graded], *ctx.settings, *pull, *further)
        if first is None:
            first = gradients[0]
        return (first, None, *others, *self.padding) if ctx.linked else (None, first, *others, *self.padding)

    def _save_operator(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        link, *others = inputs
        self.save(ctx, link, _find_specs(others), output)

    def _differentiate_operator(self, ctx: Any, *gradients: Tensor | None) -> Tensors:
        def run(*given: Input) -> Any:
            return _call_operator(f"{self.name}_backward", given)

        return self.differentiate(ctx, run, ctx.saved_tensors, gradients)


class _Differentiable(Function):
    """The autograd function of a pass in eager mode."""

    @staticmethod
    def forward(ctx: Any, fused: Pass, link: Tensor | None, *inputs: Input) -> Any:
        results = fused.forward(*inputs)
        ctx.fused = fused
        fused.save(ctx, link, inputs, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensors:
        fused: Pass = ctx.fused
        saved = ctx.saved_tensors  # once, because activation checkpointing unpacks the tensors only once
        returned = fused.differentiate(ctx, fused.backward, saved, gradients, *fused.in_eager_mode)
        if torch.is_grad_enabled():  # the caller asks for the gradients' graph
            returned = _Refuse.apply(len(returned), *returned, *saved, *gradients)
        return None, *returned


class _Refuse(Function):
    """An autograd function that returns gradients unchanged, and raises an error if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Tensors:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError('the fused kernels have no second derivatives; kernels="reference" does')


def _parameters(step: Step) -> dict[str, str]:
    """Return {name: type in an operator's schema} for the parameters of a step that have no default."""
    parameters = inspect.signature(step).parameters.values()
    return {p.name: _TYPES[p.annotation] for p in parameters if p.default is inspect.Parameter.empty}


def _define(name: str, parameters: dict[str, str], step: Step, allocate: Step, links: int = 0) -> None:
    """Define an operator and its plain form. The first `links` arguments of both are not passed to the step."""
    results = get_args(inspect.signature(step).return_annotation) or (Tensor,)
    arguments = ", ".join(f"{kind} {argument}" for argument, kind in parameters.items())
    schema = f"({arguments}) -> ({', '.join('Tensor' for _ in results)})"

    def as_operator(function: Step) -> Step:
        def run(*given: Any) -> Any:
            results = function(*_find_specs(given[links:]))
            if isinstance(results, Tensor):
                return results
            return tuple(given[links].new_empty(0) if r is None else r for r in results)

        return run

    for form in (name, f"{name}_plain"):
        _LIBRARY.define(f"{form}{schema}")
        _LIBRARY.impl(form, as_operator(step), "CompositeExplicitAutograd")
        torch.library.register_fake(f"jpmhc::{form}", as_operator(allocate), lib=_LIBRARY)
    _LIBRARY.impl(f"{name}_plain", torch.library.fallthrough_kernel, "Autograd")
    Pass.operators.append(name)


def _find_specs(given: Sequence[Any]) -> list[Any]:
    return [find_spec(a) if isinstance(a, str) else a for a in given]


def _call_operator(name: str, given: tuple[Input, ...]) -> Any:
    """Call an operator and return its results, with None for empty vectors."""
    results = getattr(torch.ops.jpmhc, name)(*[a.key if isinstance(a, Spec) else a for a in given])
    if isinstance(results, Tensor):
        return results
    return tuple([None if r.ndim == 1 and r.shape[0] == 0 else r for r in results])


def declare_to_inductor() -> None:
    """Tell Inductor to call the plain forms of our operators, and not to generate code for the operators.

    Otherwise Inductor decides this when it first meets an operator, and torch 2.11 then logs the whole expression
    behind the operator's arguments, which takes time exponential in the depth of the model.
    """
    from torch._inductor import lowering

    for name in Pass.operators:
        operator = getattr(torch.ops.jpmhc, name).default
        if operator not in lowering.lowerings:
            plain = getattr(torch.ops.jpmhc, f"{name}_plain").default
            lowering.make_fallback(operator, warn=False)
            lowering.register_lowering(operator, type_promotion_kind=None)(lowering.fallback_handler(plain))
