"""ARC as a task: rows against hand-made grids, the stream's order, and what training may see."""

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.arc.puzzles import LARGEST


def variant_of(arc: Arc, identifier: int) -> tuple[int, int]:
    puzzle = int(arc.variants.puzzle_of(np.array(identifier - 1)))
    return puzzle, identifier - 1


def grid_of(row: torch.Tensor) -> tuple[np.ndarray, int, int]:
    """The grid in a row of tokens and where it stands: the box around its colours."""
    square = row.reshape(LARGEST, LARGEST).numpy()
    r, c = np.nonzero(square >= 2)
    return square[r.min() : r.max() + 1, c.min() : c.max() + 1] - 2, int(r.min()), int(c.min())


def transformed(grid: np.ndarray, symmetry: int, colours: np.ndarray) -> np.ndarray:
    """A variant's grid the slow way."""
    out = grid
    if symmetry & 2:
        out = np.flipud(out)
    if symmetry & 1:
        out = np.fliplr(out)
    return colours[out.T if symmetry & 4 else out]


def test_rows_hold_the_variant_of_a_pair(arc: Arc) -> None:
    batch = arc.examples(np.arange(1000, 1300))
    moved = 0
    for inputs, labels, identifier in zip(batch.inputs, batch.labels, batch.identifiers):
        puzzle, variant = variant_of(arc, int(identifier))
        symmetry, colours = int(arc.variants.symmetry[variant]), arc.variants.colours[variant]
        shown, top, left = grid_of(inputs)
        answer, *place = grid_of(labels)
        assert place == [top, left]
        moved += (top, left) != (0, 0)
        part = arc.puzzles[puzzle]
        pairs = part.demonstrations + (part.tests if puzzle < 400 else ())
        assert any(
            np.array_equal(transformed(p.input, symmetry, colours), shown)
            and np.array_equal(transformed(p.output, symmetry, colours), answer)
            for p in pairs
            if p.output is not None
        )
    assert moved > 100


def test_an_epoch_is_one_variant_of_every_puzzle_with_all_its_pairs(arc: Arc) -> None:
    drawn = []
    for epoch in range(2):
        ids = arc.examples(np.arange(arc.epoch_length) + epoch * arc.epoch_length).identifiers.numpy()
        variants, counts = np.unique(ids, return_counts=True)
        puzzles = arc.variants.puzzle_of(variants - 1)
        assert puzzles.tolist() == list(range(800))
        expected = [len(p.demonstrations) + (len(p.tests) if k < 400 else 0) for k, p in enumerate(arc.puzzles)]
        assert counts.tolist() == expected
        drawn.append(variants)
    assert np.mean(drawn[0] == drawn[1]) < 0.25  # about one in 7


def test_rows_depend_on_their_position_alone(arc: Arc) -> None:
    positions = np.random.default_rng(0).integers(0, 50_000, 64)
    whole = arc.examples(positions)
    for part in (slice(0, 5), slice(60, 64)):
        alone = arc.examples(positions[part])
        assert torch.equal(alone.inputs, whole.inputs[part])
        assert torch.equal(alone.labels, whole.labels[part])
        assert torch.equal(alone.identifiers, whole.identifiers[part])
    copy = pickle.loads(pickle.dumps(arc))
    assert torch.equal(copy.examples(positions).inputs, whole.inputs)


def test_one_pair_of_a_variant_stays_put_and_places_are_fixed(arc: Arc) -> None:
    for puzzle in (0, 7, 450):
        pairs = int(arc._trained_pairs[puzzle])
        for variant in range(arc.variants.starts[puzzle], arc.variants.starts[puzzle] + 5):
            top, left = arc._translation(np.full(pairs, variant), np.full(pairs, puzzle), np.arange(pairs))
            assert ((top == 0) & (left == 0)).sum() >= 1
            assert ((top > 0) | (left > 0)).sum() >= pairs - 2  # all but one, save for a chance move to the corner


def test_translations_fill_the_room_they_have(arc: Arc) -> None:
    small = next(k for k, p in enumerate(arc.puzzles) if p.largest_side == 3)
    tops = []
    for seed in range(300):
        variant = np.array([arc.variants.starts[small]])
        moved = Arc.__new__(Arc)
        moved.__dict__ = arc.__dict__ | {"config": ArcConfig(seed=seed)}
        tops.append(moved._translation(variant, np.array([small]), np.array([0]))[0][0])
    assert max(tops) == LARGEST - 3
    assert min(tops) == 0


def test_training_never_shows_an_evaluation_answer(arc: Arc) -> None:
    """Over two epochs, with the variants undone, no pair equals a test of an evaluation puzzle."""
    held = {
        (p.input.tobytes(), p.input.shape, p.output.tobytes()): puzzle.name
        for puzzle in arc.puzzles[400:]
        for p in puzzle.tests
        if p.output is not None
    }
    seen = set()
    batch = arc.examples(np.arange(2 * arc.epoch_length))
    for inputs, labels, identifier in zip(batch.inputs, batch.labels, batch.identifiers):
        _, variant = variant_of(arc, int(identifier))
        symmetry, colours = int(arc.variants.symmetry[variant]), arc.variants.colours[variant]
        sides = []
        for row in (inputs, labels):
            grid = np.argsort(colours).astype(np.uint8)[grid_of(row)[0]]
            grid = grid.T if symmetry & 4 else grid
            grid = np.fliplr(grid) if symmetry & 1 else grid
            sides.append(np.ascontiguousarray(np.flipud(grid) if symmetry & 2 else grid))
        seen.add((sides[0].tobytes(), sides[0].shape, sides[1].tobytes()))
    assert len(seen) > 3000
    # One pair is public in both sets: it is the test of training puzzle 40853293 and of evaluation puzzle 070dd51e.
    assert {held[key] for key in held.keys() & seen} == {"070dd51e"}


def test_test_rows_are_the_tests_in_every_variant(arc: Arc) -> None:
    expected = sum(n * len(p.tests) for n, p in zip(arc.variants.counts[400:], arc.puzzles[400:]))
    assert arc.test_rows == expected
    rows = np.random.default_rng(1).integers(0, arc.test_rows, 50)
    batch = arc.test_examples(rows)
    place, variants, _ = arc.locate_rows(rows)
    for inputs, labels, p, variant in zip(batch.inputs, batch.labels, place, variants):
        symmetry, colours = int(arc.variants.symmetry[variant]), arc.variants.colours[variant]
        shown, top, left = grid_of(inputs)
        assert (top, left) == (0, 0)
        tests = arc.puzzles[arc.tested[p]].tests
        match = [t for t in tests if np.array_equal(transformed(t.input, symmetry, colours), shown)]
        assert any(np.array_equal(transformed(t.output, symmetry, colours), grid_of(labels)[0]) for t in match)


def test_identifiers_of_test_rows_are_those_of_training(arc: Arc) -> None:
    trained = set(arc.examples(np.arange(40 * arc.epoch_length)[:: arc.epoch_length // 50]).identifiers.tolist())
    tested = set(arc.test_examples(np.arange(arc.test_rows)[::37]).identifiers.tolist())
    assert trained & tested
    assert max(trained | tested) < arc.identifier_count
    assert min(trained | tested) > 0


def test_selection_takes_whole_variants_at_random(arc: Arc) -> None:
    assert (arc.test_selection() == np.arange(arc.test_rows)).all()
    rows = arc.test_selection(4, seed=1)
    assert (np.diff(rows) > 0).all()
    place, variants, _ = arc.locate_rows(rows)
    for p in range(len(arc.tested)):
        mine, counts = np.unique(variants[place == p], return_counts=True)
        assert len(mine) == min(4, arc.variants.counts[arc.tested[p]])
        assert (counts == len(arc.puzzles[arc.tested[p]].tests)).all()
    assert not np.array_equal(rows, arc.test_selection(4, seed=2))
    assert (arc.test_selection(10**6) == np.arange(arc.test_rows)).all()


def test_descriptions_name_task_and_variant(arc: Arc) -> None:
    second = int(arc.variants.starts[1])
    named = arc.describe(np.array([0, 1, second + 1, second + 4]))
    assert named[0] == "no task"
    assert named[1] == f"task {arc.puzzles[0].name}, variant 0"
    assert named[2] == f"task {arc.puzzles[1].name}, variant 0"
    assert named[3] == f"task {arc.puzzles[1].name}, variant 3"


def test_smaller_squares_leave_large_puzzles_out() -> None:
    small = ArcConfig(augmentations=1, side=10).build()
    assert 0 < len(small.puzzles) < 800
    assert small.length == 100
    assert all(p.largest_side <= 10 for p in small.puzzles)
    assert small.examples(np.arange(50)).inputs.shape == (50, 100)


def test_named_tasks_alone() -> None:
    config = ArcConfig(tasks=("007bbfb7", "00d62c1b"), test_on="training", augmentations=3, translate=False)
    task = config.build()
    assert [p.name for p in task.puzzles] == ["007bbfb7", "00d62c1b"]
    assert task.test_rows == 4 * 2
    batch = task.examples(np.arange(100))
    assert (batch.inputs.reshape(-1, LARGEST, LARGEST)[:, 0, 0] >= 2).all()  # untranslated


def test_extra_tasks_are_trained_on_with_their_tests(conceptarc: Path) -> None:
    task = ArcConfig(extra_tasks=conceptarc, augmentations=0).build()
    assert len(task.puzzles) == 960
    everything = [len(p.demonstrations) + len(p.tests) for p in task.puzzles[:560]]
    assert task.epoch_length == sum(everything) + sum(len(p.demonstrations) for p in task.puzzles[560:])
    # The paper evaluates every 12,951 steps of 768 rows, which the public code counts as 2500 epochs.
    assert abs(2500 * task.epoch_length / 768 / 12_951 - 1) < 0.005


def test_own_puzzles_without_answers_can_be_asked_about(tmp_path: Path) -> None:
    pair = {"input": [[1, 0]], "output": [[0, 1]]}
    (tmp_path / "mine.json").write_text(json.dumps({"train": [pair, pair], "test": [{"input": [[2, 0]]}]}))
    task = ArcConfig(version="none", evaluation_tasks=tmp_path, augmentations=5).build()
    batch = task.test_examples(np.arange(task.test_rows))
    assert (batch.labels == 0).all()
    assert (batch.inputs > 0).any()
    with pytest.raises(ValueError, match='"output" is missing'):
        ArcConfig(version="none", extra_tasks=tmp_path, test_on="training").build()


def test_extra_tasks_with_an_evaluation_answer_are_refused(tmp_path: Path, arc: Arc) -> None:
    held = arc.puzzles[500].tests[0]
    assert held.output is not None
    leak = {"input": held.input.tolist(), "output": held.output.tolist()}
    (tmp_path / "leak.json").write_text(json.dumps({"train": [leak], "test": [leak]}))
    with pytest.raises(
        ValueError, match=f"extra task leak holds a test of the evaluation task {arc.puzzles[500].name}"
    ):
        ArcConfig(extra_tasks=tmp_path).build()


def test_fingerprint_tells_streams_apart() -> None:
    base = ArcConfig(tasks=("007bbfb7",), test_on="training", augmentations=5)
    training, evaluation = base.load_puzzles()
    same = Arc(base, training, evaluation).fingerprint()
    assert same == Arc(base, training, evaluation).fingerprint()
    for change in ({"seed": 1}, {"augmentations": 6}, {"translate": False}, {"side": 20}):
        assert same != Arc(dataclasses.replace(base, **change), training, evaluation).fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("nothing",)}, "there is no task nothing among the 800"),
        ({"tasks": ("007bbfb7",)}, "no evaluation puzzle to test on"),
        ({"tasks": ("007bbfb7",), "side": 5}, "task 007bbfb7 has a grid of 9 rows or columns, but the side is 5"),
        ({"side": 31}, r"side must lie in \[1, 30\], got 31"),
        ({"augmentations": -1}, r"augmentations must lie in \[0, inf\), got -1"),
        ({"version": "none"}, "no puzzles"),
    ],
)
def test_bad_configurations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArcConfig(**options).load_puzzles()
