"""Hooks that give tensors instead of `Streams` objects to modules inside a layer."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jpmhc.wrap.streams import Streams, StreamStep


def module_step(name: str) -> str:
    """Return the name of the step in which the module `name` of a layer acts on all streams."""
    return f"module {name}"


class StreamModule:
    """Two hooks that replace a module's `Streams` argument by a tensor: all streams, or their mixture.

    A module that carries the residual stream, such as a norm, gets all streams. Any other module, such as a quantised
    projection, gets the mixture. A module with several tensor arguments gets the `Streams` object, because it may
    compute the residual addition itself.

    Args:
        name: The module's name in its layer.
        fits: Whether the module may get all streams; None to decide at its first call whether it can act on their last
            dimension.

    Attributes:
        met: Whether the module was called with streams.
        pending: During a call with all streams: the streams, and the step of the plan.
    """

    def __init__(self, name: str, fits: bool | None = None) -> None:
        self.name, self.fits, self.met = name, fits, False
        self.pending: tuple[Streams, StreamStep] | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's arguments with a tensor for the `Streams` object (a hook before the module)."""
        self.pending = None  # an interrupted call may have left a value
        streams = args[0] if args else None
        if not isinstance(streams, Streams):
            return None
        if any([isinstance(value, (Tensor, Streams)) for value in (*args[1:], *kwargs.values())]):
            return None
        self.met = True
        if self.fits is None:
            self.fits = acts_on_last_dimension(module, streams.shape[-1])
        step = streams.take_step(module_step(self.name)) if self.fits else None
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
        """Register the hooks on a module, the second one only if the module may get all streams. Return the handles."""
        handles = [module.register_forward_pre_hook(self.begin, with_kwargs=True)]
        if self.fits is not False:
            handles.append(module.register_forward_hook(self.end, with_kwargs=True))
        return handles


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
