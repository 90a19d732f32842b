"""ARC pairs as sequences of tokens for a decoder, several of which are packed into rows of a fixed length.

A sequence is one pair: a start token, the input grid row by row, a separator, the output grid row by row, an end token.
Every row of a grid ends with a row-end token. A token's coordinates are the number of its part of the sequence, and the
row and column of its cell. A token's label is the token to predict after it: the tokens of the output and the end token
are predicted, and if wanted also the tokens of the input and the separator.

An epoch shows every training pair once, in a random variant. `PackedPairs` is a pure function of the epoch's number, so
a resumed run needs only its number of steps.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.arc import augment
from jpmhc.experiments.tasks.arc.dataset import Arc
from jpmhc.experiments.tasks.arc.puzzles import COLOURS, LARGEST
from jpmhc.experiments.tasks.arc.tokens import FIRST_COLOUR, GRID_END

START, ROW_END, SEPARATOR, END = range(COLOURS, COLOURS + 4)  # tokens besides the colours
VOCABULARY = 16  # two tokens are unused, because matrix products are fastest with multiples of 8
IN_START, IN_INPUT, IN_SEPARATOR, IN_OUTPUT = range(4)  # parts of a sequence
LONGEST_GRID = LARGEST * (LARGEST + 1)  # tokens of the largest grid
LONGEST = 2 + 2 * LONGEST_GRID  # most tokens of a sequence without the end token, which the model never reads
NO_LABEL = -1
BLOCK = 128  # tokens per block, the unit in which attention skips pairs of queries and keys
_VARIANT, _ORDER, _STEPS = range(210, 213)  # words of the random numbers' keys


@dataclass(frozen=True)
class Sequences:
    """Token sequences in one flat array, without the end tokens, which are labels only."""

    tokens: np.ndarray  # [N] uint8
    coordinates: np.ndarray  # [N, 3] uint8: part, row, column
    labels: np.ndarray  # [N] int8: the next token if it is to be predicted, else NO_LABEL
    starts: np.ndarray  # [B + 1] int64: sequence b has tokens starts[b] to starts[b + 1]
    puzzles: np.ndarray  # [B] int64
    symmetries: np.ndarray  # [B] int64

    def __len__(self) -> int:
        return len(self.puzzles)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, [B]."""
        return np.diff(self.starts)


def measure_pairs(arc: Arc, variant: np.ndarray, pair: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each sequence, without the end token. [B]

    Sequence b is the pair with the number `pair[b]` in the variant with the number `variant[b]`.
    """
    sizes = [arc.grid_layout(2 * pair + side, variant) for side in (0, 1)]
    return 2 + sum(size.height * (size.width + 1) for size in sizes)


def write_sequences(
    arc: Arc, variant: np.ndarray, pair: np.ndarray, outputs: bool = True, predict_inputs: bool = False
) -> Sequences:
    """Return B sequences; sequence b is the pair with the number `pair[b]` in the variant with the number `variant[b]`.

    Without outputs, a sequence ends before its separator. With `predict_inputs`, the inputs' tokens and the separators
    are labels too.

    >>> from jpmhc.experiments.tasks.arc.puzzles import Pair, Puzzle
    >>> from jpmhc.experiments.tasks.arc.dataset import ArcConfig
    >>> pair = Pair(np.array([[1, 2]], np.uint8), np.array([[3]], np.uint8))
    >>> arc = Arc(ArcConfig(augmentations=0), [Puzzle("a", (pair,), (pair,))], [Puzzle("b", (pair,), (pair,))])
    >>> write_sequences(arc, np.array([0]), np.array([0])).tokens
    array([10,  1,  2, 11, 12,  3, 11], dtype=uint8)
    """
    count = len(pair)
    layouts = [arc.grid_layout(2 * pair + side, variant) for side in (0, 1)]
    sizes = [layout.height * (layout.width + 1) for layout in layouts]
    lengths = 2 + sizes[0] + sizes[1] if outputs else 1 + sizes[0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.full(starts[-1], START, np.uint8)
    coordinates = np.zeros((starts[-1], 3), np.uint8)
    colours = arc.variants.colours[variant]
    _write_grids(arc.cells, layouts[0], colours, starts[:-1] + 1, IN_INPUT, tokens, coordinates)
    labels = np.full(starts[-1], NO_LABEL, np.int8)
    if outputs:
        separators = starts[:-1] + 1 + sizes[0]
        tokens[separators], coordinates[separators, 0] = SEPARATOR, IN_SEPARATOR
        at = _write_grids(arc.cells, layouts[1], colours, separators + 1, IN_OUTPUT, tokens, coordinates)
        if predict_inputs:
            labels[:-1] = tokens[1:]
        labels[at - 1] = tokens[at]
        labels[starts[1:] - 1] = END
    puzzles = arc.variants.puzzle_of(variant) if count else np.zeros(0, np.int64)
    return Sequences(tokens, coordinates, labels, starts, puzzles, arc.variants.symmetry[variant].astype(np.int64))


def _write_grids(
    cells: np.ndarray,
    layout: augment.Layout,
    colours: np.ndarray,
    at: np.ndarray,
    part: int,
    tokens: np.ndarray,
    coordinates: np.ndarray,
) -> np.ndarray:
    """Write B grids with their row ends into `tokens` and `coordinates`; return the positions of the written tokens.

    Grid b has the layout b in `cells` and the new colours `colours[b]`, and is written from position `at[b]` on. `part`
    is the first coordinate of its tokens.
    """
    line = layout.width + 1
    size = layout.height * line
    owner = np.repeat(np.arange(len(size)), size)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
    row, column = np.divmod(index, line[owner])
    ends = column == layout.width[owner]
    address = layout.base[owner] + row * layout.down[owner] + np.where(ends, 0, column) * layout.right[owner]
    position = at[owner] + index
    tokens[position] = np.where(ends, ROW_END, colours[owner, cells[address]])
    coordinates[position] = np.stack([np.full_like(row, part), row, column], -1)
    return position


def read_answers(written: np.ndarray, counts: np.ndarray, side: int) -> np.ndarray:
    """Turn a decoder's answers into squares of tokens [B, side²] as in `tokens.py`, with the grid in the upper left.

    `written` [B, N] has the tokens after the separator. Of these, the first `counts` [B] are the answer and its end
    token. An answer that is not a grid, because its rows differ in length or its end is missing, becomes an empty
    square.
    """
    squares = np.zeros((len(written), side, side), np.uint8)
    for square, row, count in zip(squares, written, counts):
        grid = _read_grid(row[:count])
        if grid is not None and max(grid.shape) <= side:
            height, width = grid.shape
            square[height : height + 1, :width] = square[:height, width : width + 1] = GRID_END
            square[:height, :width] = grid + FIRST_COLOUR
    return squares.reshape(len(written), side * side)


def _read_grid(written: np.ndarray) -> np.ndarray | None:
    """Return the grid that the tokens describe, or None if they are not a grid."""
    if len(written) < 3 or written[-1] != END or written[-2] != ROW_END:
        return None
    width = int(np.argmax(written == ROW_END)) + 1
    if width == 1 or (len(written) - 1) % width:
        return None
    rows = written[:-1].reshape(-1, width)
    if (rows[:, -1] != ROW_END).any() or (rows[:, :-1] >= COLOURS).any():
        return None
    return rows[:, :-1]


@dataclass(frozen=True)
class Pack:
    """Sequences packed into one row of T tokens; the unused rest of the row is one more sequence, without labels.

    S is the largest number of sequences in a pack, including the rest.
    """

    tokens: Tensor  # [T] uint8
    coordinates: Tensor  # [T, 3] uint8
    labels: Tensor  # [T] int8
    owners: Tensor  # [T] int16: the sequence that each token belongs to
    puzzles: Tensor  # [S] int64
    symmetries: Tensor  # [S] int64
    spans: Tensor  # [2, T / BLOCK] int32: first block of keys that each block sees, last block of queries that see it

    def to(self, device: torch.device) -> "Pack":
        """Copy the pack to another device."""
        return Pack(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})

    def pin_memory(self) -> "Pack":
        """Copy the pack to pinned memory, so that copies to a GPU do not block the host."""
        return Pack(**{name: tensor.pin_memory() for name, tensor in vars(self).items()})


def pack_sequences(sequences: Sequences, length: int, most: int) -> Pack:
    """Pack fewer than `most` sequences into a row of `length` tokens, and the unused rest as the last sequence."""
    used, count = int(sequences.starts[-1]), len(sequences)
    if used > length or count >= most:
        raise ValueError(f"{count} sequences of {used} tokens do not fit into {length} tokens and {most - 1} sequences")
    owners = np.full(length, most - 1, np.int16)
    owners[:used] = np.repeat(np.arange(count), sequences.lengths)
    tokens, coordinates = np.zeros(length, np.uint8), np.zeros((length, 3), np.uint8)
    labels = np.full(length, NO_LABEL, np.int8)
    tokens[:used], coordinates[:used], labels[:used] = sequences.tokens, sequences.coordinates, sequences.labels
    puzzles, symmetries = np.zeros(most, np.int64), np.zeros(most, np.int64)
    puzzles[:count], symmetries[:count] = sequences.puzzles, sequences.symmetries
    change = np.flatnonzero(np.diff(owners)) + 1
    begins, ends = np.concatenate([[0], change]), np.concatenate([change, [length]])
    heads = np.arange(0, length, BLOCK)
    first = begins[np.searchsorted(begins, heads, side="right") - 1] // BLOCK
    last = (ends[np.searchsorted(begins, np.minimum(heads + BLOCK, length) - 1, side="right") - 1] - 1) // BLOCK
    spans = np.stack([first, last]).astype(np.int32)
    return Pack(*map(torch.from_numpy, (tokens, coordinates, labels, owners, puzzles, symmetries, spans)))


def _without_tests(arc: Arc) -> tuple[np.ndarray, np.ndarray]:
    """Return puzzle index and pair number for every training pair that does not equal a test of an evaluation puzzle.

    Two public puzzles have a pair in common, which is a test of one of them.
    """
    puzzle, pair = arc.trained_pairs()
    tests = {content for number in np.setdiff1d(np.arange(arc.pair_count), pair) for content in [arc.read_pair(number)]}
    fresh = np.array([arc.read_pair(number) not in tests for number in pair], bool)
    return puzzle[fresh], pair[fresh]


class PackedPairs:
    """The training pairs of ARC puzzles in packs of `length` tokens, for every epoch.

    `seed` decides variants and order. With `predict_inputs`, the inputs' tokens are labels too.
    """

    def __init__(self, arc: Arc, length: int, seed: int, predict_inputs: bool = False) -> None:
        checks.whole_number(length, "length")
        self.arc, self.length, self.seed, self.predict_inputs = arc, length, seed, predict_inputs
        self.most = max(2, length // 32)  # most sequences per pack, including the unused rest
        self.puzzle, self.pair = _without_tests(arc)
        if length % BLOCK:
            raise ValueError(f"a pack's length must be a multiple of {BLOCK}, not {length}")
        if not len(self.pair):
            raise ValueError("there is no pair to train on")
        sizes = [arc.grid_layout(2 * self.pair + side, arc.variants.starts[self.puzzle]) for side in (0, 1)]
        cells = sum(size.height * size.width for size in sizes)
        # A variant may transpose its grids, which changes the number of row ends.
        lengths = 2 + cells + np.maximum(sum(size.height for size in sizes), sum(size.width for size in sizes))
        if lengths.max() > length:
            name = arc.puzzles[self.puzzle[int(lengths.argmax())]].name
            raise ValueError(
                f"task {name} has a pair of {lengths.max()} tokens, which does not fit into a pack of {length} tokens"
            )
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def count_packs(self, epoch: int) -> int:
        """Return the number of packs in an epoch."""
        return len(self._plan(epoch))

    def pack(self, epoch: int, index: int) -> Pack:
        """Return the pack with number `index` in an epoch."""
        variant, pair = self._plan(epoch)[index]
        sequences = write_sequences(self.arc, variant, pair, predict_inputs=self.predict_inputs)
        return pack_sequences(sequences, self.length, self.most)

    def _make_plan(self, epoch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the numbers of the variants and of the pairs in each pack of an epoch.

        The pairs are taken in random order, and each pair goes to the first pack with space.
        """
        arc, count = self.arc, len(self.pair)
        drawn = counter.below(arc.variants.counts[self.puzzle], self.seed, _VARIANT, epoch, np.arange(count))
        variant = arc.variants.starts[self.puzzle] + drawn
        lengths = measure_pairs(arc, variant, self.pair)
        order = counter.shuffled(count, self.seed, _ORDER, epoch)
        free = np.full(count, self.length)
        slots = np.full(count, self.most - 1)
        chosen = np.empty(count, np.int64)
        packs = 0
        for k in order:
            fits = (free[: packs + 1] >= lengths[k]) & (slots[: packs + 1] > 0)
            chosen[k] = target = int(np.argmax(fits))
            packs = max(packs, target + 1)
            free[target] -= lengths[k]
            slots[target] -= 1
        members = order[np.argsort(chosen[order], kind="stable")]
        parts = np.split(members, np.cumsum(np.bincount(chosen, minlength=packs))[:-1])
        return [(variant[parts[k]], self.pair[parts[k]]) for k in counter.shuffled(packs, self.seed, _STEPS, epoch)]
