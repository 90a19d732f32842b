"""Choose the inputs with which `wrap` calls a model, and check that outputs and gradients do not change."""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.wrap.additions import ResidualAdditions
from jpmhc.wrap.layers import Args, Kwargs, LayerPlan

# The errors that models raise if a necessary argument is missing.
_FAILURES = (AttributeError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def call_arguments(model: nn.Module, inputs: object) -> tuple[Args, Kwargs]:
    """Return the arguments of one call: the given inputs, or small default inputs for a model of `transformers`."""
    return ((), default_inputs(model)) if inputs is None else checks.call_arguments(inputs)


def default_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Return two sequences of eight tokens, or two images of noise, as the keyword arguments of the model."""
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    device = next((parameter.device for parameter in model.parameters()), None)
    if config is not None and main == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        count = max(2, min(int(getattr(text, "vocab_size", 2)), 1000))
        tokens = ((torch.arange(16).reshape(2, 8) * 7 + 3) % count).to(device)
        decoder = {"decoder_input_ids": tokens[:, :5]} if getattr(config, "is_encoder_decoder", False) else {}
        return {"input_ids": tokens, **decoder}
    if config is not None and main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size: Any = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        images = torch.randn(
            2, getattr(vision, "num_channels", 3), height, width, generator=torch.Generator().manual_seed(0)
        )
        return {"pixel_values": images.to(device, next(p.dtype for p in model.parameters() if p.is_floating_point()))}
    raise ValueError(
        f"cannot guess what {type(model).__name__} is called with: give inputs=, a tensor, tuple or dict of arguments"
    )


@contextlib.contextmanager
def explaining_guess(model: nn.Module, guess: Kwargs) -> Iterator[None]:
    """Replace an error inside the context, where the model gets guessed arguments, by one that asks for `inputs`."""
    try:
        yield
    except _FAILURES as error:
        message = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{type(model).__name__} cannot be called with {' and '.join(guess)} alone, which was guessed "
            f"({type(error).__name__}: {message}): give inputs=, a tensor, tuple or dict of arguments"
        ) from error


class OutputComparison:
    """A comparison of a model's outputs and gradients before and after wrapping, in eval mode on the same inputs.

    At its end, the context restores the model's mode and torch's random state.
    """

    def __init__(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.plan: LayerPlan | None = None
        self.gradient: Tensor | None = None

    def __enter__(self) -> Self:
        self._training = {module: module.training for module in self.model.modules()}
        self._forked = torch.random.fork_rng()
        self._forked.__enter__()
        self.model.eval()
        return self

    def __exit__(self, *error: Any) -> None:
        for module, mode in self._training.items():
            module.training = mode
        self._forked.__exit__(*error)

    def begin(self) -> dict[tuple[str, int, int], int]:
        """Run the plain model, store its outputs, and return the number of its residual additions by module."""
        with ResidualAdditions(self.model) as additions:
            self.outputs = floating_tensors(self.run())
        if not self.outputs:
            raise ValueError(f"{type(self.model).__name__} returns no floating-point tensor to compare: give inputs=")
        return additions.counts

    def run(self) -> Any:
        """Call the model without gradients."""
        with torch.no_grad():
            return self._call()

    def _call(self) -> Any:
        torch.manual_seed(0)
        return self.model(*copy.copy(self.args), **copy.copy(self.kwargs))

    def differentiate(self, plan: LayerPlan) -> None:
        """Store the gradient of the plain model's outputs with respect to the input of the plan's layer."""
        self.plan = plan
        try:
            self.gradient = self._gradient(plan)
        except (AssertionError, RuntimeError):
            self.gradient = None  # a model that cannot be differentiated has no gradient to compare

    def _gradient(self, plan: LayerPlan) -> Tensor | None:
        entered: list[Tensor] = []

        def begin(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            # The last call of the layer counts, because earlier calls may have no gradient on purpose.
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
        """Raise an error if the model's outputs or gradient differ from the stored ones by more than rounding."""
        kind = type(self.model).__name__
        outputs = floating_tensors(self.run())
        if [x.shape for x in outputs] != [x.shape for x in self.outputs]:
            raise ValueError(f"{kind} cannot be wrapped: it would return tensors of other shapes")
        floating = [x.dtype for x in (*self.model.parameters(), *outputs) if x.is_floating_point()]
        rounding = max(torch.finfo(dtype).eps for dtype in set(floating))
        for old, new in zip(self.outputs, outputs):
            difference = relative_difference(old, new)
            if math.isnan(difference) and bool(old.isnan().any()):
                raise ValueError(
                    f"{kind} cannot be compared with itself before wrapping, because its outputs are NaN for these "
                    "inputs: give its weights values, or give other inputs="
                )
            _refuse_difference(kind, "outputs", difference, rounding**0.5)
        if self.gradient is not None and self.plan is not None:
            gradient = self._gradient(self.plan)
            difference = 1.0 if gradient is None else relative_difference(self.gradient, gradient)
            _refuse_difference(kind, "gradients", difference, rounding**0.25)


def _refuse_difference(kind: str, quantity: str, difference: float, allowed: float) -> None:
    if not difference <= allowed:
        raise ValueError(
            f"{kind} cannot be wrapped: its {quantity} would differ by {difference:.1e} of their largest entry; a "
            "layer uses its hidden state in a way that wrap cannot follow"
        )


def floating_tensors(output: object) -> list[Tensor]:
    """Return all floating-point tensors in a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    entries = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [tensor for entry in entries for tensor in floating_tensors(entry)]


def relative_difference(old: Tensor, new: Tensor) -> float:
    """Return the largest difference divided by the largest old entry; NaN if the positions of finite entries differ."""
    finite = old.isfinite()
    if not torch.equal(finite, new.isfinite()):
        return float("nan")
    old, new = old[finite].detach().double(), new[finite].detach().double()
    return float((old - new).abs().max() / old.abs().max().clamp(min=1e-30)) if old.numel() else 0.0
