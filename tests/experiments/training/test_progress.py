"""The display: whole lines now and then in a file, bars on a terminal, silence elsewhere."""

import dataclasses
import io
import re
import sys

import pytest
from rich.console import Console

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.training import progress
from jpmhc.experiments.training.loop import train
from jpmhc.experiments.training.progress import Display
from tests.experiments.training.small_run import SMALL, small


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when told."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_whole_line_every_ten_seconds(clock, capsys):
    detail = "a long line " * 20
    with Display() as display:
        for done in range(5, 40):
            display.show("step", done, 40, detail)
            clock[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    # First shown at 5, so 10 seconds and 10 steps later 25 are left at one a second.
    assert lines == [f"step {done}/40 · {detail} · {40 - done} s left" for done in (15, 25, 35)]


def test_jobs_have_clocks_of_their_own_and_short_ones_say_nothing(clock, capsys):
    with Display() as display:
        display.show("step", 1, 100)
        clock[0] += 9.0
        display.show("rows", 1, 2)
        clock[0] += 2.0
        display.show("rows", 2, 2)
        display.finish("rows")
        display.show("step", 12, 100)
    assert capsys.readouterr().err == "step 12/100 · 88 s left\n"


def test_units_are_counted_when_the_next_begins(clock, capsys):
    with Display() as display:
        show = display.counting("depths", 3)
        for depth in (12, 24, 48):
            show(f"depth {depth}")
            clock[0] += 11.0
    assert capsys.readouterr().err.splitlines() == [
        "depths 0/3 · depth 12",
        "depths 1/3 · depth 24 · 22 s left",
        "depths 2/3 · depth 48 · 11 s left",
    ]


def test_a_terminal_gets_bars_and_a_silent_display_nothing(monkeypatch, capsys):
    shown = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(
        "rich.console.Console", lambda **options: Console(file=shown, force_terminal=True, width=120, **options)
    )
    with Display() as display, display.preparing("preparing the puzzles"):
        display.show("evaluating: rows", 3, 12)
        display.bars.refresh()
    assert re.search("preparing the puzzles.*evaluating: rows.*3/12", shown.getvalue(), re.DOTALL)
    shown.truncate(0)
    with Display(speaks=False) as display, display.preparing("preparing"):
        display.say("a line")
        display.show("rows", 3, 12)
    assert not shown.getvalue().strip("\0")


def test_an_evaluation_inside_training_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    train(small(tmp_path, steps=2, evaluate_batch=3))
    said = capsys.readouterr().err
    assert re.findall(r"evaluating step 2: rows (\d+)/10 · \d+ s left", said) == ["3", "6", "9", "10"]
    assert "evaluating step 2: rows 0/10\n" in said
    assert re.search(r"^step 2: held out: 10 rows: exact accuracy .*lm loss [0-9.]+$", said, re.MULTILINE)


def test_memory_is_not_called_held_out(tmp_path, capsys):
    task = ArcConfig(tasks=("25d8a9c8",), augmentations=0, side=4, test_on="training")
    train(dataclasses.replace(SMALL, task=task, steps=1, out=tmp_path))
    said = capsys.readouterr().err
    assert "step 1: tests seen in training: 1 rows" in said
    assert "held out" not in said
