"""Draw ARC answers as coloured grids: a test's input, the two attempts with their votes, and the truth if known."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imsave

from jpmhc.experiments.evaluation.votes import AnsweredTest
from jpmhc.report.page import Picture, Section
from jpmhc.report.style import ARC_COLOURS, save_figure

_FRAMES = {"right": "#1a7f37", "wrong": "#b42318", "": "#444444"}
_COLUMNS, _ROWS = 4, 12  # the columns, and the most rows, of a figure
_CELL = 12  # the pixels of a cell's side
_RULE = (0.4, 0.4, 0.4)
_BUDGET = 1_200_000  # the largest number of characters for all grids of a page


def draw_answers(answered: Sequence[AnsweredTest], path: Path) -> list[Path]:
    """Draw one row of grids per test into figures of up to twelve tests, and return the figures' paths.

    `path` is the first figure's file, whose ending decides the format; further figures get a number.
    """
    pages = [answered[start : start + _ROWS] for start in range(0, len(answered), _ROWS)]
    return [_draw_page(page, path.with_stem(f"{path.stem}-{k}") if k > 1 else path) for k, page in enumerate(pages, 1)]


def _draw_page(answered: Sequence[AnsweredTest], path: Path) -> Path:
    figure = Figure(figsize=(2.7 * _COLUMNS, 2.6 * len(answered)), layout="constrained")
    axes = figure.subplots(len(answered), _COLUMNS, squeeze=False)
    for row, answer in zip(axes, answered):
        for ax, (words, tone, grid, wrong) in zip(row, _describe(answer)):
            title = f"{_name(answer)}\n{words}" if ax is row[0] else words.replace(": ", "\n")
            ax.set_title(title, fontsize=9, color=_FRAMES[tone])
            ax.set(xticks=[], yticks=[], frame_on=grid is not None)
            if grid is not None:
                ax.imshow(paint_grid(grid, wrong), interpolation="nearest")
            for side in ax.spines.values():
                side.set(color=_FRAMES[tone], linewidth=1.5)
    return save_figure(figure, path, dpi=110)


def show_answers(run: str, answered: Sequence[AnsweredTest], runs: int = 1) -> Section:
    """Return a page's section with the answers of a run to tests; it is empty if there are no answers.

    `runs` is the number of runs that share the page.
    """
    rows: list[tuple[str, list[Picture]]] = []
    budget = _BUDGET // runs
    for answer in answered:
        pictures = [
            Picture(words, None if grid is None else _embed(grid, wrong, words), small=True, tone=tone)
            for words, tone, grid, wrong in _describe(answer)
        ]
        budget -= sum(len(picture.content or "") for picture in pictures)
        if budget < 0:
            break
        rows.append((_name(answer), pictures))
    if not answered:
        return Section("")
    text = "The grid that most variants of a puzzle voted for is the first attempt. Crosses mark wrong cells."
    if len(rows) < len(answered):
        text += f" Shown are {len(rows)} of {len(answered)} tests."
    return Section(f"Answers: {run}", [text], pictures=rows)


def _describe(answer: AnsweredTest) -> Iterator[tuple[str, str, np.ndarray | None, np.ndarray | None]]:
    """Yield caption, tone (see `Picture`), grid and mask of wrong cells of each picture: input, attempts, truth."""
    truth = answer.output
    yield "input", "", answer.input, None
    for number, name in enumerate(("first", "second")):
        if number >= len(answer.candidates):
            yield f"{name} attempt: no other grid was voted for", "", None, None
            continue
        candidate = answer.candidates[number]
        grid, words = candidate.grid, f"{name} attempt, {candidate.votes} of {candidate.of} votes"
        if truth is None:
            yield f"{words}: {_size(grid)}", "", grid, None
        elif grid.shape != truth.shape:
            yield f"{words}: {_size(grid)}, wrong size", "wrong", grid, None
        elif np.array_equal(grid, truth):
            yield f"{words}: right", "right", grid, None
        else:
            wrong = grid != truth
            yield f"{words}: {wrong.sum()} of {truth.size} cells wrong", "wrong", grid, wrong
    yield "truth" + (": not known" if truth is None else f": {_size(truth)}"), "", truth, None


def paint_grid(grid: np.ndarray, wrong: np.ndarray | None = None) -> np.ndarray:
    """Return the pixels of a grid in ARC's colours, with a cross on each wrong cell. [height, width, 3]"""
    palette = np.array([to_rgb(colour) for colour in ARC_COLOURS])
    pixels = palette[grid].repeat(_CELL, 0).repeat(_CELL, 1)
    pixels[_CELL::_CELL] = _RULE
    pixels[:, _CELL::_CELL] = _RULE
    middle = np.arange(_CELL) - (_CELL - 1) / 2
    apart = np.minimum(abs(middle[:, None] - middle), abs(middle[:, None] + middle))  # to a diagonal
    inside = np.maximum(abs(middle)[:, None], abs(middle)) < _CELL / 3
    for row, column in () if wrong is None else np.argwhere(wrong):
        cell = pixels[row * _CELL : (row + 1) * _CELL, column * _CELL : (column + 1) * _CELL]
        cell[inside & (apart < 2)] = 0.0
        cell[inside & (apart < 1)] = 1.0
    return pixels


def _embed(grid: np.ndarray, wrong: np.ndarray | None, words: str) -> Markup:
    file = io.BytesIO()
    imsave(file, paint_grid(grid, wrong), format="png")
    content = base64.b64encode(file.getvalue()).decode()
    return Markup('<img class="grid" alt="{}" src="data:image/png;base64,{}">').format(words, content)


def _name(answer: AnsweredTest) -> str:
    return f"task {answer.puzzle}, test {answer.test + 1}"


def _size(grid: np.ndarray) -> str:
    return f"{grid.shape[0]} × {grid.shape[1]}"
