"""Conversion of ARC grids to rows of tokens, and of tokens to grids.

A row of tokens is a square of `side` × `side` tokens: colour + 2 for a cell of the grid, 1 for the end of the grid, and
0 (PAD) elsewhere. The end is a row of ones below the grid and a column of ones to its right, if they fit.
"""

import numpy as np

from jpmhc.experiments.models.losses import PAD
from jpmhc.experiments.tasks.arc.augment import Layout
from jpmhc.experiments.tasks.arc.puzzles import COLOURS

GRID_END = 1
FIRST_COLOUR = 2
VOCABULARY = 12


def encode_grids(
    memory: np.ndarray, layout: Layout, colours: np.ndarray, top: np.ndarray, left: np.ndarray, side: int
) -> np.ndarray:
    """Write grids as squares of tokens, [B, side²] uint8, with the first cell in row `top` and column `left`, [B].

    The layouts [B] describe the grids in `memory`, a flat array of cells; `colours` [B, 10] has the new colour of each
    colour.
    """
    i = np.arange(side) - top[:, None]  # [B, side]: the grid's row in each row of the square
    j = np.arange(side) - left[:, None]
    in_rows, in_columns = (i >= 0) & (i < layout.height[:, None]), (j >= 0) & (j < layout.width[:, None])
    tokens = np.full((len(i), side, side), PAD, np.uint8)
    row, cells, inside = _read(memory, layout, i, j, in_rows, in_columns)
    tokens.reshape(-1)[inside] = colours.reshape(-1)[COLOURS * row + cells] + np.uint8(FIRST_COLOUR)
    # Tokens around the grid are PAD = 0, and 0 | True is 1, the end token.
    tokens |= (i == layout.height[:, None])[:, :, None] & in_columns[:, None, :]
    tokens |= in_rows[:, :, None] & (j == layout.width[:, None])[:, None, :]
    return tokens.reshape(len(tokens), side * side)


def crop_grids(tokens: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the heights and widths [B] of the grids in a model's squares of tokens [B, side²].

    A grid is the largest rectangle of colours that begins in the upper left corner of its square, with the fewest rows
    among equally large ones. If the corner itself is not a colour, the grid is 0 × 0.
    """
    square = tokens.reshape(-1, side, side)
    colour = (square >= FIRST_COLOUR) & (square < VOCABULARY)
    run = np.where(colour.all(-1), side, np.argmin(colour, -1))  # [B, side]: colours at the start of each row
    widths = np.minimum.accumulate(run, -1)
    best = np.argmax(widths * np.arange(1, side + 1), -1)
    width = widths[np.arange(len(widths)), best]
    return np.where(width > 0, best + 1, 0), width


def decode_grids(tokens: np.ndarray, layout: Layout, colours: np.ndarray, side: int) -> np.ndarray:
    """Turn tokens into grids with their original colours, [B, side, side] uint8, zero outside each layout's size.

    The layouts [B] describe the grids in the flattened tokens [B, side²], which must be colours wherever a layout
    reads; `colours` [B, 10] has the new colour of each original colour.
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
    """Return each grid cell's grid number, value, and position in the flattened squares, for all grids. [cells] each

    `i` and `j` [B, side] are the grid's row at each row of its square, and the grid's column at each column of its
    square; `in_rows` and `in_columns` [B, side] say whether the grid has this row or column. Only cells of grids are
    read, because squares are mostly empty.
    """
    inside = np.flatnonzero(in_rows[:, :, None] & in_columns[:, None, :])
    side = i.shape[1]
    line, column = np.divmod(inside, side)  # line: counted through all squares
    row = line // side
    down = (layout.base[:, None] + i * layout.down[:, None]).reshape(-1)
    right = (j * layout.right[:, None]).reshape(-1)
    return row, memory[down[line] + right[row * side + column]], inside
