"""What training asks of a model core that several processes train together, whichever strategy they follow.

Under every strategy process r works on a contiguous part of every batch's rows, gradients are summed over the rows of
all processes, and Grassmann frames and puzzle vectors are stepped identically everywhere.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from jpmhc.optim.grassmannian import grassmann_frames


class DistributedCore(ABC):
    """A model's core with the optimiser of its dense parameters, spread over processes."""

    sharded: bool
    """Whether each process holds a part of the optimiser's state, or all of it."""
    module: nn.Module
    """What a forward pass calls."""

    def exchanging_gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Surround the forward and backward pass of one part of the rows; gradients are exchanged after the last."""
        return contextlib.nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate the gradient of one part; `loss` is its sum over rows divided by the size of the whole batch."""

    @abstractmethod
    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the norm of the whole gradient of each parameter; every process must call this."""

    @abstractmethod
    def step(self, rate: float) -> Tensor:
        """Clip, update the dense parameters and clear their gradients.

        Args:
            rate: factor of the base learning rate.

        Returns:
            The gradient's norm before clipping.
        """

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the dense parameters, or this process's shards of them."""

    @abstractmethod
    def gather_whole(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Return whole parameters by name from tensors shaped like `tensors()`; every process must call this."""

    @abstractmethod
    def cut_own(self, whole: dict[str, Tensor]) -> list[Tensor]:
        """Return this process's tensors from whole parameters: the inverse of `gather_whole`."""

    @abstractmethod
    def optimiser_state(self) -> dict[str, Any]:
        """Return the optimiser's state, or this process's part of it where `sharded`."""

    @abstractmethod
    def load_optimiser_state(self, saved: dict[str, Any]) -> None:
        """Restore what `optimiser_state` returned."""


def dense_parameters(core: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters that AdamAtan2 steps: all but the Grassmann frames."""
    frames = grassmann_frames(core)
    for name, p in core.named_parameters():
        if name not in frames:
            yield name, p
