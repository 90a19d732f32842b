"""The exponential moving average of weights."""

import torch
from torch import Tensor


class WeightAverage:
    """Averages tensors over training steps, in one multi-tensor operation; the host reads no tensor.

    Args:
        tensors: The tensors to average; on each process the part of the weights that it holds.
        decay: Weight of the past in each update; 0.999 is the public model's.
    """

    def __init__(self, tensors: list[Tensor], decay: float) -> None:
        self.tensors = tensors
        self.decay = decay
        self.averages = [t.detach().clone() for t in tensors]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present weights."""
        torch._foreach_lerp_(self.averages, [t.detach() for t in self.tensors], 1 - self.decay)

    @torch.no_grad()
    def load(self, averages: list[Tensor]) -> None:
        """Replace the averages by saved ones."""
        for mine, saved in zip(self.averages, averages, strict=True):
            mine.copy_(saved)
