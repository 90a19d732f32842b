"""The contract between a task and everything that trains on it or evaluates it.

A task has three parts: a configuration (`TaskConfig`, a frozen dataclass whose fields are the options), the task itself
(`Task`), which turns positions and row numbers into rows of tokens, and a scorer (`Scorer`), which turns a model's
answers into numbers. Training and evaluation use these three and know no task by name.

A task is a pure function of its configuration. Training examples form one endless sequence and are requested by their
position in it, test examples by their row number. Nothing is consumed: any number of processes sees the same rows, and
a resumed run needs to know its position and nothing else.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from jpmhc.experiments.tasks.batch import Answers, Batch


class Scorer(Protocol):
    """Collects answers row by row, in any order and on any process, and turns them into metrics at the end."""

    rows: np.ndarray  # numbers of the test rows that the evaluation covers, ascending

    @property
    def scorable(self) -> bool:
        """Whether any of these rows has a known answer; where none has, `result` refuses."""

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Record the answers to the test rows numbered `rows` [B], which are the rows of `batch`."""

    def collected(self) -> dict[str, Any]:
        """Return everything recorded so far, to be sent to another process."""

    def merge(self, collected: dict[str, Any]) -> None:
        """Add what the scorer of another process has recorded in the same evaluation."""

    def result(self, pool: Sequence[Self] = ()) -> dict[str, Any]:
        """Compute the metrics by name; the order of the updates and their split over processes do not matter.

        Args:
            pool: scorers of other checkpoints over the same rows whose votes count too; for tasks that vote.
        """

    def summarize(self, result: dict[str, Any]) -> str:
        """Write the main numbers of a result in one line."""


@dataclass(frozen=True)
class VotedAnswer:
    """A grid that variants of a puzzle voted for."""

    grid: np.ndarray  # [h, w] uint8
    votes: int
    of: int  # votes cast


@dataclass(frozen=True)
class Answered:
    """One test of a puzzle and the grids that got the most votes."""

    puzzle: str  # its name
    test: int
    input: np.ndarray
    output: np.ndarray | None  # None: not known
    candidates: list[VotedAnswer]  # best first


class VoteScorer(Scorer, Protocol):
    """A scorer that keeps the grids voted for."""

    def answered(self) -> list[Answered]:
        """Return every test with its two best candidates."""


class Task(Protocol):
    """The training rows, the test rows and the score of one task."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens, PAD included."""

    @property
    def length(self) -> int:
        """Tokens of a row (ARC: 900); the model adds its puzzle slots to them."""

    @property
    def identifier_count(self) -> int:
        """Rows of the puzzle-embedding table; row 0 belongs to no puzzle."""

    @property
    def test_kind(self) -> str:
        """What the test rows are: "held out", or that training has seen them."""

    def examples(self, positions: np.ndarray) -> Batch:
        """Return the training rows at these positions (integers >= 0, any order) of the endless sequence."""

    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return test rows by number, labels included. `test_selection()` lists the numbers of all."""

    def test_selection(self, variants: int | None = None, seed: int = 0) -> np.ndarray:
        """Return the numbers of the test rows to evaluate, ascending: all, or at most `variants` of every puzzle."""

    def scorer(self, rows: np.ndarray) -> Scorer:
        """Return an empty scorer for an evaluation over `rows`, as `test_selection` gave them."""

    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Return a name for each identifier: which puzzle it stands for, and which variant of it."""

    def fingerprint(self) -> str:
        """Return a short digest of everything that decides the rows: equal digests mean equal rows and identifiers."""


class VotingTask(Task, Protocol):
    """A task whose puzzles have several variants, which vote on the answer."""

    def rows_of_puzzles(self, rows: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return those of the test rows that belong to the named puzzles; a name that is not tested is refused."""

    def vote_scorer(self, rows: np.ndarray) -> VoteScorer:
        """Return an empty scorer that also keeps the grids voted for."""

    def submission(self, answered: list[Answered]) -> Any:
        """Return answers in the form in which they are handed in, ready for JSON."""


@dataclass(frozen=True)
class NoOverrides:
    """No option of the task can be changed in an evaluation."""


@dataclass(frozen=True)
class PublishedTask:
    """The task that a published model was trained on."""

    config: "TaskConfig"
    remark: str = ""
    """A sentence about what of the model's data is not here; empty: all is."""


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
    """Options that say where files lie. They may change when a run is resumed: the fingerprint tells what they hold."""

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: dict[str, Any]) -> PublishedTask | None:
        """Return the task that a published model was trained on, or None where it was another task.

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
