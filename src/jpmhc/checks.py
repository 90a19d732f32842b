"""Argument checks: each raises a ValueError whose one sentence says which values are right.

Arguments are checked once, where they enter the package. A check is named after the values that it accepts. Its
arguments are the value and the name that the message uses for the value. A check that converts the value returns the
result. Only `real_tensor` looks at the numbers inside a tensor: elsewhere a NaN propagates, as it does in PyTorch.

>>> from jpmhc import checks
>>> checks.whole_number(0, "depth")
Traceback (most recent call last):
ValueError: depth must be a whole number, at least 1, got 0
>>> checks.positive_number(1, "eta")
1.0
"""

import importlib
import importlib.util
import math
import operator
import os
import reprlib
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def quote(value: object) -> str:
    """Return the `repr` of a value, shortened for a message."""
    return _SHORT.repr(value)


def whole_number(value: int, name: str, least: int = 1) -> int:
    """Return the value as an int. Raise a ValueError unless it is a whole number of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, at least {least}, got {quote(value)}")
    return number


def optional_whole_number(value: int | None, name: str) -> None:
    """Raise a ValueError unless the value is None or a whole number of at least 1."""
    if value is not None:
        whole_number(value, name)


def positive_number(value: float, name: str) -> float:
    """Return the value as a float. Raise a ValueError unless it is positive and finite."""
    number = _to_float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {quote(value)}")
    return number


def non_negative_number(value: float, name: str) -> float:
    """Return the value as a float. Raise a ValueError if it is negative or not finite."""
    number = _to_float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {quote(value)}")
    return number


def finite_number(value: float, name: str) -> None:
    """Raise a ValueError unless the value is a finite number."""
    # torch.compile can trace these comparisons for a setting that differs between modules.
    if not (_is_number(value) and -math.inf < value < math.inf):
        raise ValueError(f"{name} must be a finite number, got {quote(value)}")


def inside(value: float | None, interval: str, name: str) -> None:
    """Raise a ValueError unless the value is None or a number in an interval such as "[0, 1)"."""
    if value is None:
        return
    low, high = map(float, interval[1:-1].split(","))
    above = _is_number(value) and (low < value or (low == value and interval[0] == "["))
    if not (above and (value < high or (value == high and interval[-1] == "]"))):
        raise ValueError(f"{name} must lie in {interval}, got {quote(value)}")


# Types of settings for `fields`.
Count = Annotated[int, whole_number]
Positive = Annotated[float, positive_number]
NonNegative = Annotated[float, "[0, inf)"]
Share = Annotated[float, "[0, 1]"]
Decay = Annotated[float, "[0, 1)"]  # of a running mean, per step


def fields(settings: object) -> None:
    """Check the fields of a dataclass: raise a ValueError for a value that the annotation of its type does not allow.

    The annotation is a check of this module, or an interval for `inside`. Fields that are None are not checked.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Schedule:
    ...     steps: Count
    ...     drops: tuple[Annotated[float, "(0, 1)"], ...] = ()
    >>> fields(Schedule(10, (0.5, 1.5)))
    Traceback (most recent call last):
    ValueError: drops must lie in (0, 1), got 1.5
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if hasattr(settings, name):
            _check_type(getattr(settings, name), hint, name)


def _check_type(value: Any, hint: Any, name: str) -> None:
    if value is None:
        return
    inner = get_args(hint)
    if get_origin(hint) is Annotated:
        _check_type(value, inner[0], name)
        for rule in hint.__metadata__:
            if isinstance(rule, FunctionType):
                rule(value, name)
            elif isinstance(rule, str):
                inside(value, rule, name)
    elif get_origin(hint) is tuple:
        for one in value:
            _check_type(one, inner[0], name)
    else:
        for arm in inner if type(None) in inner else ():
            _check_type(value, arm, name)


def sizes(value: Sequence[int], name: str) -> tuple[int, ...]:
    """Return the value as a tuple. Raise a ValueError unless it is a tuple or list of whole numbers, at least 0."""
    if not isinstance(value, tuple | list):
        raise ValueError(f"{name} must be a tuple of whole numbers, such as (10,), got {quote(value)}")
    return tuple(whole_number(size, f"every entry of {name}", 0) for size in value)


def switch(value: bool, name: str) -> None:
    """Raise a ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {quote(value)}")


def choice(value: object, choices: Iterable[object], kind: str) -> None:
    """Raise a ValueError unless the value is one of the choices; `kind` names a choice in the message."""
    choices = list(choices)
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(f"no {kind} is called {quote(value)}; choose one of {', '.join(map(str, choices))}")


def named_object(name: str) -> object:
    """Import the module in the text MODULE:NAME and return its object NAME.

    >>> named_object("math:pi")
    3.141592653589793
    """
    module, _, attribute = name.rpartition(":")
    try:
        known = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package that does not exist, or an empty name
        known = False
    if not known:
        raise ValueError(
            f"there is no module {module!r}, neither in this folder nor installed: {name!r} must be MODULE:NAME"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ValueError(f"the module {module} has no {attribute!r}") from None


def fits_memory(size: float, name: str) -> None:
    """Raise a ValueError if `size` is more bytes than the machine's memory has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ValueError(f"{name} needs about {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f} GiB")


def square(matrix: Tensor, name: str = "matrix") -> int:
    """Return the order n of a batch of square matrices [..., n, n]. Raise a ValueError for another shape."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] < 1:
        raise ValueError(f"expected {name} of shape [..., n, n], got {list(matrix.shape)}")
    return matrix.shape[-1]


def tall(frame: Tensor) -> tuple[int, int]:
    """Return n and p of a batch of frames [..., n, p]. Raise a ValueError unless 1 <= p <= n."""
    if frame.ndim < 2 or not 1 <= frame.shape[-1] <= frame.shape[-2]:
        raise ValueError(f"expected a frame of shape [..., n, p] with 1 <= p <= n, got {list(frame.shape)}")
    return frame.shape[-2], frame.shape[-1]


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model call whose `inputs` are a tensor, a tuple or a dict."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if hasattr(inputs, "keys"):
        return (), {key: inputs[key] for key in inputs.keys()}  # noqa: SIM118 (the result of a tokenizer is no dict)
    raise ValueError(f"inputs must be a tensor, a tuple of arguments or a dict of them, got {type(inputs).__name__}")


def real_tensor(value: Tensor | np.ndarray | Sequence | float, name: str) -> Tensor:
    """Return the value as a float64 tensor. Raise a ValueError unless its numbers are real and finite."""
    try:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            value = torch.stack(value)
        # Through NumPy, because torch would make Python numbers single precision.
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, RuntimeError):
        # Text from a damaged file may contain bytes that are not characters and cannot be printed.
        shown = "text" if isinstance(value, np.ndarray) and value.dtype.kind in "US" else repr(value)
        if len(shown) > 40 or "\n" in shown:
            shown = f"the content of this {type(value).__name__}"
        raise ValueError(f"{name} must be real numbers in an array of equal rows, not {shown}") from None
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        raise ValueError(f"{name} must be a dense tensor of plain numbers, not one that is sparse, nested or quantized")
    if tensor.is_complex():
        raise ValueError(f"{name} must be real, not {tensor.dtype}")
    tensor = tensor.detach().to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite, without NaN or infinity")
    return tensor


def _to_float(value: float) -> float:
    """Return a real number as a float, and NaN for any other value, because NaN fails every comparison."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | torch.SymFloat) and not isinstance(value, bool)
