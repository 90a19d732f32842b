"""Mixers and an activation of a user's own, as tests name them: `tests.own:Shrinking` and `tests.own:SQUARED_RELU`."""

import torch

from jpmhc.mixers import Mixer
from jpmhc.spectra import Activation

SQUARED_RELU = Activation("squared relu", lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x), kinks=(0.0,))


class Shrinking(Mixer):
    """H = I − σ(a) · (I − 1 1ᵀ/n): a matrix that keeps the mean of the streams and shrinks their differences."""

    name = "shrinking"

    def __init__(self, streams, begin=-6.0):
        super().__init__(streams, logits=1)
        self.begin = begin

    def start(self):
        return torch.full((1,), self.begin)

    def forward(self, logits):
        eye = torch.eye(self.streams, dtype=logits.dtype, device=logits.device)
        return eye - torch.sigmoid(logits)[..., None] * (eye - 1 / self.streams)

    def violation(self, matrix):
        return (matrix.sum(-1) - 1).abs().amax(-1)


class Weighted(Mixer):
    """H = I + w, where the weights w of the mixer itself have rows that sum to zero."""

    def __init__(self, streams):
        super().__init__(streams, logits=1)
        self.weight = torch.nn.Parameter(torch.zeros(streams, streams))

    def start(self):
        return torch.zeros(1)

    def forward(self, logits):
        eye = torch.eye(self.streams, dtype=logits.dtype, device=logits.device)
        weight = self.weight.to(logits.dtype) + logits[..., None] * eye
        return eye + weight - weight.mean(-1, keepdim=True)

    def violation(self, matrix):
        return (matrix.sum(-1) - 1).abs().amax(-1)
