"""Modules inside a layer that are handed its hidden state: norms written in Python, quantised projections, kernels."""

from typing import Any

from torch import Tensor, nn

from jpmhc.wrap.route import StreamStep
from jpmhc.wrap.streams import Streams


class StreamModule:
    """Two hooks that hand a module tensors: all streams where it carries the residual, else the mixture.

    A norm on the residual stream so normalises each stream. Anything else sees an ordinary tensor, whatever it calls.
    Modules of several tensors are left alone, since they may make the residual addition themselves.

    Args:
        name: The module's name in its layer.

    Attributes:
        met: Whether the module has been handed streams.
        fits: Whether the module acts on the last dimension of the streams, once that is known.
    """

    def __init__(self, name: str) -> None:
        self.name, self.met = name, False
        self.fits: bool | None = None
        self.pending: tuple[Streams, StreamStep] | None = None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hand the module a tensor in the place of streams."""
        self.pending = None  # a call that was broken off may have left one
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor | Streams)]
        if len(given) != 1 or not isinstance(given[0], Streams) or not args or given[0] is not args[0]:
            return None
        self.met, streams = True, given[0]
        if self.fits is None:
            self.fits = acts_on_last_dimension(module, streams.x.shape[-1])
        step = streams.take_step(f"module {self.name}") if self.fits else None
        if step is None:
            return (streams.read(), *args[1:]), kwargs
        self.pending = (streams, step)
        return (streams.x, *args[1:]), kwargs

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Make streams of what the module computed from streams."""
        if self.pending is None:
            return None
        (streams, step), self.pending = self.pending, None
        if isinstance(output, Tensor) and output.shape == streams.x.shape:
            return streams.after(step, output)
        return module.forward(streams.read(), *args[1:], **kwargs)

    def register(self, module: nn.Module) -> list[Any]:
        """Put both hooks on a module, and return their handles."""
        return [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(self.end, with_kwargs=True),
        ]


def acts_on_last_dimension(module: nn.Module, dim: int) -> bool:
    """Whether a module can be a norm or a scale of the last dimension, by the shapes of its parameters."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    return all(shape.numel() == 1 or tuple(shape) == (dim,) for shape in shapes)


def foreign_modules(layer: nn.Module) -> dict[str, nn.Module]:
    """The modules inside a layer that have parameters and no modules inside, and are not PyTorch's own, by name."""
    return {
        name: module
        for name, module in layer.named_modules()
        if name
        and any(True for _ in module.parameters(recurse=False))
        and not any(module.children())
        and not type(module).__module__.startswith("torch.nn.")
    }
