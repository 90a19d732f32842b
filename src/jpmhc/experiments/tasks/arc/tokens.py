"""ARC grids written as rows of tokens, and read back: colours, an end-of-grid border, and the rest empty.

A row is a square of `side` × `side` tokens: 0 where there is nothing (PAD), 1 for the end of the grid, colour + 2 for a
cell. The end is marked by a row of ones below the grid and a column of ones to its right, where the square has room.
"""

import numpy as np

from jpmhc.experiments.models.losses import PAD
from jpmhc.experiments.tasks.arc.augment import Layout
from jpmhc.experiments.tasks.arc.puzzles import COLOURS

FIRST_COLOUR = 2
VOCABULARY = 12


def encode_grids(
    memory: np.ndarray, layout: Layout, colours: np.ndarray, top: np.ndarray, left: np.ndarray, side: int
) -> np.ndarray:
    """Write grids as tokens, their first cell in row `top` and column `left` of the square.

    Args:
        memory: flat cells of all grids, uint8.
        layout: where in memory each grid lies, [B].
        colours: the colour that each colour becomes, [B, 10].
        top: [B].
        left: [B].
        side: rows and columns of the square.

    Returns:
        Tokens, [B, side²] uint8.
    """
    i = np.arange(side) - top[:, None]  # [B, side]: the grid's row in each row of the square
    j = np.arange(side) - left[:, None]
    in_rows, in_columns = (i >= 0) & (i < layout.height[:, None]), (j >= 0) & (j < layout.width[:, None])
    tokens = np.full((len(i), side, side), PAD, np.uint8)
    row, cells, inside = _read(memory, layout, i, j, in_rows, in_columns)
    tokens.reshape(-1)[inside] = colours.reshape(-1)[COLOURS * row + cells] + np.uint8(FIRST_COLOUR)
    # Around the grid the tokens are PAD, which is 0, and 0 | True is 1, the end.
    tokens |= (i == layout.height[:, None])[:, :, None] & in_columns[:, None, :]
    tokens |= in_rows[:, :, None] & (j == layout.width[:, None])[:, None, :]
    return tokens.reshape(len(tokens), side * side)


def crop_grids(tokens: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Find heights and widths, [B], of the grids that a model has written from the upper left corner of the square.

    The grid is the largest rectangle from that corner that holds colours only; the first of equals, and 0 × 0 where
    the corner itself is no colour.
    """
    square = tokens.reshape(-1, side, side)
    colour = (square >= FIRST_COLOUR) & (square < VOCABULARY)
    run = np.where(colour.all(-1), side, np.argmin(colour, -1))  # [B, side]: colours at the start of each row
    widths = np.minimum.accumulate(run, -1)
    best = np.argmax(widths * np.arange(1, side + 1), -1)
    width = widths[np.arange(len(widths)), best]
    return np.where(width > 0, best + 1, 0), width


def decode_grids(tokens: np.ndarray, layout: Layout, colours: np.ndarray, side: int) -> np.ndarray:
    """Read the cells of the grids that `layout` finds in the flattened tokens, and put their colours back.

    Args:
        tokens: [B, side²], colours only where the layout reads.
        layout: where each grid lies in the flattened tokens, [B].
        colours: the colour that each colour had become, [B, 10].
        side: rows and columns of the square.

    Returns:
        Colours, [B, side, side] uint8, zero outside `layout.height` × `layout.width`.
    """
    line = np.broadcast_to(np.arange(side), (len(tokens), side))
    in_rows, in_columns = line < layout.height[:, None], line < layout.width[:, None]
    row, cells, inside = _read(tokens.reshape(-1), layout, line, line, in_rows, in_columns)
    back = np.argsort(colours, -1).astype(np.uint8)
    grids = np.zeros((len(tokens), side, side), np.uint8)
    grids.reshape(-1)[inside] = back.reshape(-1)[COLOURS * row + cells - FIRST_COLOUR]
    return grids


def _read(
    memory: np.ndarray, layout: Layout, i: np.ndarray, j: np.ndarray, in_rows: np.ndarray, in_columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cells of all grids: the grid of each, its value, and its position in the flat squares.

    Squares are mostly empty, so this touches a fraction of them.
    """
    inside = np.flatnonzero(in_rows[:, :, None] & in_columns[:, None, :])
    side = i.shape[1]
    line, column = np.divmod(inside, side)  # line: of all squares' lines
    row = line // side
    down = (layout.base[:, None] + i * layout.down[:, None]).reshape(-1)
    right = (j * layout.right[:, None]).reshape(-1)
    return row, memory[down[line] + right[row * side + column]], inside
