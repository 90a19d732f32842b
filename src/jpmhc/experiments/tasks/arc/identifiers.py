"""The variants of ARC puzzles that a published model was trained on, read from the row names of its puzzle table.

A row's name is the task's name for the task itself, or `task|||t5|||0312456789` for a variant: the task, one of eight
symmetries, and the new colour of each colour.
"""

from pathlib import Path

import numpy as np

from jpmhc.experiments.tasks.arc.augment import Variants
from jpmhc.experiments.tasks.arc.puzzles import COLOURS, Puzzle
from jpmhc.experiments.tasks.identifiers import BLANK

_SEPARATOR = "|||"
# The published symmetries t0 to t7 in our numbers: identity, one to three quarter turns to the left, mirrored
# left-right, mirrored up-down, transposed, and transposed over the other diagonal.
_SYMMETRY = {f"t{k}": ours for k, ours in enumerate((0, 5, 3, 6, 1, 2, 4, 7))}


def list_tasks(names: list[str]) -> set[str]:
    """Return the names of all tasks that have a row in the table."""
    return {name.split(_SEPARATOR, 1)[0] for name in names} - {BLANK}


def parse_variants(path: Path, names: list[str], puzzles: list[Puzzle]) -> tuple[Variants, np.ndarray]:
    """Return the puzzles' variants that a table's row names list; rows of other tasks are ignored.

    Returns:
        The variants, and the table row of each variant, [V].
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
    """Return the symmetry and the colours in a row's name."""
    task, *variant = name.split(_SEPARATOR)
    if not variant:
        return 0, list(range(COLOURS))
    if len(variant) == 2 and variant[0] in _SYMMETRY and sorted(variant[1]) == sorted("0123456789"):
        return _SYMMETRY[variant[0]], [int(colour) for colour in variant[1]]
    raise ValueError(f"entry {row} of {path} is {name!r}; a variant of {task} is named {task}|||t5|||0312456789, say")
