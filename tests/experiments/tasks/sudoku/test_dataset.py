"""Sudoku as a task: rows that are right, pure in their position, and split by solution."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.evaluation.scores import Answers
from jpmhc.experiments.tasks import sudoku as grids
from jpmhc.experiments.tasks.sudoku import BLANK, Sudoku, SudokuConfig


@pytest.fixture(scope="module", params=[4, 6, 9])
def task(request: pytest.FixtureRequest) -> Sudoku:
    return SudokuConfig(size=request.param, puzzles=40, test_puzzles=12, seed=2).build()


def test_rows_are_puzzles_with_their_solution(task: Sudoku) -> None:
    for batch in (task.examples(np.arange(100)), task.test_examples(np.arange(12))):
        size = task.config.size
        assert batch.inputs.shape == batch.labels.shape == (len(batch), size**2)
        digits = batch.labels.numpy() - 2
        assert (np.sort(digits[:, task.geometry.units], -1) == np.arange(size)).all()
        shown = batch.inputs != BLANK
        assert (batch.inputs == batch.labels)[shown].all()
        assert batch.inputs.max() < task.vocabulary
        # One solution: no solution has another digit in any hidden cell.
        hidden = np.argmin(shown.numpy(), 1)
        partials = np.where(shown.numpy(), 1 << digits, 2**size - 1).astype(np.uint16)
        rows = np.arange(len(batch))
        partials[rows, hidden] &= ~(1 << digits[rows, hidden]).astype(np.uint16)
        assert not grids.solvable(partials, task.geometry).any()


def test_rows_depend_on_their_position_alone(task: Sudoku) -> None:
    whole = task.examples(np.arange(30, 90))
    order = np.random.default_rng(0).permutation(60)
    parts = task.examples(30 + order)
    assert torch.equal(whole.inputs[order], parts.inputs)
    assert torch.equal(whole.labels[order], parts.labels)
    assert torch.equal(task.test_examples(np.array([7])).inputs[0], task.test_examples(np.arange(12)).inputs[7])


def test_test_solutions_are_in_no_training_class(task: Sudoku) -> None:
    size = task.config.size
    name = (lambda g: grids.relabel_digits(g, 4)) if size == 4 else lambda g: grids.signature(g, task.geometry)
    seen = {name(g) for g in task.examples(np.arange(400)).labels.numpy() - 2}
    held = {name(g) for g in task.test_examples(np.arange(12)).labels.numpy() - 2}
    assert seen
    assert held
    assert not seen & held


def test_an_epoch_shows_every_puzzle_once() -> None:
    task = SudokuConfig(puzzles=40, test_puzzles=3, extra_clues=0).build()
    for epoch in range(2):
        inputs = task.examples(np.arange(40) + 40 * epoch).inputs.numpy()
        masks = np.sort((inputs != BLANK) @ (1 << np.arange(16)))
        assert masks.tolist() == sorted(task.clues[:40] @ (1 << np.arange(16)))


def test_number_of_extra_clues() -> None:
    task = SudokuConfig(puzzles=1, test_puzzles=1, extra_clues=3).build()
    shown = (task.examples(np.arange(4000)).inputs != BLANK).sum(1).numpy() - task.clues[0].sum()
    counts = np.bincount(shown, minlength=4)
    assert len(counts) == 4
    assert abs(counts - 1000).max() < 150  # uniform over 0..3; five standard deviations


def test_fingerprint_follows_the_configuration() -> None:
    first = SudokuConfig(puzzles=5, test_puzzles=3).build().fingerprint()
    assert first == SudokuConfig(puzzles=5, test_puzzles=3).build().fingerprint()
    assert first != SudokuConfig(puzzles=5, test_puzzles=3, seed=1).build().fingerprint()


def test_scorer_counts_puzzles_and_cells() -> None:
    task = SudokuConfig(puzzles=5, test_puzzles=4).build()
    rows = task.test_selection()
    batch = task.test_examples(rows)
    tokens = batch.labels.clone()
    tokens[1, :4] = 0
    scorer = task.scorer(rows)
    scorer.update(rows, batch.labels, Answers(tokens, torch.full((4,), 0.5), torch.arange(4.0)))
    result = scorer.result()
    assert result["exact_accuracy"] == 0.75
    assert result["token_accuracy"] == pytest.approx(1 - 4 / 64)
    assert result["lm_loss"] == 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 5}, "4, 6 or 9"),
        ({"puzzles": 0}, "puzzles must be a whole number, at least 1, got 0"),
        ({"test_share": 1.0}, r"test_share must lie in \(0, 1\), got 1.0"),
        ({"extra_clues": -1}, r"extra_clues must lie in \[0, 16\], got -1"),
    ],
)
def test_bad_configurations_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SudokuConfig(**options)
