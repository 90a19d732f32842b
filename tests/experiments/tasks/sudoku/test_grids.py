"""Grids and clue sets against a plain backtracking solver and known counts."""

import itertools

import numpy as np
import pytest

from jpmhc.experiments.tasks import sudoku as grids


def count_solutions(puzzle: list[int], size: int, box: tuple[int, int], limit: int = 2) -> int:
    """Solutions of a puzzle (-1: empty), by trying digits cell by cell: shares nothing with the code under test."""
    height, width = box

    def allowed(cell: int) -> set[int]:
        r, c = divmod(cell, size)
        peers = {puzzle[r * size + k] for k in range(size)} | {puzzle[k * size + c] for k in range(size)}
        r0, c0 = r - r % height, c - c % width
        peers |= {puzzle[(r0 + i) * size + c0 + j] for i in range(height) for j in range(width)}
        return set(range(size)) - peers

    empty = [(len(allowed(cell)), cell) for cell in range(size**2) if puzzle[cell] < 0]
    if not empty:
        return 1
    _, cell = min(empty)
    found = 0
    for digit in allowed(cell):
        puzzle[cell] = digit
        found += count_solutions(puzzle, size, box, limit - found)
        puzzle[cell] = -1
        if found >= limit:
            break
    return found


@pytest.mark.parametrize(("size", "count"), [(4, 30), (6, 8), (9, 1)])
def test_clue_sets_have_one_solution_and_no_spare_clue(size: int, count: int) -> None:
    geometry = grids.Geometry(size)
    solutions = grids.draw_solutions(count, geometry, seed=3)
    assert (np.sort(solutions[:, geometry.units], -1) == np.arange(size)).all()
    clues = grids.draw_minimal_clues(solutions, geometry, seed=3)
    for solution, shown in zip(solutions, clues):
        puzzle = np.where(shown, solution, -1)
        assert count_solutions(puzzle.tolist(), size, geometry.box) == 1
        for cell in np.flatnonzero(shown)[: 36 // size]:  # plain backtracking is slow on 9 × 9
            fewer = puzzle.copy()
            fewer[cell] = -1
            assert count_solutions(fewer.tolist(), size, geometry.box) == 2


def test_number_of_4x4_grids() -> None:
    listed = grids.list_solutions(grids.Geometry(4))
    assert len(listed) == 288  # known count
    assert len(np.unique(listed, axis=0)) == 288
    assert len({grids.relabel_digits(g, 4) for g in listed}) == 288 // 24


def test_4x4_grids_fall_into_two_classes() -> None:
    geometry = grids.Geometry(4)
    assert len({grids.signature(g, geometry) for g in grids.list_solutions(geometry)}) == 2  # known count


@pytest.mark.parametrize("size", [4, 6, 9])
def test_signature_survives_every_symmetry(size: int) -> None:
    geometry = grids.Geometry(size)
    height, width = geometry.box
    grid = grids.draw_solutions(1, geometry, seed=5)[0].reshape(size, size)
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = np.concatenate([b * height + rng.permutation(height) for b in rng.permutation(size // height)])
        columns = np.concatenate([b * width + rng.permutation(width) for b in rng.permutation(size // width)])
        other = rng.permutation(size)[grid][rows][:, columns]
        if height == width and rng.random() < 0.5:
            other = other.T
        assert (np.sort(other.reshape(-1)[geometry.units], -1) == np.arange(size)).all()
        assert grids.signature(other.reshape(-1), geometry) == grids.signature(grid.reshape(-1), geometry)


def test_signature_tells_9x9_grids_apart() -> None:
    geometry = grids.Geometry(9)
    assert len({grids.signature(g, geometry) for g in grids.draw_solutions(30, geometry, seed=1)}) == 30


def test_line_orders_keep_bands_and_reach_every_order() -> None:
    orders = grids.Geometry(6).lines(2, 7, np.arange(4000))
    bands = orders.reshape(-1, 3, 2) // 2
    assert (bands[..., 0] == bands[..., 1]).all()
    assert len(np.unique(orders, axis=0)) == 6 * 2**3
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert abs(counts - 4000 / 48).max() < 5 * np.sqrt(4000 / 48)


def test_unsolvable_states_are_recognised() -> None:
    geometry = grids.Geometry(4)
    state = np.full((2, 16), geometry.full)
    state[0, :4] = 1  # the same digit four times in a row
    state[1, 0] = 1
    assert grids.solvable(state, geometry).tolist() == [False, True]


def test_size_is_checked() -> None:
    with pytest.raises(ValueError, match="4, 6 or 9"):
        grids.Geometry(5)


def test_solver_agrees_with_enumeration_on_random_4x4_puzzles() -> None:
    geometry = grids.Geometry(4)
    rng = np.random.default_rng(2)
    listed = grids.list_solutions(geometry)
    partials, truth = [], []
    for _ in range(200):
        shown, digits = rng.random(16) < 0.3, rng.integers(0, 4, 16)
        truth.append(bool(((listed == digits) | ~shown).all(1).any()))
        partials.append(np.where(shown, 1 << digits, 15))
    assert 20 < sum(truth) < 180
    assert grids.solvable(np.array(partials, np.uint16), geometry).tolist() == truth


def test_enumeration_is_complete() -> None:
    """Every arrangement of rows that obeys the rules is listed."""
    rows = list(itertools.permutations(range(4)))
    geometry = grids.Geometry(4)
    valid = {
        np.array(g).reshape(-1).tobytes()
        for g in itertools.product([rows[0]], rows, rows, rows)
        if (np.sort(np.array(g).reshape(-1)[geometry.units], -1) == np.arange(4)).all()
    }
    mine = {g.tobytes() for g in grids.list_solutions(geometry) if g[:4].tolist() == [0, 1, 2, 3]}
    assert mine == valid
