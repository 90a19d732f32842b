"""Sudoku as a task: puzzles generated on the spot, which a small recursive model learns in minutes on a laptop.

Puzzles have exactly one solution and are split into training and test by solution. The split is taken over classes of
solutions under the symmetries that vary the training puzzles, so that no variation turns a training puzzle into a test
solution:

- 6 × 6 and 9 × 9: all symmetries (renaming digits; exchanging rows in a band, bands, columns in a stack, stacks; and
  transposing, where boxes are square). A test solution is not equivalent to any training solution.
- 4 × 4: renaming digits alone. The 288 grids fall into only two classes under all symmetries, which leaves nothing to
  split, but into 12 under renaming: a test solution is never a training solution with other digits, though it may
  be one turned around or with rows exchanged.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from jpmhc import checks
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.sudoku import grids
from jpmhc.experiments.tasks.task import Batch, PublishedTask, Task, TaskConfig

BLANK = 1  # token of an empty cell; digit d has token d + 1, PAD does not occur

_ORDER, _SPLIT, _CLUES, _VARY, _TEST = range(5)  # purposes of a draw, part of its key


@dataclass(frozen=True)
class SudokuConfig(TaskConfig):
    """Which puzzles to generate."""

    size: Literal[4, 6, 9] = 4
    """Digits of a grid."""
    puzzles: int = 1000
    """Clue sets made for training; each is varied by the symmetries of the grid whenever it is shown."""
    test_puzzles: int = 500
    """Puzzles held out, of solutions that training never shows."""
    test_share: float = 0.25
    """Share of the classes of solutions that is held out."""
    extra_clues: int = 2
    """A puzzle shows a clue set of which no clue can be spared, and up to this many clues more."""
    seed: int = 0
    """Decides puzzles, split and order."""

    def __post_init__(self) -> None:
        geometry = grids.Geometry(self.size)
        checks.whole_number(self.puzzles, "puzzles")
        checks.whole_number(self.test_puzzles, "test_puzzles")
        checks.inside(self.test_share, "(0, 1)", "test_share")
        checks.inside(self.extra_clues, f"[0, {geometry.cells}]", "extra_clues")

    @classmethod
    def of_published_model(cls, vocabulary: int, identifiers: Path, options: dict[str, Any]) -> PublishedTask | None:
        """Return 9 × 9 puzzles, the size of all published models; they are generated here, and not the model's own."""
        if vocabulary != 9 + 2:
            return None
        return PublishedTask(cls(size=9, **options), "its scores are on puzzles generated here, not on the model's own")

    def build(self) -> "Sudoku":
        """Generate the puzzles."""
        return Sudoku(self)


class Sudoku(Task):
    """Puzzles of one size as rows of tokens: 1 for an empty cell, digit + 1 for a clue or the answer.

    All puzzles follow the same rule, so that they share one identifier.
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
        """Draw the solutions of the training and of the test puzzles, from disjoint classes."""
        config, geometry = self.config, self.geometry
        if config.size == 4:
            solutions = grids.list_solutions(geometry)
            classes = [grids.relabel_digits(solution, 4) for solution in solutions]
        else:
            # Enough for both sides whatever the sizes of the classes that fall to each, short of bad luck, which the
            # cycling below covers.
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
        """Number of training puzzles, each of which an epoch shows once."""
        return self.config.puzzles

    def examples(self, positions: np.ndarray) -> Batch:
        """Return training rows by position; an epoch shows every puzzle once, in random order and randomly varied."""
        epoch, offset = np.divmod(positions, self.epoch_length)
        puzzle = np.empty(len(positions), np.int64)
        for e in np.unique(epoch):
            here = epoch == e
            puzzle[here] = counter.shuffled(self.epoch_length, self.config.seed, _ORDER, int(e))[offset[here]]
        return self._batch(puzzle, _VARY, np.asarray(positions))

    def test_examples(self, rows: np.ndarray) -> Batch:
        """Return held-out puzzles by number, each varied in one fixed way."""
        return self._batch(self.config.puzzles + np.asarray(rows), _TEST, np.asarray(rows))

    def _batch(self, puzzle: np.ndarray, purpose: int, draw: np.ndarray) -> Batch:
        """Return puzzles [B] with the variation and the extra clues that belong to `draw` [B]."""
        size, cells, key = self.config.size, self.geometry.cells, (self.config.seed, purpose, draw)
        columns = [np.asarray(word)[..., None] for word in key]
        spare = counter.uniform(*columns, 0, np.arange(cells)) + self.clues[puzzle]  # clues last, the rest shuffled
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
        """Return the same name for every identifier, as Sudoku puzzles share one."""
        return [f"Sudoku {self.config.size} × {self.config.size}" for _ in identifiers]

    def fingerprint(self) -> str:
        """Return a digest of the configuration and of the puzzles made from it."""
        digest = hashlib.blake2b(repr(self.config).encode(), digest_size=12)
        digest.update(self.solutions.astype(np.uint8).tobytes() + self.clues.tobytes())
        return digest.hexdigest()
