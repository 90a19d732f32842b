"""The log: lines survive, those after a resume's start are dropped, numbers that are not finite have names."""

import json
import subprocess

import pytest

from jpmhc.experiments.training.log import Log, find_commit
from tests.full_disk import full_disk


def test_a_resumed_log_drops_what_will_be_logged_again(tmp_path):
    with Log(tmp_path) as log:
        for step in range(1, 6):
            log.write("train", step, {"loss": 1.0 / step, "nested": {"a": step}})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # a killed process leaves half a line
    with Log(tmp_path, done=3) as log:
        assert log.known == {("train", 1), ("train", 2), ("train", 3)}
        log.write("train", 4, {"loss": float("nan")})
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[3]["loss"] == "nan"
    assert records[1] == {"kind": "train", "step": 2, "loss": 0.5, "nested": {"a": 2}}


def test_a_damaged_line_costs_that_line_alone(tmp_path):
    with Log(tmp_path) as log:
        for step in range(1, 47):
            log.write("train", step, {"loss": 1.0 / step})
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().splitlines()
    lines[3] = lines[3][:9] + b"\xff" + lines[3][10:]
    lines[7] = lines[7][:-5]
    lines[9] = b"[" * 2000
    lines[11], lines[12] = b"7", b'{"kind": "train", "step": "x"}'
    lines[20] = lines[20].replace(b":", b"\x00", 1)
    path.write_bytes(b"\n".join(lines) + b"\n")
    with Log(tmp_path, done=46) as log:
        assert log.damaged == 6
        assert len(log.known) == 40
    assert path.read_bytes().splitlines() == [line for k, line in enumerate(lines) if k not in (3, 7, 9, 11, 12, 20)]


def test_a_log_that_cannot_be_written_again_is_not_lost(tmp_path):
    with Log(tmp_path) as log:
        log.write("train", 1, {"loss": 1.0})
    before = (tmp_path / "log.jsonl").read_text()

    with full_disk(10), pytest.raises(OSError, match="File too large"):
        Log(tmp_path, done=1)
    assert (tmp_path / "log.jsonl").read_text() == before


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Log(tmp_path) as log:
        log.write("train", 7, {"loss": 0.5, "layer": "network.0", "nested": {"a": 2}})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/nested/a"]
    assert events.Scalars("train/loss")[0].value == 0.5
    assert events.Scalars("train/loss")[0].step == 7


def test_the_commit_is_that_of_the_source_and_says_when_it_was_changed(tmp_path):
    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=b", *words], cwd=tmp_path, capture_output=True
        )
        return done.stdout.decode().strip()

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    assert find_commit(tmp_path / "package") is None
    git("init")
    assert find_commit(tmp_path / "package") is None  # inside a repository that does not know it
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert find_commit(tmp_path / "package") == commit
    (tmp_path / "package" / "__init__.py").write_text("changed = 1")
    assert find_commit(tmp_path / "package") == f"{commit}+"
