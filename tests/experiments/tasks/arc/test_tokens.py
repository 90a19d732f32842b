"""Grids to tokens and back, against loops over cells."""

import numpy as np
import pytest

from jpmhc.experiments.tasks.arc import augment, tokens

SIDE = 5


def write(grid: np.ndarray, top: int, left: int) -> np.ndarray:
    """The square of one grid, cell by cell."""
    square = np.zeros((SIDE, SIDE), int)
    height, width = grid.shape
    for r in range(SIDE):
        for c in range(SIDE):
            i, j = r - top, c - left
            if 0 <= i < height and 0 <= j < width:
                square[r, c] = grid[i, j] + 2
            elif (i == height and 0 <= j < width) or (j == width and 0 <= i < height):
                square[r, c] = 1
    return square.reshape(-1)


def encode_grids(grids: list[np.ndarray], top: list[int], left: list[int]) -> np.ndarray:
    memory = np.concatenate([g.reshape(-1) for g in grids]).astype(np.uint8)
    height, width = np.array([g.shape for g in grids]).T
    offset = np.cumsum(height * width) - height * width
    layout = augment.layout_of_variant(offset, height, width, np.zeros(len(grids), int))
    colours = np.tile(np.arange(10, dtype=np.uint8), (len(grids), 1))
    return tokens.encode_grids(memory, layout, colours, np.array(top), np.array(left), SIDE)


def size(square: np.ndarray) -> tuple[int, int]:
    height, width = tokens.crop_grids(square.reshape(1, -1), SIDE)
    return int(height[0]), int(width[0])


def test_encoding_equals_a_loop_over_cells() -> None:
    rng = np.random.default_rng(0)
    grids, top, left = [], [], []
    for _ in range(200):
        h, w = rng.integers(1, SIDE + 1, 2)
        grids.append(rng.integers(0, 10, (h, w)))
        top.append(int(rng.integers(0, SIDE - h + 1)))
        left.append(int(rng.integers(0, SIDE - w + 1)))
    expected = np.stack([write(*row) for row in zip(grids, top, left)])
    assert (encode_grids(grids, top, left) == expected).all()


def test_a_grid_as_large_as_the_square_has_no_border() -> None:
    full = encode_grids([np.zeros((SIDE, SIDE), int)], [0], [0])
    assert (full == 2).all()


def test_an_unknown_output_is_all_padding() -> None:
    assert (encode_grids([np.zeros((2, 2), int), np.zeros((0, 0), int)], [0, 0], [0, 0])[1] == 0).all()


def test_crop_finds_what_was_written() -> None:
    rng = np.random.default_rng(1)
    for h in range(1, SIDE + 1):
        for w in range(1, SIDE + 1):
            square = write(rng.integers(0, 10, (h, w)), 0, 0)
            assert size(square) == (h, w)
            # What a model writes where labels are PAD does not matter, as long as the border stands.
            square[square == 0] = rng.integers(0, 12, np.sum(square == 0))
            assert size(square) == (h, w)


def largest_rectangle(square: np.ndarray) -> tuple[int, int]:
    """Largest rectangle of colours from the corner, by trying all; the lowest height among equals."""
    best = (0, 0)
    for h in range(1, SIDE + 1):
        for w in range(1, SIDE + 1):
            if (square[:h, :w] >= 2).all() and h * w > best[0] * best[1]:
                best = (h, w)
    return best


def test_crop_of_torn_grids_is_the_largest_rectangle_of_colours() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        square = rng.integers(0, 12, (SIDE, SIDE)) * (rng.random((SIDE, SIDE)) < 0.9)
        assert size(square) == largest_rectangle(square)


@pytest.mark.parametrize("token", [0, 1])
def test_crop_of_nothing_is_empty(token: int) -> None:
    square = np.full((SIDE, SIDE), 5)
    square[0, 0] = token
    assert size(square) == (0, 0)
    layout = augment.layout_of_source(np.array([0]), SIDE, np.array([0]), np.array([0]), np.array([7]))
    colours = np.arange(10, dtype=np.uint8)[None]
    assert (tokens.decode_grids(square.reshape(1, -1), layout, colours, SIDE) == 0).all()
    assert (layout.height[0], layout.width[0]) == (0, 0)
