"""Run a model as a map between two of its tensors, with a batch that fits into memory, and restore the model."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from jpmhc import checks
from jpmhc.diagnose.jacobian import plain_connections
from jpmhc.diagnose.record import LayerCall, Recording, find_hidden_state, record_layers
from jpmhc.machine import free_memory

SEED = 0  # before every run of the model, so that a model in train mode draws the same random numbers
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# The first of these entries that a Hugging Face output has is the model's output.
_OUTPUTS = ("last_hidden_state", "logits")
# Inputs with fewer numbers are measured without a check that the graph fits into memory. An integer counts as an
# embedding of _EMBEDDING numbers.
_LARGE, _EMBEDDING = 30_000, 256
_GRAPH_SHARE = 0.4  # the share of the free memory that a graph may use


@contextmanager
def borrow_model(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls the model, and restore the model afterwards.

    Inside the context, half-precision weights are float32, weights take no gradients, buffers are copies, every call
    draws the same random numbers, and attention uses its plain formula, which has forward-mode derivatives.

    Args:
        model: Any module; its mode (eval or train) does not change.
    """
    stores: list[dict[str, Any]] = [
        store for module in model.modules() for store in (module._parameters, module._buffers)
    ]
    originals = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    parameters: dict[int, Tensor] = {}  # tied weights stay tied

    def call(*args: Any, **kwargs: Any) -> Any:
        buffers: dict[int, Tensor] = {}
        for store, name, tensor in originals:
            if isinstance(tensor, nn.Parameter):
                store[name] = parameters.setdefault(id(tensor), widen_halves(tensor.detach()))
            else:
                store[name] = buffers.setdefault(id(tensor), widen_halves(tensor.detach().clone()))
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002 (a model may draw from it)
        return model(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_kept_random_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for kind in {tensor.device.type for _, _, tensor in originals} | {"cpu"}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield call
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for store, name, tensor in originals:
                store[name] = tensor


def widen_halves(tensor: Tensor) -> Tensor:
    """Convert half-precision numbers to float32; return other tensors unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy at the end of the context."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


@dataclass
class Ends:
    """The beginning and the end of the map whose Jacobian is measured.

    Attributes:
        arguments: The arguments of the model's call.
        start: The module whose output is the map's input, or the position or name of the argument that is the input.
        stop: The module whose output is the map's output; None for the model's own output.
        start_name: The beginning in words.
        stop_name: The end in words.
        begins_at: The number of the start module's first call with gradients, at which the map begins; set during the
            first run.
    """

    arguments: Arguments
    start: nn.Module | int | str
    stop: nn.Module | None
    start_name: str
    stop_name: str
    begins_at: int | None = None


class _EmbeddingFound(Exception):
    """Raised in the first call of an embedding, to stop the model's run."""


def read_arguments(inputs: Any) -> Arguments:
    """Return copies of one call's positional and keyword arguments, with half-precision tensors as float32."""
    args, kwargs = checks.call_arguments(inputs)

    def copy(value: Any) -> Any:
        return widen_halves(value.detach().clone()) if isinstance(value, Tensor) else value

    return tuple(copy(value) for value in args), {key: copy(value) for key, value in kwargs.items()}


def cut_batch(arguments: Arguments, batch: int, examples: int) -> Arguments:
    """Return the arguments with only the first `examples` rows of every tensor that has `batch` rows."""

    def cut(value: Any) -> Any:
        return value[:examples] if isinstance(value, Tensor) and value.ndim and len(value) == batch else value

    return tuple(cut(value) for value in arguments[0]), {key: cut(value) for key, value in arguments[1].items()}


def find_inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and data parallelism."""
    inner: Any = model
    while hasattr(inner, "_orig_mod") or isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    return inner


def check_model(model: nn.Module, arguments: Arguments) -> None:
    """Raise an error if the model is no module, weights are NaN, or inputs are empty or on another device."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, not a {type(model).__name__}")
    if any(hasattr(tensor, "full_tensor") for tensor in model.parameters()):
        raise ValueError(
            "the weights are spread over processes: gather them by get_model_state_dict, load them into a model that "
            "is not sharded, and diagnose that one"
        )
    broken = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and _has_nan(tensor)
    ]
    if broken:
        raise ValueError(f"the weights {list_names(broken, 1)} hold NaN: load or initialise the model again")
    devices = {str(tensor.device) for tensor in model.parameters()}
    if "meta" in devices:
        raise ValueError("the model is on the meta device and has no weights: load or initialise it first")
    for value in (*arguments[0], *arguments[1].values()):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"an input is an empty tensor, of shape {list(value.shape)}: one example is enough")
        if isinstance(value, Tensor) and devices and str(value.device) not in devices:
            raise ValueError(
                f"the inputs are on {value.device} and the model is on {', '.join(sorted(devices))}: move one of them"
            )


def find_ends(
    model: nn.Module, arguments: Arguments, between: Sequence[str | None] | None, call: Callable[..., Any]
) -> Ends:
    """Find the beginning and the end of the map whose Jacobian is measured.

    Args:
        between: The names of two modules: the map leads from the first one's output to the second one's output. None
            instead of a name, or of both, means the model's input or output.
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
    argument, x = find_hidden_state(*arguments)
    if x is not None:
        return Ends(arguments, argument, stop, "the model's input", stop_name)
    if any(isinstance(value, Tensor) and value.is_complex() for value in (*arguments[0], *arguments[1].values())):
        raise ValueError("the inputs are complex numbers: name a module with real outputs by between=(name, None)")
    name, module = _find_embedding(model, arguments, call)
    return Ends(arguments, module, stop, f"the embeddings ({name}; the inputs are integers)", stop_name)


def _find_module(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name in modules and name:
        return modules[name]
    known = [other for other in modules if other]
    near = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]] or known
    raise ValueError(f"between names no module {name!r} of this model; it has {list_names(near)}")


def list_names(names: Sequence[str], most: int = 8) -> str:
    """Return a phrase with the first `most` names and the number of the other names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
        raise _EmbeddingFound

    handles = [module.register_forward_hook(note) for module in names]
    try:
        with torch.no_grad():
            call_model(call, arguments)
    except _EmbeddingFound:
        return names[called[0]], called[0]
    finally:
        for handle in handles:
            handle.remove()
    raise ValueError(
        "the inputs are integers and the model calls no nn.Embedding on them: name the module to begin at with "
        "between=(name, None)"
    )


def call_model(call: Callable[..., Any], arguments: Arguments) -> Any:
    """Call a model for the first time; raise its errors as a ValueError with one sentence on the inputs."""
    try:
        return call(*arguments[0], **arguments[1])
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"the model cannot be called with these inputs: {str(error).splitlines()[0]}") from error


def run_between(ends: Ends, call: Callable[..., Any], start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the model with a given input of the map, and return the map's input and output.

    Args:
        start: The map's input; None for a copy, with gradients, of the tensor that the model computes.
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
        # Only one call's output is replaced; further calls of the module are part of the map.
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
    """Return a module's output or the first floating-point tensor in it; errors call the output `name`."""
    tensor = output
    if isinstance(output, Mapping):
        tensor = next((output[key] for key in (*_OUTPUTS, *output) if output.get(key) is not None), None)
    elif isinstance(output, tuple | list):
        tensor = next((part for part in output if isinstance(part, Tensor) and part.is_floating_point()), None)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"a tensor of {output.dtype}"
        raise ValueError(f"{name} is {kind}, and a tensor of real numbers is needed: name a module with between=")
    return tensor


def replace_tensor(output: Any, replace: Callable[[Tensor], Tensor], name: str) -> Any:
    """Return a module's output, with its first tensor t replaced by `replace(t)`; errors call the output `name`."""
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return type(output)([replace(output[0]), *output[1:]])
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ValueError(f"{name} is a {type(output).__name__}, and a tensor is needed: begin at another module")
    return replace(output)


def fit_batch(model: nn.Module, ends: Ends, call: Callable[..., Any]) -> list[str]:
    """Cut the batch in `ends.arguments` to the largest number of examples whose autograd graph fits into memory.

    Return a list of one note if the batch was cut, else an empty list.
    """
    tensors = [value for value in (*ends.arguments[0], *ends.arguments[1].values()) if isinstance(value, Tensor)]
    batch = tensors[0].shape[0] if tensors and tensors[0].ndim > 1 else 1
    numbers = sum(tensor.numel() * (1 if tensor.is_floating_point() else _EMBEDDING) for tensor in tensors)
    if batch <= 2 or numbers < _LARGE:
        return []
    whole = ends.arguments
    ends.arguments = cut_batch(whole, batch, 2)
    saved, _ = measure_graph(model, lambda: run_between(ends, call))
    fits = int(_GRAPH_SHARE * free_memory(tensors[0].device) / max(saved / 2, 1))
    ends.arguments = whole
    if fits >= batch:
        return []
    ends.arguments = cut_batch(whole, batch, max(fits, 1))
    return [f"the batch of {batch} does not fit into memory: its first {max(fits, 1)} are measured"]


def measure_graph(model: nn.Module, run: Callable[[], Any]) -> tuple[int, Any]:
    """Run the model; return the bytes that its autograd graph saves (without the weights), and the run's result."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in weights), result


def record_graph(
    model: nn.Module, layers: Sequence[nn.Module], ends: Ends, call: Callable[..., Any]
) -> tuple[Tensor, Tensor, list[LayerCall], int]:
    """Run the model once with an autograd graph, and record the calls of its layers.

    Connections run as plain PyTorch operations, unless one asks for fused kernels: backward passes through plain
    operations can be batched.

    Returns:
        The map's input and output, the layers' calls, and the bytes that the graph saves.
    """
    recording = Recording()
    with ExitStack() as stack:
        stack.enter_context(record_layers(model, layers, recording))
        stack.enter_context(plain_connections())
        if not any(getattr(layer, "kernels", "") == "fused" for layer in layers):
            stack.enter_context(forward_ad.dual_level())
        saved, (x, y) = measure_graph(model, lambda: run_between(ends, call))
    return x, y, recording.calls, saved
