"""The identity: the skip path does not mix the streams."""

import torch
from torch import Tensor

from jpmhc.mixers.base import Mixer, TritonForm, make_form


class Identity(Mixer):
    """The identity matrix H = I. With one stream this is the plain residual connection."""

    name = "identity"
    mixes = False

    def __init__(self, streams: int) -> None:
        super().__init__(streams, 0)

    def start(self) -> Tensor:
        return torch.empty(0)

    def forward(self, logits: Tensor) -> Tensor:
        dtype = self.widen(logits).dtype
        return torch.eye(self.streams, dtype=dtype, device=logits.device).expand(*logits.shape[:-1], -1, -1)

    def violation(self, matrix: Tensor) -> Tensor:
        eye = torch.eye(self.streams, dtype=matrix.dtype, device=matrix.device)
        return (matrix - eye).abs().amax((-2, -1))

    def triton_form(self) -> TritonForm | str:
        return make_form("identity", self.streams, 0, 1, 1)
