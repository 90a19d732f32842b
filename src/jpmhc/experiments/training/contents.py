"""Loading the content of a checkpoint's files, with checks that the content fits a run.

A checksum proves that a file has not changed since it was written. It does not prove that this version of the package
can use the content, because another program may have written the file. Errors name the file and the key.
"""

import contextlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import torch
from torch import Tensor, nn

from jpmhc import checks
from jpmhc.experiments.tasks.task import Task

Content = dict[str, Any]  # the content of a file of torch.save: its entries by name

# The entries of each file, with their allowed types.
SHARED_ENTRIES: dict[str, tuple[type, ...]] = {
    "shape": (tuple, list),
    "core": (dict,),
    "average": (dict, type(None)),
    "puzzles": (dict,),
    "frames": (dict, type(None)),
    "dense": (dict, type(None)),
}
RANK_ENTRIES: dict[str, tuple[type, ...]] = {
    "carry": (dict,),
    "random": (Tensor,),
    "random_cuda": (Tensor, type(None)),
    "dense": (dict, type(None)),
}

_MISFITS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, OverflowError)  # what loading raises


def load_content(file: Path, entries: Mapping[str, tuple[type, ...]], device: torch.device | str) -> Content:
    """Load a file of a checkpoint without running code from it, and check that it has the `entries`.

    `entries` maps each required key to its allowed types.
    """
    try:
        if not is_zipfile(file):
            raise ValueError("it is not a file that torch.save writes")
        content = torch.load(file, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, BadZipFile, EOFError, OSError, *_MISFITS) as error:
        raise ValueError(f"{file} cannot be read: {_say_in_one_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {_describe(content)}, and must hold a dictionary")
    for key, kinds in entries.items():
        if key not in content:
            raise ValueError(f"{file} has no entry {key}")
        if not isinstance(content[key], kinds):
            names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            raise ValueError(f"{file}: {key} is {_describe(content[key])}, and must be of type {names}")
    return content


@contextlib.contextmanager
def explaining_misfit(file: Path, key: str) -> Iterator[None]:
    """Turn errors from loading an entry into a ValueError of one sentence that names the file and the key."""
    try:
        yield
    except _MISFITS as error:
        raise ValueError(f"{file}: {key} does not fit this run: {_say_in_one_line(error)}") from error


def load_weights(module: nn.Module, content: Content, key: str, file: Path) -> None:
    """Load the weights at `key` of the content of `file` into a module; parameter names of old versions are valid."""
    with explaining_misfit(file, key):
        expected = module.state_dict()
        for name, tensor in content[key].items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ValueError(f"{checks.quote(name)} is {_describe(tensor)}, and must be a tensor")
            if name in expected:
                require_like(tensor, expected[name], name)
        module.load_state_dict(content[key])


def require_shape(content: Content, task: Task, file: Path) -> None:
    """Raise a ValueError if the model in a file has another vocabulary, row length or puzzle count than the task."""
    shape = (task.vocabulary, task.length, task.identifier_count)
    if tuple(content["shape"]) != shape:
        raise ValueError(f"{file}: shape is {checks.quote(content['shape'])}, and must be {shape} for this task")


def require_optimiser_state(optimiser: torch.optim.Optimizer, saved: Any, names: Sequence[str]) -> None:
    """Raise a ValueError if a saved state does not match the optimiser's parameters (PyTorch does not check this).

    Each parameter's state must have the tensors `names`: the step count, then tensors of the parameter's shape.
    """
    groups = torch.optim.Optimizer.state_dict(optimiser)["param_groups"]
    require_like(saved["param_groups"], groups, "param_groups")
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    if saved["state"].keys() != set(numbers):
        raise ValueError(f"it has the state of {len(saved['state'])} parameters, not of {len(numbers)}")
    for number, parameter in zip(numbers, parameters, strict=True):
        require_parameter_state(saved["state"][number], parameter, names, f"parameter {number}")


def require_parameter_state(saved: object, parameter: Tensor, names: Sequence[str], subject: str) -> None:
    """Raise a ValueError unless `saved` has only the tensors `names`: the step count, then tensors like `parameter`.

    The message calls the saved state `subject`.
    """
    step = torch.zeros((), dtype=torch.float32)
    require_like(saved, {name: parameter if number else step for number, name in enumerate(names)}, subject)


def require_like(value: object, expected: object, subject: str = "it") -> None:
    """Raise a ValueError if two values differ in keys, lengths, shapes, types or texts; numbers may differ.

    The message calls the value `subject`.
    """
    if isinstance(expected, Tensor):
        if not isinstance(value, Tensor) or _form(value) != _form(expected):
            raise ValueError(f"{subject} is {_describe(value)}, and must be {_describe(expected)}")
    elif isinstance(expected, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{subject} is {_describe(value)}, and must be a dictionary")
        if value.keys() != expected.keys():
            apart = ", ".join(sorted(map(checks.quote, value.keys() ^ expected.keys()))[:5])
            raise ValueError(f"{subject} has too many or too few entries: {apart}")
        for key, part in expected.items():
            require_like(value[key], part, f"{key} of {subject}")
    elif isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            raise ValueError(f"{subject} is {_describe(value)}, and must be {len(expected)} values")
        for one, other in zip(value, expected):
            require_like(one, other, subject)
    elif isinstance(expected, str):
        if value != expected:  # texts select formulas
            raise ValueError(f"{subject} is {_describe(value)}, and must be {_describe(expected)}")
    elif type(value) is not type(expected) and not {type(value), type(expected)} <= {int, float}:
        raise ValueError(f"{subject} is {_describe(value)}, and must be {_describe(expected)}")


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        kind = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"a{kind} {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, bool | int | float | str):
        return checks.quote(value)
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, dict | list | tuple) else "")


def _say_in_one_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened to 200 characters."""
    if isinstance(error, KeyError):
        return f"{checks.quote(error.args[0])} is missing"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = lines[1] if lines[0].startswith("Error(s) in loading") and len(lines) > 1 else lines[0]
    return said if len(said) <= 200 else f"{said[:200]} …"
