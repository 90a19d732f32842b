"""What a task is to the training loop and to the evaluation: rows of tokens in, answers back, one score.

A task is a pure function of its configuration. Training examples form one endless stream and are asked for by their
position in it, test examples by their row number; nothing is consumed, so any number of processes, ranks and loader
workers sees the same rows and a resumed run needs to know the position alone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

PAD = 0  # the token that means "nothing here"; a label equal to it is not trained on and not scored


@dataclass(frozen=True)
class Batch:
    """Rows of one task, on one device."""

    inputs: Tensor  # [B, S] int64, tokens below the task's vocabulary
    labels: Tensor  # [B, S] int64, PAD where there is nothing to predict
    identifiers: Tensor  # [B] int64, row of the puzzle-embedding table

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same rows on another device."""
        return Batch(
            self.inputs.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.identifiers.to(device, non_blocking=non_blocking),
        )

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Answers:
    """What a model said about the rows of a batch."""

    tokens: Tensor  # [B, S] integers, the greedy prediction
    confidence: Tensor  # [B] floats in [0, 1]: sigmoid of the halting logit
    loss: Tensor  # [B] floats: each row's mean cross-entropy over its scored labels


class Scorer(Protocol):
    """Collects answers row by row, in any order and on any rank, and turns them into numbers at the end."""

    rows: np.ndarray  # numbers of the test rows that the evaluation covers, ascending

    @property
    def scorable(self) -> bool:
        """Whether any of these rows has a known answer; where none has, there is no result."""

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Take the answers to the test rows numbered `rows` [B], which are the rows of `batch`."""

    def state(self) -> dict[str, Any]:
        """Everything collected so far, to be sent to another rank."""

    def merge(self, state: dict[str, Any]) -> None:
        """Take over what another rank's scorer of the same evaluation has collected."""

    def result(self) -> dict[str, Any]:
        """The metrics by name; the same whatever the order and sharding of the updates."""


class Task(Protocol):
    """Training stream, test rows and score of one task."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens, PAD included."""

    @property
    def length(self) -> int:
        """Tokens of a row (ARC: 900). Puzzle slots are the model's affair."""

    @property
    def identifiers(self) -> int:
        """Rows of the puzzle-embedding table; row 0 belongs to no puzzle."""

    @property
    def epoch_length(self) -> int:
        """Stream positions of one epoch: one random variant of every puzzle."""

    @property
    def test_rows(self) -> int:
        """Number of test rows, all variants included."""

    def examples(self, positions: np.ndarray) -> Batch:
        """Training rows at these positions (integers >= 0, any order) of the endless stream.

        A loop that draws a whole batch a step asks for `step * batch + row`; one that refills halted rows only asks
        for those rows alone, or counts the examples it has taken.
        """

    def test_examples(self, rows: np.ndarray) -> Batch:
        """Test rows by number, labels included."""

    def test_selection(self, variants: int | None = None, seed: int = 0) -> np.ndarray:
        """Numbers of the test rows to evaluate, ascending: all of them, or at most `variants` of every puzzle."""

    def scorer(self, rows: np.ndarray) -> Scorer:
        """An empty scorer for an evaluation over `rows`, as `test_selection` gave them."""

    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Names for messages: which puzzle, and which variant of it, each identifier stands for."""

    def fingerprint(self) -> str:
        """A short digest of everything that decides the stream: equal digests, equal rows and identifiers."""
