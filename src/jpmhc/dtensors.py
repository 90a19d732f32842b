"""Functions for DTensors, the tensors of `torch.distributed` that are spread over processes."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor, without importing `torch.distributed.tensor`, which takes half a second."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def fill(target: Tensor, values: Tensor) -> None:
    """Copy values into a tensor in place; if it is a DTensor, each process copies its own part of the values."""
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        values = values.to(target.device, target.dtype)
        values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(values)


def leave(parameter: Tensor, tokens_apart: bool) -> Tensor:
    """Return a parameter as a plain tensor. Raise a RuntimeError for a DTensor that is not equal on all processes.

    Args:
        parameter: The parameter.
        tokens_apart: Whether each process computes with tokens of its own, so that the gradient is a sum over all
            processes. False: every process computes with all tokens, and thus the whole gradient.
    """
    if not is_dtensor(parameter):
        return parameter
    from torch.distributed.tensor import Partial, Replicate

    mesh = parameter.device_mesh
    equal = [Replicate()] * mesh.ndim
    if list(parameter.placements) != equal:
        raise RuntimeError(
            f"a connection's weights are sharded over processes ({parameter.placements}): call the model that "
            "fully_shard was applied to, or the connection as a module, so that FSDP gathers them"
        )
    gradient = [Partial() if tokens_apart else Replicate()] * mesh.ndim
    return parameter.redistribute(mesh, equal).to_local(grad_placements=gradient)
