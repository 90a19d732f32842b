"""Metrics of single rows: how often a row is right, how many of its tokens, at what loss."""

from typing import Any

import numpy as np

from jpmhc.trm.tasks.batch import PAD, Answers, Batch


class SpoiltAnswers(ValueError):
    """A model's answers are not numbers."""


class RowScorer:
    """Exact accuracy, token accuracy and loss, averaged over test rows; scores tasks that have nothing to vote on.

    Keeps one small record a row and averages in the order of the row numbers, so that the result does not depend on
    the order or sharding of the updates, to the bit.

    Args:
        rows: numbers of the test rows that the evaluation covers.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = np.unique(rows)
        if not len(self.rows):
            raise ValueError("an evaluation needs at least one test row.")
        self.weights = np.ones(len(self.rows))
        self.columns = {
            "seen": np.zeros(len(self.rows), bool),
            "known": np.zeros(len(self.rows), bool),
            "exact": np.zeros(len(self.rows), bool),
            "tokens": np.zeros(len(self.rows)),
            "loss": np.zeros(len(self.rows)),
            "confidence": np.zeros(len(self.rows)),
        }

    @property
    def scorable(self) -> bool:
        """Whether any row has a known answer to compare with."""
        return True

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Take the answers to the test rows numbered `rows`."""
        scored = batch.labels != PAD  # [B, S]
        count = scored.sum(-1)
        right = ((answers.tokens == batch.labels) & scored).sum(-1)
        loss = answers.loss.double()
        if not bool(loss.isfinite().all() & answers.confidence.isfinite().all()):
            raise SpoiltAnswers("the model answers with numbers that are not finite: its weights are spoilt.")
        self._write(
            rows,
            seen=np.ones(len(rows), bool),
            known=(count > 0).cpu().numpy(),
            exact=((right == count) & (count > 0)).cpu().numpy(),
            tokens=(right.double() / count.clamp(min=1)).cpu().numpy(),
            loss=loss.cpu().numpy(),
            confidence=answers.confidence.double().cpu().numpy(),
        )

    def state(self) -> dict[str, Any]:
        """What has been collected so far, to be sent to another rank."""
        seen = self.columns["seen"]
        return {"rows": self.rows[seen], "columns": {name: column[seen] for name, column in self.columns.items()}}

    def merge(self, state: dict[str, Any]) -> None:
        """Take over what another rank has collected of the same evaluation."""
        self._write(state["rows"], **state["columns"])

    def _write(self, rows: np.ndarray, **columns: np.ndarray) -> None:
        at = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        if not np.array_equal(self.rows[at], rows):
            raise ValueError("an answer came for a test row that is not part of this evaluation.")
        for name, values in columns.items():
            self.columns[name][at] = values

    def require_complete(self) -> None:
        """Raise unless every row has been answered."""
        if missing := int(np.sum(~self.columns["seen"])):
            raise ValueError(f"{missing} of {len(self.rows)} test rows have no answer yet.")

    def result(self) -> dict[str, Any]:
        """Means over the rows whose answer is known; refuses an evaluation that has not reached every row."""
        self.require_complete()
        known = self.columns["known"]
        if not known.any():
            raise ValueError("no test row has a known answer to compare with; write predictions instead of a score.")

        def mean(name: str) -> float:
            return float(np.average(self.columns[name][known], weights=self.weights[known]))

        return {
            "rows": int(known.sum()),
            "exact_accuracy": mean("exact"),
            "token_accuracy": mean("tokens"),
            "lm_loss": mean("loss"),
            "confidence": mean("confidence"),
        }
