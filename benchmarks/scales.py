"""Scales without mixing: a control for unconstrained skips, which both scale streams and mix them.

python benchmarks/compare_mixers.py train language --arms plain identity scales:Scales unconstrained
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jpmhc.mixers import Mixer, TritonForm


class Scales(Mixer):
    """Diagonal matrices: each stream has a learned scale per token, and no stream reaches another one.

    >>> Scales(2)(torch.tensor([1.0, 0.5]))
    tensor([[1.0000, 0.0000],
            [0.0000, 0.5000]])
    """

    name = "scales"

    def __init__(self, streams: int) -> None:
        super().__init__(streams, streams)

    def start(self) -> Tensor:
        return torch.ones(self.streams)

    def forward(self, logits: Tensor) -> Tensor:
        return torch.diag_embed(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def violation(self, matrix: Tensor) -> Tensor:
        return (matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))).abs().amax((-2, -1))

    def triton_form(self) -> TritonForm | str:
        return _make_form(self.streams)


@triton.jit
def _entries(F: tl.constexpr):
    i = tl.arange(0, F.rows)[:, None]
    j = tl.arange(0, F.columns)[None, :]
    return tl.where(i == j, i, 0), (i == j).to(tl.float32)


@triton.jit
def _mix(m, F: tl.constexpr):
    return m


@triton.jit
def _derivative(m, h, grad, F: tl.constexpr):
    return grad


@functools.cache
def _make_form(streams: int) -> TritonForm:
    return TritonForm(streams, streams, streams, streams, _entries, _mix, _derivative)
