r"""Variants of ARC puzzles: one of the eight symmetries of the square, and a permutation of the colours 1 to 9.

A variant is described by eleven bytes, and its grids are never stored. A turned or mirrored grid is the source grid's
memory, read with another start and other strides; colours go through a table of ten entries.

Symmetry `k` has three bits: 4 transposes, 2 reverses the source's rows, and 1 reverses the source's columns. The
variant's cell `(i, j)` is the source's cell `(a, b)`, where `(a, b) = (j, i)` if bit 4 is set, else `(i, j)`; then
`a → h − 1 − a` if bit 2 is set, and `b → w − 1 − b` if bit 1 is set. These are the eight elements of the dihedral
group.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.arc.puzzles import COLOURS, LARGEST, Puzzle
from jpmhc.experiments.tasks.task import NO_PUZZLE

SYMMETRIES = 8

_TRIALS = 5  # most draws per variant, as in the public code; puzzles with few distinct variants get fewer
_SYMMETRY, _COLOUR, _PLACE, _SHAPE, _WEIGHT = range(100, 105)  # words of the random numbers' keys


@dataclass(frozen=True)
class Variants:
    """The variants of many puzzles, ordered by puzzle; the first variant of each puzzle is the puzzle itself."""

    symmetry: np.ndarray  # [V] uint8
    colours: np.ndarray  # [V, 10] uint8: the new colour of each colour
    starts: np.ndarray  # [puzzles + 1] int64: variants of puzzle p are starts[p] to starts[p + 1]

    @property
    def counts(self) -> np.ndarray:
        """The number of variants of each puzzle."""
        return np.diff(self.starts)

    def puzzle_of(self, variant: np.ndarray) -> np.ndarray:
        """Return the index of each variant's puzzle."""
        return np.searchsorted(self.starts, variant, side="right") - 1


@dataclass(frozen=True)
class Layout:
    """The layouts of B grids in flat memory: cell (i, j) of a grid lies at `base + i · down + j · right`."""

    base: np.ndarray  # [B]
    down: np.ndarray  # [B]
    right: np.ndarray  # [B]
    height: np.ndarray  # [B]
    width: np.ndarray  # [B]


def layout_of_variant(offset: np.ndarray, height: np.ndarray, width: np.ndarray, symmetry: np.ndarray) -> Layout:
    """Return layouts that read the variants of stored source grids. All arguments are [B].

    The source grids have `height` × `width` cells and are stored row by row from `offset` on.
    """
    transpose, rows, columns = _bits(symmetry)
    base = offset + rows * (height - 1) * width + columns * (width - 1)
    over_rows, over_columns = (1 - 2 * rows) * width, 1 - 2 * columns
    return Layout(
        base,
        np.where(transpose, over_columns, over_rows),
        np.where(transpose, over_rows, over_columns),
        np.where(transpose, width, height),
        np.where(transpose, height, width),
    )


def layout_of_source(
    offset: np.ndarray, stride: int, height: np.ndarray, width: np.ndarray, symmetry: np.ndarray
) -> Layout:
    """Return layouts that read the source grids of stored variants. All arguments but `stride` are [B].

    The variants have `height` × `width` cells and are stored row by row from `offset` on; rows begin `stride` apart.
    """
    transpose, rows, columns = _bits(symmetry)
    h, w = np.where(transpose, width, height), np.where(transpose, height, width)
    over_rows, over_columns = np.where(transpose, 1, stride), np.where(transpose, stride, 1)
    last_row, last_column = np.maximum(h - 1, 0), np.maximum(w - 1, 0)  # no negative offset for empty grids
    base = offset + rows * last_row * over_rows + columns * last_column * over_columns
    return Layout(base, (1 - 2 * rows) * over_rows, (1 - 2 * columns) * over_columns, h, w)


def _bits(symmetry: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    k = symmetry.astype(np.int64)
    return k >> 2 & 1, k >> 1 & 1, k & 1


def draw_variants(puzzles: list[Puzzle], wanted: int, seed: int, keep_answer_colours: bool = False) -> Variants:
    """Return every puzzle itself, followed by up to `wanted` different random variants of the puzzle.

    With `keep_answer_colours`, colours that appear only in a puzzle's outputs do not change, because a variant's inputs
    would not show how they changed.

    Random numbers are keyed by the puzzle's name, so a puzzle's variants do not depend on the other puzzles.

    Note:
        Two variants are equal if they have the same pairs of grids. Variants are compared by a 64-bit hash, in which
        each cell of a grid adds a random weight of its position times a random code of its colour. So ten sums of
        weights per grid and symmetry, one sum per colour, give the hashes of all recolourings.
    """
    symmetries, colours, starts = [], [], [0]
    for puzzle in puzzles:
        symmetry, colour = _draw_distinct(puzzle, wanted, seed, keep_answer_colours)
        symmetries.append(symmetry)
        colours.append(colour)
        starts.append(starts[-1] + len(symmetry))
    return Variants(np.concatenate(symmetries), np.concatenate(colours), np.array(starts))


def _draw_distinct(puzzle: Puzzle, wanted: int, seed: int, keep_answer_colours: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw one puzzle's variants and return their symmetries [V] and colours [V, 10]."""
    symmetry = np.zeros(1, np.uint8)
    colours = np.arange(COLOURS, dtype=np.uint8)[None]
    if wanted == 0:
        return symmetry, colours
    sums, shapes = _colour_sums(puzzle)
    hashes = _hashes(sums, shapes, symmetry, colours)
    key, drawn = counter.key_of(puzzle.name), 0
    moving = np.arange(1, COLOURS)
    if keep_answer_colours:
        moving = np.setdiff1d(moving, _answer_colours(puzzle))
    while len(symmetry) <= wanted and drawn < _TRIALS * wanted:
        # Most puzzles need few draws more than variants, so draw in portions.
        trials = np.arange(drawn, min(drawn + wanted + wanted // 8 + 1, _TRIALS * wanted))
        drawn = int(trials[-1]) + 1
        draw = counter.bits(seed, key, _COLOUR, trials[:, None], moving)
        new = np.tile(np.arange(COLOURS, dtype=np.uint8), (len(trials), 1))
        new[:, moving] = moving[np.argsort(draw, -1)]
        turn = counter.below(SYMMETRIES, seed, key, _SYMMETRY, trials).astype(np.uint8)
        symmetry, colours = np.concatenate([symmetry, turn]), np.concatenate([colours, new])
        hashes = np.concatenate([hashes, _hashes(sums, shapes, turn, new)])
        first = np.sort(np.unique(hashes, return_index=True)[1])[: wanted + 1]
        symmetry, colours, hashes = symmetry[first], colours[first], hashes[first]
    return symmetry, colours


def _answer_colours(puzzle: Puzzle) -> np.ndarray:
    """Return the colours that are in outputs of the demonstrations but in no input; tests' outputs are ignored."""
    outputs = [pair.output.reshape(-1) for pair in puzzle.demonstrations if pair.output is not None]
    inputs = [pair.input.reshape(-1) for pair in puzzle.demonstrations + puzzle.tests]
    return np.setdiff1d(np.concatenate(outputs), np.concatenate(inputs))


def _colour_sums(puzzle: Puzzle) -> tuple[np.ndarray, np.ndarray]:
    """Sum the random weights of the cells of each colour, for every symmetry of every grid of a puzzle.

    Returns:
        The sums, [8, grids, 10] uint64, and a hash of each grid's shape, [8, grids]. The grids are the input and the
        output of every pair in turn; unknown outputs have zeros.
    """
    grids = [grid for pair in puzzle.demonstrations + puzzle.tests for grid in (pair.input, pair.output)]
    sums = np.zeros((SYMMETRIES, len(grids), COLOURS), np.uint64)
    shapes = np.zeros((SYMMETRIES, len(grids)), np.uint64)
    one_hot = np.eye(COLOURS, dtype=np.uint64)
    for g, grid in enumerate(grids):
        if grid is not None:
            weights, shapes[:, g] = _place_weights(*grid.shape)
            sums[:, g] = weights @ one_hot[grid.reshape(-1)]
    return sums, shapes


@lru_cache(maxsize=256)
def _place_weights(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the random weight of each cell's position after each symmetry, and a hash of the shape after it.

    The cells are in the order of the source grid of `height` × `width` cells. [8, cells] and [8]
    """
    every = np.arange(SYMMETRIES)
    layout = layout_of_variant(np.zeros_like(every), np.full_like(every, height), np.full_like(every, width), every)
    weights = np.empty((SYMMETRIES, height * width), np.uint64)
    for k in every:
        i, j = np.ogrid[: layout.height[k], : layout.width[k]]
        weights[k, layout.base[k] + i * layout.down[k] + j * layout.right[k]] = counter.bits(_PLACE, i * LARGEST + j)
    return weights, counter.bits(_SHAPE, layout.height, layout.width)


def _hashes(sums: np.ndarray, shapes: np.ndarray, symmetry: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each variant that does not depend on the order of its pairs. [V]

    `sums` and `shapes` are the results of `_colour_sums`; `symmetry` [V] and `colours` [V, 10] describe the variants.
    """
    codes = counter.bits(_WEIGHT, np.arange(COLOURS))[colours]  # [V, 10]
    hashes = np.empty(len(symmetry), np.uint64)
    for k in range(SYMMETRIES):
        mine = symmetry == k
        grids = codes[mine] @ sums[k].T  # [V', grids]
        pairs = counter.bits(grids[:, 0::2], shapes[k, 0::2], grids[:, 1::2], shapes[k, 1::2])
        hashes[mine] = pairs.sum(1, dtype=np.uint64)
    return hashes


# A published model names a variant `task|||t5|||0312456789`: the task, one of eight symmetries, and the new colour of
# each colour. The task's name alone is the task itself.
_SEPARATOR = "|||"
# The published symmetries t0 to t7 in our numbers: identity, one to three quarter turns to the left, mirrored
# left-right, mirrored up-down, transposed, and transposed over the other diagonal.
_PUBLISHED = {f"t{k}": ours for k, ours in enumerate((0, 5, 3, 6, 1, 2, 4, 7))}


def list_tasks(names: list[str]) -> set[str]:
    """Return the names of the tasks that occur in `names`, the row names of a published model's puzzle table."""
    return {name.split(_SEPARATOR, 1)[0] for name in names} - {NO_PUZZLE}


def parse_variants(path: Path, names: list[str], puzzles: list[Puzzle]) -> tuple[Variants, np.ndarray]:
    """Return the variants that a published model's puzzle table has, and the table row of each variant, [V].

    `names` are the table's row names from the file `path`. Rows of tasks that are not in `puzzles` are ignored. Raises
    a ValueError for a puzzle without a row.
    """
    rows: dict[str, list[int]] = {puzzle.name: [] for puzzle in puzzles}
    for row, name in enumerate(names):
        if (mine := rows.get(name.split(_SEPARATOR, 1)[0])) is not None:
            mine.append(row)
    for name, mine in rows.items():
        if not mine:
            raise ValueError(f"{path} has no row for task {name}: its model was trained on other puzzles")
    order = np.array([row for puzzle in puzzles for row in rows[puzzle.name]])
    symmetry, colours = np.empty(len(order), np.uint8), np.empty((len(order), COLOURS), np.uint8)
    for k, row in enumerate(order):
        symmetry[k], colours[k] = _parse_variant(path, row, names[row])
    starts = np.concatenate([[0], np.cumsum([len(rows[puzzle.name]) for puzzle in puzzles])])
    return Variants(symmetry, colours, starts), order


def _parse_variant(path: Path, row: int, name: str) -> tuple[int, list[int]]:
    """Return the symmetry and the ten colours that the name of a row in a published model's puzzle table describes."""
    task, *variant = name.split(_SEPARATOR)
    if not variant:
        return 0, list(range(COLOURS))
    if len(variant) == 2 and variant[0] in _PUBLISHED and sorted(variant[1]) == sorted("0123456789"):
        return _PUBLISHED[variant[0]], [int(colour) for colour in variant[1]]
    raise ValueError(f"entry {row} of {path} is {name!r}, but a variant has a name like {task}|||t5|||0312456789")
