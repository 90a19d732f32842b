"""Metrics of single rows: how often a row is right, how many of its tokens, at what loss."""

from typing import Any

import numpy as np

from jpmhc.tasks.batch import PAD, Answers, Batch


class RowScorer:
    """Exact accuracy, token accuracy and loss, averaged over test rows; scores tasks that have nothing to vote on.

    Keeps one small record a row and averages in the order of the row numbers, so that the result does not depend on
    the order or sharding of the updates, to the bit.

    Args:
        rows: numbers of the test rows that the evaluation covers.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = np.unique(rows)
        shape = self.rows.shape
        self.seen = np.zeros(shape, bool)
        self.exact = np.zeros(shape, bool)
        self.tokens = np.zeros(shape)
        self.loss = np.zeros(shape)
        self.confidence = np.zeros(shape)

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Take the answers to the test rows numbered `rows`."""
        scored = batch.labels != PAD  # [B, S]
        right = (answers.tokens == batch.labels) & scored
        count = scored.sum(-1)
        at = self._places(rows)
        self.seen[at] = True
        self.exact[at] = ((right.sum(-1) == count) & (count > 0)).cpu().numpy()
        self.tokens[at] = (right.sum(-1).double() / count.clamp(min=1)).cpu().numpy()
        self.loss[at] = answers.loss.double().cpu().numpy()
        self.confidence[at] = answers.confidence.double().cpu().numpy()

    def merge(self, other: "RowScorer") -> None:
        """Take over what another rank has collected of the same evaluation."""
        if not np.array_equal(self.rows, other.rows):
            raise ValueError("only scores of the same test rows can be merged; these were made for different rows.")
        for name in ("exact", "tokens", "loss", "confidence"):
            getattr(self, name)[other.seen] = getattr(other, name)[other.seen]
        self.seen |= other.seen

    def result(self) -> dict[str, Any]:
        """Means over rows; refuses an evaluation that has not reached every row."""
        self.require_complete()
        return {
            "rows": len(self.rows),
            "exact_accuracy": float(self.exact.mean()),
            "token_accuracy": float(self.tokens.mean()),
            "lm_loss": float(self.loss.mean()),
            "confidence": float(self.confidence.mean()),
        }

    def require_complete(self) -> None:
        """Raise unless every row has been answered."""
        if not self.seen.all():
            raise ValueError(f"{np.sum(~self.seen)} of {len(self.rows)} test rows have no answer yet.")

    def _places(self, rows: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        if not np.array_equal(self.rows[at], rows):
            raise ValueError("an answer came for a test row that is not part of this evaluation.")
        return at
