"""Exploration and prefetching: pure functions of (seed, step, row)."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.prefetch import minimum_steps, prefetch_batches


def test_minimum_is_uniform_above_one_with_the_given_probability():
    rows = np.arange(20_000)
    drawn = minimum_steps(3, 7, rows, 0.1, 16)
    explores = drawn > 0
    assert explores.mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / 20_000))
    counts = np.bincount(drawn[explores], minlength=17)[2:]
    assert counts.sum() == explores.sum()
    assert counts.min() > 0.6 * counts.mean()
    assert not minimum_steps(3, 7, rows, 0.1, 1).any()


def test_minimum_belongs_to_seed_step_and_row():
    rows = np.arange(64)
    whole = minimum_steps(0, 5, rows, 0.5, 16)
    halves = np.concatenate([minimum_steps(0, 5, rows[:32], 0.5, 16), minimum_steps(0, 5, rows[32:], 0.5, 16)])
    assert np.array_equal(whole, halves)
    assert not np.array_equal(whole, minimum_steps(0, 6, rows, 0.5, 16))
    assert not np.array_equal(whole, minimum_steps(1, 5, rows, 0.5, 16))


def test_ranks_see_parts_of_the_batch_and_a_later_start_the_same_rows():
    task = SudokuConfig(puzzles=30, test_puzzles=5).build()

    def rows(part, start, stop):
        config = TrainConfig(batch=8, model=RecursiveConfig(halt_exploration=0.5, halt_max_steps=4))
        stream = prefetch_batches(task, config, part, torch.device("cpu"), range(start, stop))
        return {step: (batch.inputs, minimum) for step, batch, minimum in stream}

    whole, first, second = rows(range(8), 0, 5), rows(range(4), 0, 5), rows(range(4, 8), 0, 5)
    late = rows(range(8), 3, 5)
    assert list(whole) == [0, 1, 2, 3, 4]
    for step, (inputs, minimum) in whole.items():
        assert torch.equal(inputs, torch.cat((first[step][0], second[step][0])))
        assert torch.equal(minimum, torch.cat((first[step][1], second[step][1])))
        assert torch.equal(inputs, task.examples(np.arange(step * 8, step * 8 + 8)).inputs)
    for step in (3, 4):
        assert torch.equal(late[step][0], whole[step][0])
