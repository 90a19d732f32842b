"""Sudoku as a task: generated puzzles, which a small recursive model learns in minutes on a laptop.

Puzzles have exactly one solution, and training and test puzzles have different solutions. Training shows puzzles in
random variations by symmetries of the grid. The split is by classes of solutions that are equal up to these symmetries,
so that no variation of a training puzzle has a test solution (a band is a row of boxes, a stack a column of boxes):

- 6 × 6 and 9 × 9: all symmetries (renaming digits; exchanging rows in a band, bands, columns in a stack, stacks; and
  transposing if boxes are square). No test solution is equivalent to a training solution.
- 4 × 4: only renaming digits. Under all symmetries the 288 grids would fall into two classes, too few to split; under
  renaming they fall into 12. No test solution is a renamed training solution, but it may be a training solution turned
  around or with rows exchanged.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from jpmhc import checks
from jpmhc.checks import Count
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.sudoku import grids
from jpmhc.experiments.tasks.task import Batch, PublishedTask, Task, TaskConfig, TaskOptions

BLANK = 1  # token of an empty cell; digit d has token d + 1, PAD does not occur

_ORDER, _SPLIT, _CLUES, _VARY, _TEST = range(5)  # words of the random numbers' keys


@dataclass(frozen=True)
class SudokuConfig(TaskConfig):
    """The size and number of the puzzles to generate."""

    size: Literal[4, 6, 9] = 4  # Number of digits, rows and columns.
    puzzles: Count = 1000
    """Number of training puzzles; each is varied by random symmetries of the grid whenever it is shown."""
    test_puzzles: Count = 500  # Number of test puzzles, whose solutions training never shows.
    test_share: Annotated[float, "(0, 1)"] = 0.25  # Share of the classes of equivalent solutions for test puzzles.
    extra_clues: int = 2  # Largest number of clues to add to a puzzle's minimal set of clues.
    seed: int = 0  # Seed of puzzles, split and order.

    def __post_init__(self) -> None:
        geometry = grids.Geometry(self.size)
        checks.fields(self)
        checks.inside(self.extra_clues, f"[0, {geometry.cells}]", "extra_clues")

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: TaskOptions) -> PublishedTask | None:
        """Return the task of 9 × 9 puzzles, which every published Sudoku model has, or None for another vocabulary."""
        if vocabulary != 9 + 2:
            return None
        return PublishedTask(cls(size=9, **options), "its scores are on puzzles generated here, not on the model's own")

    def build(self) -> "Sudoku":
        """Generate the puzzles."""
        return Sudoku(self)


class Sudoku(Task):
    """Sudoku puzzles of one size as rows of tokens: 1 for an empty cell, digit + 1 for a clue or an answer.

    All puzzles follow the same rule and share one identifier.
    """

    def __init__(self, config: SudokuConfig) -> None:
        self.config = config
        self.geometry = grids.Geometry(config.size)
        self.vocabulary, self.length = config.size + 2, self.geometry.cells
        self.test_rows = config.test_puzzles
        train, test = self._draw_solutions()
        self.solutions = np.concatenate([train, test])  # [puzzles + test_puzzles, cells], training first
        self.clues = grids.draw_minimal_clues(self.solutions, self.geometry, config.seed)

    def _draw_solutions(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw the solutions of training and of test puzzles, from different classes. [puzzles, cells] each"""
        config, geometry = self.config, self.geometry
        if config.size == 4:
            solutions = grids.list_solutions(geometry)
            classes = [grids.relabel_digits(solution, 4) for solution in solutions]
        else:
            # Usually enough solutions for training and test; if not, np.resize below repeats some.
            count = int(1.2 * max(config.puzzles / (1 - config.test_share), config.test_puzzles / config.test_share))
            solutions = grids.draw_solutions(count, geometry, config.seed)
            classes = [grids.signature(solution, geometry) for solution in solutions]
        names, member = np.unique(np.array(classes), return_inverse=True)
        held_out = max(1, round(config.test_share * len(names)))
        rank = np.empty(len(names), int)
        rank[counter.shuffled(len(names), config.seed, _SPLIT)] = np.arange(len(names))
        if held_out == len(names):
            raise ValueError(
                f"{len(solutions)} solutions fall into one class, which cannot be split: choose more puzzles"
            )
        is_test = rank[member] < held_out
        pick = [np.flatnonzero(~is_test), np.flatnonzero(is_test)]
        return solutions[np.resize(pick[0], config.puzzles)], solutions[np.resize(pick[1], config.test_puzzles)]

    @property
    def epoch_length(self) -> int:
        """The number of training puzzles; an epoch shows each of them once."""
        return self.config.puzzles

    def examples(self, positions: np.ndarray) -> Batch:
        """Return the training rows at these positions; an epoch shows a random variation of every puzzle once."""
        epoch, offset = np.divmod(positions, self.epoch_length)
        puzzle = np.empty(len(positions), np.int64)
        for e in np.unique(epoch):
            here = epoch == e
            puzzle[here] = counter.shuffled(self.epoch_length, self.config.seed, _ORDER, int(e))[offset[here]]
        return self._batch(puzzle, _VARY, np.asarray(positions))

    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return test puzzles by number, each always in the same variation."""
        return self._batch(self.config.puzzles + np.asarray(rows), _TEST, np.asarray(rows))

    def _batch(self, puzzle: np.ndarray, purpose: int, draw: np.ndarray) -> Batch:
        """Return the puzzles numbered `puzzle` [B]; `purpose` and `draw` [B] key random variations and extra clues."""
        size, cells, key = self.config.size, self.geometry.cells, (self.config.seed, purpose, draw)
        columns = [np.asarray(word)[..., None] for word in key]
        spare = counter.uniform(*columns, 0, np.arange(cells)) + self.clues[puzzle]  # sorts clues last, others randomly
        extra = counter.below(self.config.extra_clues + 1, *key, 1)
        shown = self.clues[puzzle] | (np.argsort(np.argsort(spare, -1), -1) < extra[:, None])
        names = np.argsort(counter.bits(*columns, 2, np.arange(size)), -1)
        digits = np.take_along_axis(names, self.solutions[puzzle], -1)
        if size != 4:
            height, width = self.geometry.box
            rows, cols = self.geometry.lines(height, *key, 3), self.geometry.lines(width, *key, 4)
            cell = (rows[:, :, None] * size + cols[:, None, :]).reshape(-1, cells)
            if height == width:
                flat = np.arange(cells).reshape(size, size).T.reshape(cells)
                cell = np.where(counter.below(2, *key, 5)[:, None] == 1, cell[:, flat], cell)
            digits, shown = np.take_along_axis(digits, cell, -1), np.take_along_axis(shown, cell, -1)
        labels = digits + 1 + BLANK
        inputs = np.where(shown, labels, BLANK)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), torch.zeros(len(labels), dtype=torch.int64))

    def describe(self, identifiers: np.ndarray) -> list[str]:
        """Return the same name for every identifier, because Sudoku puzzles share one."""
        return [f"Sudoku {self.config.size} × {self.config.size}" for _ in identifiers]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self.config).encode(), digest_size=12)
        digest.update(self.solutions.astype(np.uint8).tobytes() + self.clues.tobytes())
        return digest.hexdigest()
