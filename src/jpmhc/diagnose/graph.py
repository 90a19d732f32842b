"""What a model's graph takes of the memory, and a batch whose graph fits into it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jpmhc.diagnose.ends import Ends, cut_batch, run_between
from jpmhc.machine import free_memory

# Inputs of fewer numbers are not asked whether their graph fits, where an integer stands for as many numbers as an
# embedding has; the share of the free memory that a graph may take.
_LARGE, _EMBEDDING = 30_000, 256
_GRAPH_SHARE = 0.4


def fit_batch(model: nn.Module, ends: Ends, call: Callable[..., Any]) -> list[str]:
    """Cut a batch whose graph would not fit into memory to as many examples as do, and return a note that says so."""
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
    """Run the model, and return the bytes that its graph holds beside the weights, and what was returned."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    return sum(size for place, size in sizes.items() if place not in weights), result
