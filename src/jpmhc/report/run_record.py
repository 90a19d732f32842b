"""Reading the folder of a run: configuration, log, evaluations and votes, whichever are there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run has left in its folder.

    Attributes:
        folder: The folder.
        config: The configuration, as it was written.
        lines: The lines of the log in their order.
        evaluations: What `jpmhc evaluate` wrote, by the file's name.
        votes: The tests that `jpmhc predict` answered last, with the votes for each candidate.
        notes: What is missing or was left out.
    """

    folder: Path
    config: dict[str, Any]
    lines: Sequence[dict[str, Any]]
    evaluations: dict[str, dict[str, Any]]
    votes: Sequence[dict[str, Any]]
    notes: Sequence[str]

    @property
    def mixer(self) -> str | None:
        """The mixer's name; None for plain residual connections, which have one stream."""
        model = self.config["model"]
        return str(model["mixer"]) if model.get("mixer") is not None and model.get("streams", 1) != 1 else None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind: "start", "train", "evaluate", "mixing" or "resume"."""
        return [line for line in self.lines if line["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which a number was logged, and the numbers; those that are not finite stay so."""
        found = [(line["step"], to_number(line[name])) for line in self.of_kind(kind) if name in line]
        steps, values = zip(*found) if found else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def last(self, kind: str, name: str) -> float:
        """Return the last number that was logged; NaN where none was."""
        values = self.series(kind, name)[1]
        return float(values[-1]) if len(values) else math.nan


def to_number(value: Any) -> float:
    """Return a logged number, which is a name where it is not finite; NaN for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (math.inf if value > 0 else -math.inf) if abs(value) > 1e308 else float(value)
    return float(value) if value in ("inf", "-inf") else math.nan


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run; one that is empty, half written or of another kind is refused."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name the --out of a jpmhc train")
    if (folder / "comparison.json").is_file():
        raise ValueError(
            f"{folder} is a comparison of jpmhc compare, whose page is {folder / 'comparison.html'}; "
            "jpmhc report takes runs of jpmhc train"
        )
    if not (folder / "config.json").is_file():
        state = "is not the folder of a run" if any(folder.iterdir()) else "is empty"
        raise ValueError(f"{folder} {state}: it has no config.json, which jpmhc train writes first")
    config = _read_json(folder / "config.json")
    missing = [name for name in ("model", "task") if not isinstance(config.get(name), dict)]
    if missing:
        raise ValueError(f"{folder / 'config.json'} is not one that this version reads: it lacks {missing[0]}")
    lines, notes = _read_log(folder / "log.jsonl")
    evaluations = {}
    for path in sorted((folder / "evaluations").glob("*.json")):
        found = _read_json(path)
        if found.get("format") == "jpmhc evaluation 1" and isinstance(found.get("results"), list):
            evaluations[path.name] = found
        else:
            notes.append(f"{path.name} is not an evaluation that this version reads, and was left out")
    votes, said = _read_votes(folder)
    return RunRecord(folder, config, lines, evaluations, votes, [*notes, *said])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is half written or damaged: it is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not one that this version reads: it must hold an object")
    return found


def _read_log(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of a log, and notes about those that cannot be read, as a last one that was being written."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError as refusal:
        raise ValueError(f"cannot read {path} ({refusal.strerror})") from refusal
    lines, notes = [], []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            which = f"line {number} of the log is damaged" if number < len(texts) else "the last line is half written"
            notes.append(f"{which}, and was left out")
            continue
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not _is_step(line.get("step")):
            raise ValueError(f"{path} is not a log that this version reads: line {number} has no kind or no step")
        lines.append(line)
    if not any(line["kind"] == "train" for line in lines):
        raise ValueError(f"{path.parent} has nothing to show: the run has logged no step yet")
    return lines, notes


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _read_votes(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tests of the newest file of votes, those that are whole, and what was left out."""
    files = sorted((folder / "submissions").glob("*.votes.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        return [], []
    found = _read_json(files[-1])
    if found.get("format") != "jpmhc votes 1" or not isinstance(found.get("tests"), list):
        return [], [f"{files[-1].name} does not hold votes that this version reads, and was left out"]
    tests = [test for test in found["tests"] if _is_test(test)]
    lost = len(found["tests"]) - len(tests)
    return tests, [f"{lost} tests of {files[-1].name} are damaged, and were left out"] if lost else []


def _is_test(test: Any) -> bool:
    if not isinstance(test, dict) or not isinstance(test.get("candidates"), list):
        return False
    grids = [test.get("input"), *([] if test.get("output") is None else [test["output"]])]
    candidates = test["candidates"]
    if not all(isinstance(one, dict) and {"grid", "votes", "of"} <= one.keys() for one in candidates):
        return False
    return all(map(_is_grid, [*grids, *(one["grid"] for one in candidates)]))


def _is_grid(grid: Any) -> bool:
    if not isinstance(grid, list) or not 1 <= len(grid) <= 64 or not all(isinstance(row, list) for row in grid):
        return False
    return 1 <= len(grid[0]) <= 64 and all(
        len(row) == len(grid[0]) and all(isinstance(cell, int) and 0 <= cell <= 9 for cell in row) for row in grid
    )


def flatten_options(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every option of a configuration with its value as text, such as ("model.dim", "64")."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flatten_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
