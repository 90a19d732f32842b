"""Read a run's folder: the configuration and the log, and evaluations and votes if there are any."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpmhc.experiments.evaluation.votes import AnsweredTest, Candidate
from jpmhc.experiments.tasks.arc.puzzles import parse_grid
from jpmhc.experiments.training.config import flatten_fields
from jpmhc.files import JsonObject, NotJson, parse_json, read_json_object


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The content of the files in a run's folder."""

    folder: Path
    config: JsonObject  # configuration, from config.json
    lines: Sequence[JsonObject]  # lines of the log in their order
    evaluations: dict[str, JsonObject]  # results that `jpmhc evaluate` wrote, by the file's name
    answered: Sequence[AnsweredTest]  # tests with answers from the newest `jpmhc predict`
    notes: Sequence[str]  # notes on damaged files, lines and tests, which were left out

    @property
    def mixer(self) -> str | None:
        """The mixer's name; None for plain residual connections, which have one stream."""
        model = self.config["model"]
        return str(model["mixer"]) if model.get("mixer") is not None and model.get("streams", 1) != 1 else None

    def of_kind(self, kind: str) -> list[JsonObject]:
        """Return the log's lines of one kind: "start", "train", "evaluate", "mixing" or "resume"."""
        return [line for line in self.lines if line["kind"] == kind]

    def series(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps at which lines of a kind logged the number `name`, and its values, which may be infinite."""
        logged = [(line["step"], to_number(line[name])) for line in self.of_kind(kind) if name in line]
        steps, values = zip(*logged) if logged else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def last(self, kind: str, name: str) -> float:
        """Return the last value of the number `name` in lines of a kind; NaN if it was never logged."""
        values = self.series(kind, name)[1]
        return float(values[-1]) if len(values) else math.nan


def to_number(value: object) -> float:
    """Turn a value of the log into a float: a number, "inf" or "-inf"; anything else becomes NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (math.inf if value > 0 else -math.inf) if abs(value) > 1e308 else float(value)
    return float(value) if value in ("inf", "-inf") else math.nan


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run; raise an error if the folder is empty, damaged or not the folder of a run."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name a folder that jpmhc train wrote (its --out)")
    if (folder / "comparison.json").is_file():
        raise ValueError(
            f"{folder} is a comparison of jpmhc compare, whose page is {folder / 'comparison.html'}; "
            "jpmhc report takes runs of jpmhc train"
        )
    if not (folder / "config.json").is_file():
        state = "is not the folder of a run" if any(folder.iterdir()) else "is empty"
        raise ValueError(f"{folder} {state}: it has no config.json, which jpmhc train writes first")
    config = read_json_object(folder / "config.json")
    missing = [name for name in ("model", "task") if not isinstance(config.get(name), dict)]
    if missing:
        raise ValueError(f"this version cannot read {folder / 'config.json'}: it lacks {missing[0]}")
    lines, notes = _read_log(folder / "log.jsonl")
    evaluations = {}
    for path in sorted((folder / "evaluations").glob("*.json")):
        content = read_json_object(path)
        if content.get("format") == "jpmhc evaluation 1" and isinstance(content.get("results"), list):
            evaluations[path.name] = content
        else:
            notes.append(f"{path.name} was left out: this version cannot read it as an evaluation")
    answered, remarks = _read_votes(folder)
    return RunRecord(folder, config, lines, evaluations, answered, [*notes, *remarks])


def _read_log(path: Path) -> tuple[list[JsonObject], list[str]]:
    """Return the lines of a log, and notes about damaged lines, such as an unfinished last line."""
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError as refusal:
        raise ValueError(f"cannot read {path} ({refusal.strerror})") from refusal
    lines, notes = [], []
    for number, text in enumerate(texts, 1):
        try:
            line = parse_json(text.encode())
        except NotJson:
            which = f"line {number} of the log is damaged" if number < len(texts) else "the last line is half written"
            notes.append(f"{which}, and was left out")
            continue
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not _is_step(line.get("step")):
            raise ValueError(f"{path} is not a log that this version reads: line {number} has no kind or no step")
        lines.append(line)
    if not any(line["kind"] == "train" for line in lines):
        raise ValueError(f"{path.parent} has nothing to show: the run has logged no step yet")
    return lines, notes


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _read_votes(folder: Path) -> tuple[list[AnsweredTest], list[str]]:
    """Return the undamaged tests of the newest votes file, and notes about damaged tests."""
    files = sorted((folder / "submissions").glob("*.votes.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        return [], []
    content = read_json_object(files[-1])
    if content.get("format") != "jpmhc votes 1" or not isinstance(content.get("tests"), list):
        return [], [f"{files[-1].name} does not hold votes that this version reads, and was left out"]
    tests = [answered for test in content["tests"] if (answered := to_answered(test)) is not None]
    lost = len(content["tests"]) - len(tests)
    return tests, [f"{lost} tests of {files[-1].name} are damaged, and were left out"] if lost else []


def to_answered(test: JsonObject) -> AnsweredTest | None:
    """Return one test of a votes file; None if the test is damaged."""
    try:
        candidates = [
            Candidate(parse_grid(one["grid"]), int(one["votes"]), int(one["of"])) for one in test["candidates"]
        ]
        truth = None if test.get("output") is None else parse_grid(test["output"])
        return AnsweredTest(
            str(test.get("task")), int(test.get("test", 0)), parse_grid(test["input"]), truth, candidates
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def flatten_options(config: JsonObject) -> dict[str, str]:
    """Return the value of every option of a configuration as text, such as {"model.dim": "64"}."""
    options = flatten_fields(config)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
