"""The contract between a task and everything that trains on it or evaluates it.

A task has two parts: a configuration (`TaskConfig`, a frozen dataclass whose fields are the options), and the task
itself (`Task`), which turns positions and row numbers into rows of tokens and makes a scorer for a model's answers.
Training and evaluation use these and know no task by name.

A task is a pure function of its configuration. Training examples form one endless sequence and are requested by their
position in it, test examples by their row number. Nothing is consumed: any number of processes sees the same rows, and
a resumed run needs to know its position and nothing else.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from jpmhc.experiments.evaluation.scores import RowScorer
from jpmhc.experiments.evaluation.votes import Answered, VoteScorer


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


class Task(ABC):
    """The training rows, the test rows and the score of one task."""

    vocabulary: int
    """Number of tokens, PAD included."""
    length: int
    """Tokens of a row (ARC: 900); the model adds its puzzle slots to them."""
    test_rows: int
    """Number of test rows."""
    identifier_count: int = 1
    """Rows of the puzzle-embedding table; row 0 belongs to no puzzle."""
    test_kind: str = "held out"
    """A word for the test rows: "held out", or that training has seen them."""

    @abstractmethod
    def examples(self, positions: np.ndarray) -> Batch:
        """Return the training rows at these positions (integers >= 0, any order) of the endless sequence."""

    @abstractmethod
    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return test rows by number, labels included."""

    @abstractmethod
    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Return a name for each identifier: its puzzle and variant."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short digest of everything that decides the rows: equal digests mean equal rows and identifiers."""

    def test_selection(self, variants: int | None = None, seed: int = 0) -> np.ndarray:
        """Return the numbers of the test rows to evaluate, ascending: all, or at most `variants` of every puzzle."""
        return np.arange(self.test_rows)

    def scorer(self, rows: np.ndarray) -> RowScorer:
        """Return an empty scorer for an evaluation over `rows`, as `test_selection` returned them."""
        return RowScorer(rows)


class VotingTask(Task):
    """A task whose puzzles have several variants, which vote on the answer."""

    @abstractmethod
    def scorer(self, rows: np.ndarray, keep_grids: bool = False) -> VoteScorer:
        """Return an empty scorer for an evaluation over `rows`; `keep_grids` is for submissions."""

    @abstractmethod
    def rows_of_puzzles(self, rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return the test rows that belong to the named puzzles; raise an error for a name that is not tested."""

    @abstractmethod
    def submission(self, answered: Sequence[Answered]) -> Mapping[str, object]:
        """Return answers in the form in which they are handed in, ready for JSON."""


@dataclass(frozen=True)
class NoOverrides:
    """No option of the task can be changed in an evaluation."""


@dataclass(frozen=True)
class PublishedTask:
    """The task that a published model was trained on."""

    config: "TaskConfig"
    remark: str = ""
    """A sentence about the parts of the model's data that are not here; empty: all are."""


class TaskConfig(ABC):
    """The options of a task; every task derives a frozen dataclass from it and enters that in the registry."""

    seed: int

    votes: ClassVar[bool] = False
    """Whether puzzles have several variants, which vote on the answer. An evaluation can then draw some variants, pool
    the votes of several checkpoints, and write a submission; `build` returns a `VotingTask`."""
    Overrides: ClassVar[type] = NoOverrides
    """A dataclass of the options that an evaluation may change: the names are those of fields here, None means no
    change."""
    places: ClassVar[tuple[str, ...]] = ()
    """Options that name files. They may change when a run is resumed: the fingerprint covers the files' content."""

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: dict[str, Any]) -> PublishedTask | None:
        """Return the task that a published model was trained on, or None if it was another task.

        Args:
            vocabulary: Tokens of the model.
            identifiers: The file that names the rows of the model's puzzle table.
            options: Options of the task to set, by name.
        """
        return None

    @abstractmethod
    def build(self) -> Task:
        """Read or generate the puzzles."""

    def override(self, options: dict[str, Any]) -> Self:
        """Return this configuration with the options that an evaluation changes; refuse all others."""
        allowed = {field.name for field in dataclasses.fields(self.Overrides)}
        for name in options:
            if name not in allowed:
                raise ValueError(f"an evaluation on this task cannot choose {name.replace('_', '-')}: leave it out")
            if name in self.places and getattr(self, name) is None:
                raise ValueError(
                    f"the run was trained without {name.replace('_', ' ')}, so that none can have moved: "
                    f"leave out --{name.replace('_', '-')}"
                )
        return dataclasses.replace(self, **options)  # type: ignore[type-var]
