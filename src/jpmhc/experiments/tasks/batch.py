"""Rows of tokens that a model is asked about, and the answers it gives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jpmhc.experiments.models.losses import PAD

__all__ = ["PAD", "Answers", "Batch"]


@dataclass(frozen=True)
class Batch:
    """Rows of one task, on one device."""

    inputs: Tensor  # [B, S] int64, tokens below the task's vocabulary
    labels: Tensor  # [B, S] int64, PAD where there is nothing to predict
    identifiers: Tensor  # [B] int64, row of the puzzle-embedding table

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Copy the rows to another device."""
        return Batch(
            self.inputs.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.identifiers.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Batch":
        """Copy the rows to pinned memory, from which a GPU can fetch them while the host goes on."""
        return Batch(self.inputs.pin_memory(), self.labels.pin_memory(), self.identifiers.pin_memory())

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Answers:
    """A model's answers to the rows of a batch."""

    tokens: Tensor  # [B, S] integers, the greedy prediction
    confidence: Tensor  # [B] floats in [0, 1]: sigmoid of the halting logit
    loss: Tensor  # [B] floats: each row's mean cross-entropy over its scored labels
