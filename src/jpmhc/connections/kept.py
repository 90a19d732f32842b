"""Tensors that are kept for the backward pass beside autograd's own."""

from typing import NamedTuple

from torch import Tensor


class Kept(NamedTuple):
    """A tensor for the backward pass, detached: autograd holds it, and must not be held by it in turn."""

    tensor: Tensor
    version: int  # counts the changes in place

    def find(self) -> Tensor:
        """Return the tensor, or refuse if it was changed in place, as autograd does."""
        if _count_changes(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the backward pass of a stack needs was changed in "
                "place after the forward pass: change a copy instead"
            )
        return self.tensor


def keep(tensor: Tensor) -> Kept:
    """Keep a tensor as it is now."""
    return Kept(tensor.detach(), _count_changes(tensor))


def _count_changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count
