"""ARC tests on a page: input, attempts with their votes, and the truth, as coloured grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jpmhc.report.page import Picture, Section
from jpmhc.report.svg import draw_grid

# Characters of all grids of a page together.
_BUDGET = 1_200_000


def draw_tests(run: str, tests: Sequence[dict[str, Any]], runs: int = 1) -> Section:
    """Return the section of a run's answered tests, empty where it has none.

    Args:
        run: The run's name.
        tests: What `read_run` found of votes.
        runs: How many runs share the page.
    """
    rows: list[tuple[str, list[Picture]]] = []
    left = _BUDGET // runs
    for test in tests:
        pictures = _draw_test(test)
        left -= sum(len(picture.svg or "") for picture in pictures)
        if left < 0:
            break
        rows.append((f"task {test.get('task')}, test {test.get('test', 0) + 1}", pictures))
    if not tests:
        return Section("")
    text = "The grid that most variants of a puzzle voted for is the first attempt. Crosses mark wrong cells."
    if len(rows) < len(tests):
        text += f" Shown are {len(rows)} of {len(tests)} tests."
    return Section(f"Answers: {run}", [text], (), rows)


def _draw_test(test: dict[str, Any]) -> list[Picture]:
    truth = test.get("output")
    found = [Picture("input", draw_grid(test["input"], description="input"), small=True)]
    for name, candidate in zip(("first", "second"), [*test["candidates"], None, None]):
        if candidate is None:
            found.append(Picture(f"{name} attempt: no other grid was voted for", None, small=True))
            continue
        grid, wrong, tone = candidate["grid"], [], ""
        words = f"{name} attempt, {candidate['votes']} of {candidate['of']} votes"
        if truth is not None and (len(grid), len(grid[0])) != (len(truth), len(truth[0])):
            tone, words = "wrong", f"{words}: {len(grid)} × {len(grid[0])}, wrong size"
        elif truth is not None:
            wrong = [(r, c) for r, row in enumerate(grid) for c, cell in enumerate(row) if cell != truth[r][c]]
            tone = "wrong" if wrong else "right"
            words += f": {len(wrong)} of {len(grid) * len(grid[0])} cells wrong" if wrong else ": right"
        found.append(Picture(words, draw_grid(grid, wrong, words), small=True, tone=tone))
    if truth is None:
        return [*found, Picture("truth: not known", None, small=True)]
    return [*found, Picture("truth", draw_grid(truth, description="truth"), small=True)]
