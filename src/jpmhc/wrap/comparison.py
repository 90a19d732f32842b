"""The comparison of a model before and after it is wrapped: its outputs, and the gradient at its first layer."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.wrap.plan import LayerPlan


class OutputComparison:
    """Runs a model on the same inputs, without dropout and with the same random numbers, and compares the results.

    As a context it leaves the model and torch's generator as they were.

    Args:
        model: The model, not yet wrapped.
        args: Positional arguments of the model's call.
        kwargs: Its keyword arguments.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.plan: LayerPlan | None = None
        self.gradient: Tensor | None = None

    def __enter__(self) -> "OutputComparison":
        self._training = {module: module.training for module in self.model.modules()}
        self._forked = torch.random.fork_rng()
        self._forked.__enter__()
        self.model.eval()
        return self

    def begin(self) -> None:
        """Run the model and keep its outputs."""
        self.outputs = floating_tensors(self.run())
        if not self.outputs:
            raise ValueError(f"{type(self.model).__name__} returns no floating-point tensor to compare: give inputs=")

    def __exit__(self, *error: Any) -> None:
        for module, mode in self._training.items():
            module.training = mode
        self._forked.__exit__(*error)

    def run(self) -> Any:
        """Call the model without gradients."""
        with torch.no_grad():
            return self._call()

    def _call(self) -> Any:
        torch.manual_seed(0)
        return self.model(*copy.copy(self.args), **copy.copy(self.kwargs))

    def differentiate(self, plan: LayerPlan) -> None:
        """Keep the gradient of the outputs with respect to the hidden state that enters this layer."""
        self.plan = plan
        try:
            self.gradient = self._gradient(plan)
        except (AssertionError, RuntimeError):
            self.gradient = None  # a model that cannot be differentiated has no gradient to lose

    def _gradient(self, plan: LayerPlan) -> Tensor | None:
        entered: list[Tensor] = []

        def begin(layer: nn.Module, args: Any, kwargs: Any) -> Any:
            # Of several calls the last one counts: earlier ones may be meant to have no gradient.
            entered[:] = [plan.entering(args, kwargs).detach().requires_grad_()]
            return plan.with_entering(args, kwargs, entered[0])

        handle = self.model.get_submodule(plan.name).register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        try:
            with torch.enable_grad():
                outputs = [x[x.isfinite()] for x in floating_tensors(self._call()) if x.requires_grad]
                weighted = [(x * torch.arange(len(x), device=x.device).cos()).sum() for x in outputs]
        finally:
            handle.remove()
        if not weighted:
            return None
        (gradient,) = torch.autograd.grad(weighted, entered, allow_unused=True)
        if gradient is None:
            raise ValueError(f"{plan.name} cannot be wrapped: it is called where no gradients are recorded")
        return gradient

    def check(self) -> None:
        """Refuse the wrapped model if its outputs or the gradient are not what they were, up to rounding."""
        kind = type(self.model).__name__
        outputs = floating_tensors(self.run())
        if [x.shape for x in outputs] != [x.shape for x in self.outputs]:
            raise ValueError(f"{kind} cannot be wrapped: it would return tensors of other shapes")
        floating = [x.dtype for x in (*self.model.parameters(), *outputs) if x.is_floating_point()]
        rounding = max(torch.finfo(dtype).eps for dtype in set(floating))
        for old, new in zip(self.outputs, outputs):
            _refuse_difference(kind, "outputs", relative_difference(old, new), rounding**0.5)
        if self.gradient is not None and self.plan is not None:
            gradient = self._gradient(self.plan)
            difference = 1.0 if gradient is None else relative_difference(self.gradient, gradient)
            _refuse_difference(kind, "gradients", difference, rounding**0.25)


def _refuse_difference(kind: str, what: str, difference: float, allowed: float) -> None:
    if not difference <= allowed:
        raise ValueError(
            f"{kind} cannot be wrapped: its {what} would differ by {difference:.1e} of the largest; a layer does more "
            "with its hidden state than can be followed"
        )


def floating_tensors(output: Any) -> list[Tensor]:
    """All floating-point tensors in a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    entries = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [found for entry in entries for found in floating_tensors(entry)]


def relative_difference(old: Tensor, new: Tensor) -> float:
    """The largest difference of two tensors relative to the largest number; NaN where other entries are not finite."""
    finite = old.isfinite()
    if not torch.equal(finite, new.isfinite()):
        return float("nan")
    old, new = old[finite].detach().double(), new[finite].detach().double()
    return float((old - new).abs().max() / old.abs().max().clamp(min=1e-30)) if old.numel() else 0.0
