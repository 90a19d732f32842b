"""Count a model's residual additions, and describe how many became connections and which stay plain."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from jpmhc.wrap.layers import LayerPlan

# The functions of a residual branch; any other function with a weight matrix as an argument also counts.
BRANCHES = {"addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "scaled_dot_product_attention"}
BRANCHES |= {"__matmul__", "__rmatmul__", "grouped_mm", "_grouped_mm"}
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class ResidualAdditions(TorchFunctionMode):
    """A mode that counts the residual additions x + f(x) of each module during a run of a plain model.

    Every tensor gets a bit of its own and two sets of ancestors, stored as masks of bits. The set `same` contains the
    tensor itself and the ancestors that led to it only by casts, norms, sums and the like. The set `branched` contains
    the ancestors that led to it through a weight matrix or an attention. An addition of two terms is residual if some
    tensor is in `same` of one term and in `branched` of the other, and is newer than every tensor in `same` of both.

    Attributes:
        counts: The number of residual additions in one call (the largest number if the calls differ), by the module's
            name, the sum's number of dimensions and the sum's width.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts: dict[tuple[str, int, int], int] = {}
        self._model = model
        self._bits = 0
        self._masks = WeakTensorKeyDictionary()  # (same, branched) for each tensor
        self._calls: list[tuple[str, dict[tuple[str, int, int], int]]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._make_begin(name)))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)

    def _make_begin(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._calls.append((name, {}))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        for key, count in self._calls.pop()[1].items():
            self.counts[key] = max(count, self.counts.get(key, 0))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in tensors_in([result]) if x.is_floating_point()]
        name = getattr(func, "__name__", "")
        if not outputs or name == "__get__":
            return result
        with torch._C.DisableTorchFunction():
            filled = name.endswith("_like") or name.startswith("new_")  # uses only the shape of its arguments
            inputs = [] if filled else tensors_in([*args, *(kwargs or {}).values()])
            terms = [self._masks_of(x) for x in inputs if x.is_floating_point() and not isinstance(x, nn.Parameter)]
            if name in ADDITIONS and len(terms) == 2 and self._calls:
                (a, a_branched), (b, b_branched) = terms
                newest = max((a & b_branched).bit_length(), (b & a_branched).bit_length())
                if newest > (a & b).bit_length():
                    module, counts = self._calls[-1]
                    key = (module, outputs[0].ndim, outputs[0].shape[-1])
                    counts[key] = counts.get(key, 0) + 1
            same = branched = 0
            for term_same, term_branched in terms:
                same, branched = same | term_same, branched | term_branched
            if name in BRANCHES or any(isinstance(x, nn.Parameter) and _is_matrix(x) for x in inputs):
                same, branched = 0, branched | same
            for x in outputs:
                self._masks[x] = (same | self._new_bit(), branched)
        return result

    def _new_bit(self) -> int:
        self._bits += 1
        return 1 << self._bits

    def _masks_of(self, x: Tensor) -> tuple[int, int]:
        if x not in self._masks:
            self._masks[x] = (self._new_bit(), 0)
        return self._masks[x]


def _is_matrix(weight: Tensor) -> bool:
    return sum(size > 1 for size in weight.shape) > 1


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among these values, and in the lists and tuples among them."""
    flat = [entry for value in values for entry in (value if isinstance(value, tuple | list) else (value,))]
    return [value for value in flat if isinstance(value, Tensor)]


def describe_wrapping(
    model: nn.Module, plans: Sequence[LayerPlan], counts: dict[tuple[str, int, int], int]
) -> tuple[str, bool]:
    """Return one sentence on which additions became connections, and whether it should be a warning.

    Args:
        plans: The plans of the wrapped layers.
        counts: The residual additions of the plain model, as in `ResidualAdditions`.
    """
    sizes = {(plan.ndim, plan.dim) for plan in plans}
    plain = {name: count for (name, *size), count in counts.items() if tuple(size) in sizes}
    for plan in plans:
        inside = [name for name in plain if not plan.name or f"{name}.".startswith(f"{plan.name}.")]
        left = sum(plain.pop(name) for name in inside) - plan.additions
        if left > 0:
            plain[plan.name] = left
    connected = sum(plan.additions for plan in plans)
    additions, layers = _count(connected, "residual addition"), _count(len(plans), "layer")
    became = "became hyper-connections" if connected > 1 else "became a hyper-connection"
    text = f"{additions} in {layers} of {type(model).__name__} {became}"
    if plain:
        names = [f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})" for name in plain]
        more = f" and {len(names) - 3} more" if len(names) > 4 else ""
        shown = names if len(names) <= 4 else names[:3]
        text += f"; {sum(plain.values())} stay plain, in {', '.join(shown)}{more}"
    alone = [plan.name for plan in plans if plan.first and plan.last]
    lists = [name.rpartition(".")[0] for name in alone]
    apart = len(alone) == len(plans) and len(lists) > len(set(lists))
    if apart:
        text += (
            "; the streams end after every layer, because the model computes something else with the hidden state "
            "between its layers"
        )
    return text, bool(plain) or apart


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
