"""Hooks that give tensors instead of `Streams` objects to modules inside a layer."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jpmhc.wrap.streams import Streams, StreamStep


class StreamModule:
    """Two hooks that replace a module's `Streams` argument by a tensor: all streams, or their mixture.

    A module that carries the residual stream, such as a norm, gets all streams. Any other module, such as a quantised
    projection, gets the mixture. A module with several tensor arguments gets the `Streams` object, because it may
    compute the residual addition itself.

    Args:
        name: The module's name in its layer.

    Attributes:
        met: Whether the module was called with streams.
        fits: Whether the module can act on the last dimension of the streams; None before its first call.
        pending: During a call with all streams: the streams, and the step of the plan.
    """

    def __init__(self, name: str) -> None:
        self.name, self.met = name, False
        self.fits: bool | None = None
        self.pending: tuple[Streams, StreamStep] | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's arguments with a tensor for the `Streams` object (a hook before the module)."""
        self.pending = None  # an interrupted call may have left a value
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor | Streams)]
        if len(tensors) != 1 or not isinstance(tensors[0], Streams) or not args or tensors[0] is not args[0]:
            return None
        self.met, streams = True, tensors[0]
        if self.fits is None:
            self.fits = acts_on_last_dimension(module, streams.shape[-1])
        step = streams.take_step(f"module {self.name}") if self.fits else None
        if step is None:
            return (streams.read(), *args[1:]), kwargs
        self.pending = (streams, step)
        return (streams.x, *args[1:]), kwargs

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the module's output, as a `Streams` object if the module got all streams (a hook after the module)."""
        if self.pending is None:
            return None
        (streams, step), self.pending = self.pending, None
        if isinstance(output, Tensor) and output.shape == streams.x.shape:
            return streams.after(step, output)
        return module.forward(streams.read(), *args[1:], **kwargs)

    def register(self, module: nn.Module) -> list[RemovableHandle]:
        """Register both hooks on a module, and return their handles."""
        return [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(self.end, with_kwargs=True),
        ]


def acts_on_last_dimension(module: nn.Module, dim: int) -> bool:
    """Return whether all parameters of a module have one entry or the shape [dim], as in a norm or a scale."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    return all(shape.numel() == 1 or tuple(shape) == (dim,) for shape in shapes)


def foreign_modules(layer: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the modules in a layer that have parameters, no children and no class of torch.nn."""
    return {
        name: module
        for name, module in layer.named_modules()
        if name
        and any(True for _ in module.parameters(recurse=False))
        and not any(module.children())
        and not type(module).__module__.startswith("torch.nn.")
    }
