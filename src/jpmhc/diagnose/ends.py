"""The two ends of the map whose Jacobian is measured: where it begins and where it ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.checks import to_call_arguments
from jpmhc.diagnose.borrow import widen_halves
from jpmhc.diagnose.record import find_hidden_state

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# The entries of a Hugging Face output that are taken as the model's output, the first one that is there.
_OUTPUTS = ("last_hidden_state", "logits")


@dataclass
class Ends:
    """Where the map begins and ends.

    Attributes:
        arguments: What the model is called with.
        start: The module whose output is the map's input, or the place of the argument that is.
        stop: The module whose output is the map's output; None for the model's own output.
        start_name: What a person calls the beginning.
        stop_name: What a person calls the end.
        begins_at: The number of the start module's call at which the map begins: the first one with gradients. Found
            in the first run.
    """

    arguments: Arguments
    start: nn.Module | int | str
    stop: nn.Module | None
    start_name: str
    stop_name: str
    begins_at: int | None = None


class _Found(Exception):
    """Carries nothing; it ends a search for the first embedding early."""


def read_arguments(inputs: Any) -> Arguments:
    """Return positional and keyword arguments of one call, half-precision tensors as float32."""
    args, kwargs = to_call_arguments(inputs)

    def copy(value: Any) -> Any:
        return widen_halves(value.detach().clone()) if isinstance(value, Tensor) else value

    return tuple(copy(value) for value in args), {key: copy(value) for key, value in kwargs.items()}


def cut_batch(arguments: Arguments, batch: int, examples: int) -> Arguments:
    """Return the arguments with the first few examples of every tensor that has the whole batch."""

    def cut(value: Any) -> Any:
        return value[:examples] if isinstance(value, Tensor) and value.ndim and len(value) == batch else value

    return tuple(cut(value) for value in arguments[0]), {key: cut(value) for key, value in arguments[1].items()}


def check_model(model: nn.Module, arguments: Arguments) -> None:
    """Refuse what is no module, weights that hold NaN, inputs on another device, and empty ones."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, not a {type(model).__name__}")
    bad = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and _has_nan(tensor)
    ]
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(f"the weights {bad[0]}{more} hold NaN: load or initialise the model again")
    homes = {str(tensor.device) for tensor in model.parameters()}
    if "meta" in homes:
        raise ValueError("the model is on the meta device and has no weights: load or initialise it first")
    for value in (*arguments[0], *arguments[1].values()):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"an input is an empty tensor, of shape {list(value.shape)}: one example is enough")
        if isinstance(value, Tensor) and homes and str(value.device) not in homes:
            raise ValueError(
                f"the inputs are on {value.device} and the model is on {', '.join(sorted(homes))}: move one of them"
            )


def find_ends(
    model: nn.Module, arguments: Arguments, between: Sequence[str | None] | None, call: Callable[..., Any]
) -> Ends:
    """Find where the map begins and ends.

    Args:
        model: The model.
        arguments: What it is called with.
        between: The names of two modules: the map leads from what the first returns to what the second returns. None
            in the place of a name, or of both, is the model's input or output.
        call: The borrowed model.
    """
    if between is not None and not (
        isinstance(between, tuple | list)
        and len(between) == 2
        and all(name is None or isinstance(name, str) for name in between)
    ):
        raise ValueError(f"between must be two names of modules, such as ('embed', 'norm'), not {between!r}")
    first, last = between or (None, None)
    stop = None if last is None else _find_module(model, last)
    stop_name = "the model's output" if last is None else f"the output of {last}"
    if first is not None:
        return Ends(arguments, _find_module(model, first), stop, f"the output of {first}", stop_name)
    place, x = find_hidden_state(*arguments)
    if x is not None:
        return Ends(arguments, place, stop, "the model's input", stop_name)
    name, module = _find_embedding(model, arguments, call)
    return Ends(arguments, module, stop, f"the embeddings ({name}; the inputs are integers)", stop_name)


def _find_module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name in modules and name:
        return modules[name]
    known = [known for known in modules if known]
    near = [known for known in known if known.rpartition(".")[2] == name.rpartition(".")[2]] or known
    raise ValueError(f"between names no module {name!r} of this model; it has {', '.join(near[:8])}" + _more(near))


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 8} more" if len(names) > 8 else ""


def _has_nan(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and bool(torch.isnan(tensor.detach()).any())


def _find_embedding(model: nn.Module, arguments: Arguments, call: Callable[..., Any]) -> tuple[str, nn.Module]:
    """Return the name and module of the embedding that is called first."""
    names: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    called: list[nn.Module] = []

    def note(module: nn.Module, *ignored: Any) -> None:
        called.append(module)
        raise _Found

    handles = [module.register_forward_hook(note) for module in names]
    try:
        with torch.no_grad():
            call_model(call, arguments)
    except _Found:
        return names[called[0]], called[0]
    finally:
        for handle in handles:
            handle.remove()
    raise ValueError(
        "the inputs are integers and the model calls no nn.Embedding on them: name the module to begin at with "
        "between=(name, None)"
    )


def call_model(call: Callable[..., Any], arguments: Arguments) -> Any:
    """Call a model for the first time; if it fails, say in one sentence that its inputs do not fit."""
    try:
        return call(*arguments[0], **arguments[1])
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"the model cannot be called with these inputs: {str(error).splitlines()[0]}") from error


def run_between(ends: Ends, call: Callable[..., Any], start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the model with its map's input replaced, and return the input that was used and the output.

    Args:
        ends: Where the map begins and ends.
        call: The borrowed model.
        start: What to put in the place of the map's input; None takes what the model has there, as a new leaf.
    """
    args, kwargs = list(ends.arguments[0]), dict(ends.arguments[1])
    used: list[Tensor] = []
    last: list[Any] = []
    started = 0

    def replace(value: Tensor) -> Tensor:
        used.append(value.detach().clone().requires_grad_() if start is None else start)
        return used[0]

    def at_start(module: nn.Module, given: Any, output: Any) -> Any:
        nonlocal started
        number, started = started, started + 1
        if ends.begins_at is None and torch.is_grad_enabled():
            ends.begins_at = number
        # Only one call: if the module is called again, that is part of the map.
        return replace_tensor(output, replace, ends.start_name) if number == ends.begins_at else None

    with ExitStack() as stack:
        if isinstance(ends.start, nn.Module):
            stack.enter_context(_hooked(ends.start, at_start))
        elif isinstance(ends.start, int):
            args[ends.start] = replace(args[ends.start])
        else:
            kwargs[ends.start] = replace(kwargs[ends.start])
        if ends.stop is not None:
            stack.enter_context(_hooked(ends.stop, lambda module, given, output: last.append(output)))
        output = call_model(call, (tuple(args), kwargs)) if start is None else call(*args, **kwargs)
    if not used:
        raise ValueError(f"{ends.start_name} takes no part in the model's call: begin at another module")
    if ends.stop is not None:
        if not last:
            raise ValueError(f"{ends.stop_name} takes no part in the model's call: end at another module")
        output = last[-1]
    return used[0], find_tensor(output, ends.stop_name)


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def find_tensor(output: Any, name: str) -> Tensor:
    """Return the tensor of floating-point numbers that an output is or holds."""
    found = output
    if isinstance(output, Mapping):
        found = next((output[key] for key in (*_OUTPUTS, *output) if output.get(key) is not None), None)
    elif isinstance(output, tuple | list):
        found = next((part for part in output if isinstance(part, Tensor) and part.is_floating_point()), None)
    if not isinstance(found, Tensor) or not found.is_floating_point():
        kind = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"a tensor of {output.dtype}"
        raise ValueError(f"{name} is {kind}, and a tensor of real numbers is needed: name a module with between=")
    return found


def replace_tensor(output: Any, replace: Callable[[Tensor], Tensor], name: str) -> Any:
    """Return the output of a module with its first tensor replaced."""
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return type(output)([replace(output[0]), *output[1:]])
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ValueError(f"{name} is a {type(output).__name__}, and a tensor is needed: begin at another module")
    return replace(output)
