"""The losses of the recursive model: stablemax cross-entropy of the grid, and the halting head's cross-entropy.

The halting head predicts whether the model's answer to a row is exactly right.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 0  # the padding token; labels equal to PAD are neither trained on nor scored


class RowLosses(NamedTuple):
    """The losses and scores of each row of a batch."""

    language: Tensor  # [B] float64, mean cross-entropy over the row's labels
    halting: Tensor  # [B] float32 or float64, binary cross-entropy of "this row is exactly right"
    correct: Tensor  # [B] float32, fraction of the row's labels that the greedy prediction gets right
    exact: Tensor  # [B] bool, whether all labels are right


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Return the stablemax cross-entropy in float64 for logits [..., V] and labels [...] from 0 to V − 1. [...]

    Stablemax is softmax with the exponential replaced by :math:`s(x) = x + 1` for :math:`x \ge 0` and :math:`s(x) =
    1/(1 - x)` for :math:`x < 0`, so that it neither overflows nor rounds small probabilities to zero. In both cases
    :math:`\log s(x) = \operatorname{sign}(x) \log(1 + |x|)`. Labels equal to PAD (the padding, 0) have a loss too.
    """
    logits = logits.double()
    log_s = torch.where(logits < 0, -torch.log1p(-logits.clamp(max=0)), torch.log1p(logits.clamp(min=0)))
    # A masked sum, not a gather: Triton 3.6 cannot compile the gather fused with sums in float64.
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.where(labels[..., None] == vocabulary, log_s, 0.0).sum(-1)
    return log_s.exp().sum(-1).log() - chosen


def row_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each row's mean stablemax cross-entropy over the labels other than PAD (0). [B] float64

    It is 0 for a row without such labels. Logits are [B, S, V] and labels [B, S].
    """
    scored = labels != PAD
    losses = torch.where(scored, stablemax_cross_entropy(logits, labels), 0.0)
    return losses.sum(-1) / scored.sum(-1).clamp(min=1)


def row_losses(logits: Tensor, labels: Tensor, q_halt: Tensor) -> RowLosses:
    """Compute the losses and scores of each row, from logits [B, S, V] and labels [B, S].

    `q_halt` [B] is the logit of "this row is exactly right", float32 or float64.
    """
    scored = labels != PAD
    with torch.no_grad():
        hits = (logits.argmax(-1) == labels) & scored
        count = scored.sum(-1)
        exact = hits.sum(-1) == count
        correct = hits.sum(-1) / count.clamp(min=1)
    halting = F.binary_cross_entropy_with_logits(q_halt, exact.to(q_halt.dtype), reduction="none")
    return RowLosses(row_cross_entropy(logits, labels), halting, correct, exact)
