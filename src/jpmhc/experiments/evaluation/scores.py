"""Scores of single rows: the shares of rows and of tokens that are right, and the loss.

`RowScorer` is also the base class of all scorers, which take answers in any order and on any process, and compute
metrics at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from jpmhc.experiments.models.losses import PAD

Metrics = dict[str, Any]  # numbers and tables of numbers by name, ready for JSON
Records = dict[str, Any]  # a process's records of its rows, for another process


@dataclass(frozen=True)
class Answers:
    """A model's answers to a batch of rows."""

    tokens: Tensor  # [B, S] integers, the most likely tokens
    confidence: Tensor  # [B] floats in [0, 1]: sigmoid of the halting logit
    loss: Tensor  # [B] floats: each row's mean cross-entropy over its scored labels


class NonFiniteAnswers(ValueError):
    """The error for a model whose answers are NaN or infinite."""


class RowScorer:
    """A scorer that averages exact accuracy, token accuracy and loss over the test rows numbered `rows`.

    The scorer stores a small record per row and averages in the order of row numbers. So the result is bit-identical
    for every order of the updates and every number of processes.

    >>> import torch
    >>> scorer, labels = RowScorer(np.arange(2)), torch.tensor([[1, 2], [1, 2]])
    >>> scorer.update(np.arange(2), labels, Answers(torch.tensor([[1, 2], [1, 1]]), torch.ones(2), torch.zeros(2)))
    >>> scorer.result()["exact_accuracy"], scorer.result()["token_accuracy"]
    (0.5, 0.75)
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = np.unique(rows)
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
        """Whether some row has a known answer; otherwise `result` raises an error."""
        return True

    def update(self, rows: np.ndarray, labels: Tensor, answers: Answers) -> None:
        """Record the answers to the test rows numbered `rows` [B], whose true tokens are `labels` [B, S]."""
        scored = labels != PAD
        count = scored.sum(-1)
        right = ((answers.tokens == labels) & scored).sum(-1)
        loss = answers.loss.double()
        if not bool(loss.isfinite().all() & answers.confidence.isfinite().all()):
            raise NonFiniteAnswers("the model answers with numbers that are not finite: its weights are spoilt")
        self._write(
            rows,
            seen=np.ones(len(rows), bool),
            known=(count > 0).cpu().numpy(),
            exact=((right == count) & (count > 0)).cpu().numpy(),
            tokens=(right.double() / count.clamp(min=1)).cpu().numpy(),
            loss=loss.cpu().numpy(),
            confidence=answers.confidence.double().cpu().numpy(),
        )

    def collected(self) -> Records:
        """Return all records so far, for another process's `merge`."""
        seen = self.columns["seen"]
        return {"rows": self.rows[seen], "columns": {name: column[seen] for name, column in self.columns.items()}}

    def merge(self, collected: Records) -> None:
        """Add the records that another process has collected in the same evaluation."""
        self._write(collected["rows"], **collected["columns"])

    def _write(self, rows: np.ndarray, **columns: np.ndarray) -> None:
        at = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        if not np.array_equal(self.rows[at], rows):
            raise ValueError("an answer came for a test row that is not part of this evaluation")
        for name, values in columns.items():
            self.columns[name][at] = values

    def require_complete(self) -> None:
        """Raise a ValueError if a row has no answer yet."""
        if missing := int(np.sum(~self.columns["seen"])):
            raise ValueError(f"{missing} of {len(self.rows)} test rows have no answer yet")

    def result(self, pool: Sequence[Self] = ()) -> Metrics:
        """Return the metrics by name over the rows with known answers; the model must have answered every row.

        Tasks that vote add the votes of the scorers in `pool`, which scored other checkpoints on the same rows.
        """
        self.require_complete()
        known = self.columns["known"]
        if not known.any():
            raise ValueError("no test row has a known answer to compare with; write predictions instead of a score")

        def mean(name: str) -> float:
            return float(np.average(self.columns[name][known], weights=self.weights[known]))

        return {
            "rows": int(known.sum()),
            "exact_accuracy": mean("exact"),
            "token_accuracy": mean("tokens"),
            "lm_loss": mean("loss"),
            "confidence": mean("confidence"),
        }

    def headline(self, result: Metrics) -> list[str]:
        """Return the names of the metrics that `summarize` shows."""
        return ["exact_accuracy", "token_accuracy", "lm_loss"]

    def summarize(self, result: Metrics) -> str:
        """Return the main numbers of a result in one line, with standard errors if the result has them."""
        errors = result.get("standard_error") or {}
        parts = []
        for name in self.headline(result):
            if name in result:
                scale, digits, unit = (1, 4, "") if name == "lm_loss" else (100, 2, " %")
                error = f" ± {scale * errors[name]:.{digits}f}" if errors.get(name) else ""
                parts.append(f"{name.replace('_', ' ')} {scale * result[name]:.{digits}f}{unit}{error}")
        return f"{result['rows']} rows: " + ", ".join(parts)
