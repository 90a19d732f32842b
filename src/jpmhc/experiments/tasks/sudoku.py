"""Sudoku as a task: generated puzzles, which a small recursive model learns in minutes on a laptop.

Puzzles have exactly one solution, and training and test puzzles have different solutions. Training shows puzzles in
random variations by symmetries of the grid. The split is by classes of solutions that are equal up to these symmetries,
so that no variation of a training puzzle has a test solution (a band is a row of boxes, a stack a column of boxes):

- 6 × 6 and 9 × 9: all symmetries (renaming digits; exchanging rows in a band, bands, columns in a stack, stacks; and
  transposing if boxes are square). No test solution is equivalent to a training solution.
- 4 × 4: only renaming digits. Under all symmetries the 288 grids would fall into two classes, too few to split; under
  renaming they fall into 12. No test solution is a renamed training solution, but it may be a training solution turned
  around or with rows exchanged.

Partly solved grids ("partials") are arrays of bit sets `[M, cells]`: bit `d` of a cell says that digit `d` is still
possible. A unit is a row, column or box. Deduction removes digits that another cell of a unit has, and fixes a digit
that only one cell of a unit can have. If deduction is not enough, `solvable` tries digits.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from jpmhc import checks
from jpmhc.checks import Count
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.task import Batch, PublishedTask, Task, TaskConfig, TaskOptions

BLANK = 1  # token of an empty cell; digit d has token d + 1, PAD does not occur

_ORDER, _SPLIT, _CLUES, _VARY, _TEST = range(5)  # words of the random numbers' keys
_SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
_COUNT = np.array([bits.bit_count() for bits in range(2**9)])  # number of digits in a set
_CHUNK = 8192  # most partials processed at a time, to bound memory


@dataclass(frozen=True)
class Geometry:
    """The cells, units and symmetries of a grid with `size` digits."""

    size: int

    def __post_init__(self) -> None:
        if self.size not in _SHAPES:
            raise ValueError(f"a Sudoku grid has 4, 6 or 9 digits, not {self.size}")

    @property
    def box(self) -> tuple[int, int]:
        """The numbers of rows and columns of a box."""
        return _SHAPES[self.size]

    @property
    def cells(self) -> int:
        """The number of cells."""
        return self.size**2

    @property
    def full(self) -> np.uint16:
        """The bit set of all digits."""
        return np.uint16(2**self.size - 1)

    @cached_property
    def units(self) -> np.ndarray:
        """The cells of every row, column and box: [3 · size, size]."""
        grid = np.arange(self.cells).reshape(self.size, self.size)
        height, width = self.box
        boxes = grid.reshape(self.size // height, height, self.size // width, width).swapaxes(1, 2)
        return np.concatenate([grid, grid.T, boxes.reshape(self.size, self.size)])

    @cached_property
    def units_of(self) -> np.ndarray:
        """The numbers of the three units that contain each cell: [cells, 3]."""
        return np.stack([np.flatnonzero((self.units == cell).any(1)) for cell in range(self.cells)])

    def lines(self, band: int, *key: np.ndarray | int) -> np.ndarray:
        """Return random orders of rows (or columns) in which bands of `band` rows stay together. [..., size]

        The words `key` [...] determine the orders (see `counter.bits`).
        """
        bands, keys = self.size // band, [np.asarray(word)[..., None] for word in key]
        outer = np.argsort(counter.bits(*keys, 0, np.arange(bands)), -1)  # [..., bands]
        inner = np.argsort(counter.bits(*(k[..., None] for k in keys), 1, *np.ogrid[:bands, :band]), -1)
        return (outer[..., None] * band + inner).reshape(*outer.shape[:-1], self.size)


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
        geometry = Geometry(self.size)
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
        self.geometry = Geometry(config.size)
        self.vocabulary, self.length = config.size + 2, self.geometry.cells
        self.test_rows = config.test_puzzles
        train, test = self._draw_solutions()
        self.solutions = np.concatenate([train, test])  # [puzzles + test_puzzles, cells], training first
        self.clues = draw_minimal_clues(self.solutions, self.geometry, config.seed)

    def _draw_solutions(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw the solutions of training and of test puzzles, from different classes. [puzzles, cells] each"""
        config, geometry = self.config, self.geometry
        if config.size == 4:
            solutions = list_solutions(geometry)
            classes = [relabel_digits(solution, 4) for solution in solutions]
        else:
            # Usually enough solutions for training and test; if not, np.resize below repeats some.
            count = int(1.2 * max(config.puzzles / (1 - config.test_share), config.test_puzzles / config.test_share))
            solutions = draw_solutions(count, geometry, config.seed)
            classes = [signature(solution, geometry) for solution in solutions]
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
        """Return the puzzles numbered `puzzle` [B]; `purpose` and `draw` [B] determine variations and extra clues."""
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


def deduce_digits(partials: np.ndarray, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """Remove digits that another cell of a unit has and fix digits that only one cell can have, until nothing changes.

    Returns the partials [M, cells] after all deductions, and whether each is free of contradictions, [M].
    """
    partials, alive = partials.copy(), np.ones(len(partials), bool)
    active = np.arange(len(partials))
    while len(active):
        now = partials[active]
        fixed = np.where(now & (now - np.uint16(1)), np.uint16(0), now)  # the digit of a decided cell, else no digit
        taken, clash = _once(fixed[:, geometry.units])
        others = np.bitwise_or.reduce((taken | clash)[:, geometry.units_of], -1)
        new = np.where(fixed, now, now & ~others)
        once, twice = _once(new[:, geometry.units])
        hidden = np.bitwise_or.reduce(once[:, geometry.units_of], -1) & new
        # A digit that only one cell of a unit can have is fixed there. If a cell has two such digits, only one is
        # fixed, and the next round finds the contradiction: the other digit is missing in its unit.
        lowest = hidden & (~hidden + np.uint16(1))
        new = np.where(hidden, lowest, new)
        fine = ~clash.any(-1) & ((once | twice) == geometry.full).all(-1) & new.all(-1)
        changed = (new != now).any(-1)
        partials[active] = new
        alive[active] = fine
        active = active[changed & fine]
    return partials, alive


def _once(sets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets: the digits in exactly one of the sets along the last axis, and the digits in several sets."""
    any_, more = np.zeros(sets.shape[:-1], np.uint16), np.zeros(sets.shape[:-1], np.uint16)
    for k in range(sets.shape[-1]):
        more |= any_ & sets[..., k]
        any_ |= sets[..., k]
    return any_ & ~more, more


def solvable(partials: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return whether each partly solved grid [M, cells] has a solution, by deductions and exhaustive search. [M]"""
    answer = np.zeros(len(partials), bool)
    stack = [(np.arange(len(partials)), partials)]
    while stack:
        owners, batch = stack.pop()
        open_ = ~answer[owners]
        owners, batch = owners[open_], batch[open_]
        if len(owners) > _CHUNK:
            stack.append((owners[_CHUNK:], batch[_CHUNK:]))
            owners, batch = owners[:_CHUNK], batch[:_CHUNK]
        batch, alive = deduce_digits(batch, geometry)
        owners, batch = owners[alive], batch[alive]
        choices = _COUNT[batch]
        done = (choices == 1).all(-1)
        answer[owners[done]] = True
        owners, batch, choices = owners[~done], batch[~done], choices[~done]
        if not len(owners):
            continue
        cell = np.argmin(np.where(choices > 1, choices, 99), -1)
        child, digit = np.nonzero(batch[np.arange(len(batch)), cell, None] >> np.arange(geometry.size) & 1)
        children = batch[child]
        children[np.arange(len(child)), cell[child]] = np.left_shift(1, digit).astype(np.uint16)
        stack.append((owners[child], children))
    return answer


def draw_solutions(count: int, geometry: Geometry, seed: int) -> np.ndarray:
    """Draw random solutions with digits 0 to size − 1. [count, cells]

    Digits are guessed one by one in a cell with the fewest choices, with deductions after each guess; a grid with a
    contradiction is emptied and filled again. Every solution is possible, but not all are equally likely.
    """
    partials = np.full((count, geometry.cells), geometry.full)
    active, guess = np.arange(count), 0
    while len(active):
        now = partials[active]
        choices = _COUNT[now]
        tie = counter.uniform(seed, 11, guess, active[:, None], np.arange(geometry.cells))
        cell = np.argmin(np.where(choices > 1, choices + tie, 99.0), -1)
        options = now[np.arange(len(now)), cell, None] >> np.arange(geometry.size) & 1
        digit = np.argmax(
            options * (1 + counter.uniform(seed, 12, guess, active[:, None], np.arange(geometry.size))), -1
        )
        now[np.arange(len(now)), cell] = np.left_shift(1, digit).astype(np.uint16)
        now, alive = deduce_digits(now, geometry)
        now[~alive] = geometry.full
        partials[active] = now
        active = active[(_COUNT[now] > 1).any(-1)]
        guess += 1
    return np.log2(partials).astype(np.int64)


def list_solutions(geometry: Geometry) -> np.ndarray:
    """Return all solutions of the 4 × 4 grid in a fixed order. [288, 16]"""
    partials = np.full((1, geometry.cells), geometry.full)
    for cell in range(geometry.cells):
        parent, digit = np.nonzero(partials[:, cell, None] >> np.arange(geometry.size) & 1)
        partials = partials[parent]
        partials[:, cell] = np.left_shift(1, digit).astype(np.uint16)
        partials, alive = deduce_digits(partials, geometry)
        partials = partials[alive]
    return np.log2(np.unique(partials, axis=0)).astype(np.int64)


def draw_minimal_clues(solutions: np.ndarray, geometry: Geometry, seed: int) -> np.ndarray:
    """Return a random minimal set of clues for each solution [M, cells], as a mask of cells. [M, cells]

    The clues of a set have no other solution, and no clue can be left out. Clues are removed one by one in random
    order; a clue stays if, without the clue, there is a solution with another digit in its cell.
    """
    puzzles = np.arange(len(solutions))
    order = np.argsort(counter.bits(seed, 13, puzzles[:, None], np.arange(geometry.cells)), -1)
    digits = np.left_shift(1, solutions).astype(np.uint16)
    clues = np.ones(solutions.shape, bool)
    for cell in order.T:  # [M]: one cell of every puzzle
        partials = np.where(clues, digits, geometry.full)
        partials[puzzles, cell] = geometry.full & ~digits[puzzles, cell]
        clues[puzzles, cell] = solvable(partials, geometry)
    return clues


def relabel_digits(solution: np.ndarray, size: int) -> bytes:
    """Return a grid with digits renamed in order of appearance; grids equal up to renaming give equal results."""
    names = np.full(size, -1)
    names[solution[:size]] = np.arange(size)  # the first row has every digit once
    return names[solution].astype(np.uint8).tobytes()


def signature(solution: np.ndarray, geometry: Geometry) -> bytes:
    """Return a value that no symmetry of the grid changes; grids with different values are not equivalent.

    Two rows define a permutation of the digits, which takes each digit of one row to the digit below it in the other.
    Renaming digits or exchanging columns does not change the permutation's cycle lengths. Exchanging rows or bands does
    not change the collections of cycle lengths over pairs of rows, within bands and across bands. The same holds for
    columns. If boxes are square, transposing swaps the collections of rows and columns.
    """
    grid = solution.reshape(geometry.size, geometry.size)
    height, width = geometry.box
    rows, columns = _line_signature(grid, height), _line_signature(grid.T, width)
    return repr(sorted([rows, columns]) if height == width else [rows, columns]).encode()


def _line_signature(grid: np.ndarray, band: int) -> tuple[object, object]:
    size = len(grid)
    within: dict[int, list[tuple[int, ...]]] = {}
    across: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for i in range(size):
        for j in range(i + 1, size):
            below = np.empty(size, int)
            below[grid[i]] = grid[j]
            cycles = _cycle_lengths(below)
            if i // band == j // band:
                within.setdefault(i // band, []).append(cycles)
            else:
                across.setdefault((i // band, j // band), []).append(cycles)
    return sorted(map(sorted, within.values())), sorted(map(sorted, across.values()))


def _cycle_lengths(permutation: np.ndarray) -> tuple[int, ...]:
    todo, lengths = set(range(len(permutation))), []
    while todo:
        start = at = todo.pop()
        length = 1
        while (at := int(permutation[at])) != start:
            todo.remove(at)
            length += 1
        lengths.append(length)
    return tuple(sorted(lengths))
