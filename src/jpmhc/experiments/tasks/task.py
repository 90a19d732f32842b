"""The interface of tasks for training and evaluation.

A task has two parts: a configuration (`TaskConfig`, a frozen dataclass whose fields are the options), and the task
itself (`Task`), which turns positions and row numbers into rows of tokens and makes a scorer for a model's answers.
Training and evaluation use only this interface.

Each row has an identifier: the number of a row in the model's puzzle table, a matrix with one learned vector for each
puzzle, or for each variant of a puzzle.

A task is a pure function of its configuration. Training examples form an endless sequence and are requested by
position; test examples are requested by row number. So all processes see the same rows, and a resumed run needs only
its position.
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
from jpmhc.experiments.evaluation.votes import AnsweredTest, VoteScorer
from jpmhc.files import read_json

TaskOptions = dict[str, Any]  # some fields of a `TaskConfig` by name


@dataclass(frozen=True)
class Batch:
    """A batch of a task's rows on one device."""

    inputs: Tensor  # [B, S] int64, tokens below the task's vocabulary
    labels: Tensor  # [B, S] int64, PAD if there is nothing to predict
    identifiers: Tensor  # [B] int64, row of the puzzle table

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Copy the rows to another device."""
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in vars(self).values()))

    def pin_memory(self) -> "Batch":
        """Copy the rows to pinned memory, so that copies to a GPU do not block the host."""
        return Batch(*(tensor.pin_memory() for tensor in vars(self).values()))

    def __len__(self) -> int:
        return len(self.inputs)


class Task(ABC):
    """The training rows, the test rows and the scorer of one task."""

    vocabulary: int  # number of different tokens, including PAD
    length: int  # tokens per row (ARC: 900), without the model's puzzle slots
    test_rows: int  # number of test rows
    identifier_count: int = 1  # number of rows of the puzzle table; row 0 belongs to no puzzle
    test_kind: str = "held out"  # words for the test rows: "held out", or "tests seen in training"

    @abstractmethod
    def examples(self, positions: np.ndarray) -> Batch:
        """Return the training rows at these positions (integers >= 0, in any order) of the endless sequence."""

    @abstractmethod
    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return the test rows with these numbers, including labels."""

    @abstractmethod
    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Return the name of each identifier's puzzle and variant; identifiers are rows of the puzzle table."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short digest that is equal only for tasks with equal rows and identifiers."""

    def test_selection(self, variants: int | None = None, seed: int = 0) -> np.ndarray:
        """Return the ascending numbers of all test rows, or of the rows of at most `variants` variants per puzzle."""
        return np.arange(self.test_rows)

    def scorer(self, rows: np.ndarray) -> RowScorer:
        """Return an empty scorer for the test rows `rows`, which `test_selection` returned."""
        return RowScorer(rows)


class VotingTask(Task):
    """A task whose puzzles have several variants; the answers to the variants vote on the final answer."""

    @abstractmethod
    def scorer(self, rows: np.ndarray, keep_grids: bool = False) -> VoteScorer:
        """Return an empty scorer for the test rows `rows`; with `keep_grids` it stores grids for submissions."""

    @abstractmethod
    def rows_of_puzzles(self, rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return the row numbers in `rows` that belong to the puzzles `names`.

        Raises a ValueError for the name of a puzzle without tests.
        """

    @abstractmethod
    def submission(self, answered: Sequence[AnsweredTest]) -> Mapping[str, object]:
        """Return the answers in the format of a submission to the task's competition, ready for JSON."""


@dataclass(frozen=True)
class PublishedTask:
    """The task that a published model was trained on."""

    config: "TaskConfig"
    remark: str = ""  # sentence about data of the model that are missing in the task; empty if none are missing


NO_PUZZLE = "<blank>"  # the name of rows without a puzzle, such as row 0


def read_identifiers(path: Path) -> list[str]:
    """Read the `identifiers.json` of a published model, whose entry k names the puzzle of row k in its puzzle table."""
    names = read_json(path)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is not a list of names, as the identifiers.json of a published model is")
    if names[0] != NO_PUZZLE:
        raise ValueError(
            f"the first entry of {path} is {names[0]!r}; row 0 belongs to no task and is named {NO_PUZZLE}"
        )
    return names


class TaskConfig(ABC):
    """The options of a task. Each task has a subclass that is a frozen dataclass and is listed in `TASKS`."""

    seed: int

    votes: ClassVar[bool] = False
    """Whether variants of a puzzle vote on the answer, so that `build` returns a `VotingTask`. Evaluations can then use
    a sample of the variants, pool the votes of several checkpoints, and write a submission."""
    changeable: ClassVar[tuple[str, ...]] = ()  # options that an evaluation may change
    file_options: ClassVar[tuple[str, ...]] = ()
    """Options that name files. They may change when a run is resumed, because the fingerprint covers the files'
    content."""

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: TaskOptions) -> PublishedTask | None:
        """Return the task of a published model, or None if the model was trained on another task.

        The model knows `vocabulary` tokens, and the file `identifiers` names the rows of its puzzle table. `options`
        are the fields of the configuration that the user chooses.
        """
        return None

    @abstractmethod
    def build(self) -> Task:
        """Read or generate the puzzles."""

    def override(self, options: TaskOptions) -> Self:
        """Return a copy with changed options; raise a ValueError for options that an evaluation may not change."""
        for name in options:
            if name not in self.changeable:
                raise ValueError(f"an evaluation on this task cannot choose {name.replace('_', '-')}: leave it out")
            if name in self.file_options and getattr(self, name) is None:
                raise ValueError(
                    f"the run was trained without {name.replace('_', ' ')}, so it has no path to change: "
                    f"leave out --{name.replace('_', '-')}"
                )
        return dataclasses.replace(self, **options)  # type: ignore[type-var]
