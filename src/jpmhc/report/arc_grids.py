"""Pictures of ARC answers: for each test the input, the two attempts, and the truth where it is known."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jpmhc.experiments.evaluation.votes import Answered
from jpmhc.report.style import ARC_COLOURS, save_figure

COLOURS = ListedColormap(ARC_COLOURS)
_RIGHT, _WRONG, _PLAIN = "#1a7f37", "#b42318", "#444444"
_COLUMNS, _LINES = 4, 12  # of a picture


def draw_answers(answered: list[Answered], path: Path) -> list[Path]:
    """Draw one line of grids for each test, a dozen to a picture.

    Args:
        answered: Tests with their candidates.
        path: The picture's file, whose ending decides the format; further pictures get a number.

    Returns:
        The pictures written.
    """
    pages = [answered[start : start + _LINES] for start in range(0, len(answered), _LINES)]
    return [
        _draw_page(page, path if k == 0 else path.with_stem(f"{path.stem}-{k + 1}")) for k, page in enumerate(pages)
    ]


def _draw_page(answered: list[Answered], path: Path) -> Path:
    figure = Figure(figsize=(2.7 * _COLUMNS, 2.6 * len(answered)), layout="constrained")
    axes = figure.subplots(len(answered), _COLUMNS, squeeze=False)
    for line, answer in zip(axes, answered):
        _show(line[0], answer.input, f"task {answer.puzzle}\ntest {answer.test + 1}, input", _PLAIN)
        for k, name in enumerate(("first", "second")):
            _show_attempt(line[1 + k], answer, k, name)
        if answer.output is None:
            _show(line[3], None, "truth\nnot known", _PLAIN)
        else:
            _show(line[3], answer.output, f"truth\n{_size(answer.output)}", _PLAIN)
    return save_figure(figure, path, dpi=110)


def _show_attempt(axes: Any, answer: Answered, k: int, name: str) -> None:
    if k >= len(answer.candidates):
        _show(axes, None, f"{name} attempt\nno other grid was voted for", _PLAIN)
        return
    candidate = answer.candidates[k]
    title = f"{name} attempt: {candidate.votes} of {candidate.of} votes\n"
    if answer.output is None:
        _show(axes, candidate.grid, title + _size(candidate.grid), _PLAIN)
    elif np.array_equal(candidate.grid, answer.output):
        _show(axes, candidate.grid, title + "right", _RIGHT)
    elif candidate.grid.shape != answer.output.shape:
        _show(axes, candidate.grid, title + f"wrong size: {_size(candidate.grid)}", _WRONG)
    else:
        rows, columns = np.nonzero(candidate.grid != answer.output)
        _show(axes, candidate.grid, title + f"{len(rows)} of {answer.output.size} cells wrong", _WRONG)
        size = (60 / max(candidate.grid.shape)) ** 2  # a mark is about a third of a cell
        for colour, width in (("black", 2.5), ("white", 1.0)):
            axes.scatter(columns, rows, s=size, marker="x", color=colour, linewidth=width)


def _show(axes: Any, grid: np.ndarray | None, title: str, colour: str) -> None:
    axes.set_title(title, fontsize=9, color=colour)
    axes.set_xticks([])
    axes.set_yticks([])
    if grid is None:
        axes.set_frame_on(False)
        return
    axes.imshow(grid, cmap=COLOURS, vmin=-0.5, vmax=9.5, interpolation="nearest")
    rows, columns = grid.shape
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, color="#666666", linewidth=0.4)
    axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, color="#666666", linewidth=0.4)
    for side in axes.spines.values():
        side.set_color(colour)
        side.set_linewidth(1.5)


def _size(grid: np.ndarray) -> str:
    return f"{grid.shape[0]} × {grid.shape[1]}"
