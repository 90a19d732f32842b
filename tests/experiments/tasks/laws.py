"""The laws that every task obeys, as functions that raise when a law is broken. Run over all of TASKS."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from jpmhc.experiments.evaluation.scores import Answers
from jpmhc.experiments.models.losses import PAD
from jpmhc.experiments.tasks import TASKS, kind_of
from jpmhc.experiments.tasks.task import Batch, Task, TaskConfig
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.prefetch import prefetch_batches


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Batch))


def take(batch: Batch, rows: np.ndarray) -> Batch:
    return Batch(batch.inputs[rows], batch.labels[rows], batch.identifiers[rows])


def half_right(batch: Batch) -> Answers:
    """Wrong in the first scored token of every second row, with a confidence and a loss that depend on the row."""
    tokens = batch.labels.clone()
    number = batch.inputs.sum(-1)
    for row in torch.nonzero(number % 2 == 0).flatten().tolist():
        first = int((batch.labels[row] != PAD).int().argmax())
        tokens[row, first] = 2 + (tokens[row, first] - 1) % 2
    return Answers(tokens, 1 / (1 + number.double()), number.double())


def rows_have_the_promised_shape(task: Task) -> None:
    """Integer tokens below the vocabulary, identifiers below their number, something to predict in every row."""
    for batch in (task.examples(np.arange(500)), task.test_examples(task.test_selection()[:500])):
        assert batch.inputs.shape == batch.labels.shape == (len(batch), task.length)
        assert batch.identifiers.shape == (len(batch),)
        for tensor, bound in (
            (batch.inputs, task.vocabulary),
            (batch.labels, task.vocabulary),
            (batch.identifiers, task.identifier_count),
        ):
            assert tensor.dtype == torch.int64
            assert tensor.min() >= 0
            assert tensor.max() < bound
        assert (batch.labels != PAD).any(-1).all()
    assert PAD == 0


def rows_are_a_function_of_configuration_and_position(config: TaskConfig) -> None:
    """Built twice, asked in another order, alone, or after a trip to another process: the same rows."""
    task, again = config.build(), config.build()
    far = np.arange(3) + 10**9  # nobody walks there step by step
    positions = np.concatenate([np.arange(40), far])
    whole = task.examples(positions)
    order = np.random.default_rng(0).permutation(len(positions))
    assert equal(take(whole, order), again.examples(positions[order]))
    assert equal(take(whole, np.array([7])), pickle.loads(pickle.dumps(task)).examples(positions[7:8]))
    tests = task.test_selection()[::-1][:40].copy()
    assert equal(
        task.test_examples(tests), take(again.test_examples(tests[::-1].copy()), np.arange(len(tests))[::-1].copy())
    )
    assert task.fingerprint() == again.fingerprint()


def another_seed_is_another_task(config: TaskConfig) -> None:
    other = dataclasses.replace(config, seed=config.seed + 1)  # type: ignore[type-var]
    positions = np.arange(64)
    assert not equal(config.build().examples(positions), other.build().examples(positions))
    assert config.build().fingerprint() != other.build().fingerprint()


def a_resumed_run_gets_the_batches_it_would_have_got(task: Task) -> None:
    """From any step on, and whatever part of the rows a process works on."""

    def batches(rows: range, start: int) -> dict[int, Batch]:
        stream = prefetch_batches(task, TrainConfig(batch=6), rows, torch.device("cpu"), range(start, 5))
        return {step: batch for step, batch, _ in stream}

    whole, late, part = batches(range(6), 0), batches(range(6), 3), batches(range(2, 4), 0)
    assert list(late) == [3, 4]
    assert all(equal(late[step], whole[step]) for step in late)
    assert all(equal(part[step], take(whole[step], np.array([2, 3]))) for step in whole)


def selections_are_ordered_and_without_repetition(task: Task, config: TaskConfig) -> None:
    everything = task.test_selection()
    assert everything.tolist() == list(range(len(everything)))
    assert len(everything) > 0
    some = task.test_selection(1, seed=3)
    assert (np.diff(some) > 0).all()
    assert set(some) <= set(everything)
    assert np.array_equal(some, task.test_selection(1, seed=3))
    assert (len(some) < len(everything)) == config.votes


def scores_do_not_depend_on_order_or_processes(task: Task) -> None:
    """Three processes in odd portions, merged in any order, give the result of one pass to the bit."""
    rows = task.test_selection()
    alone = task.scorer(rows)
    batch = task.test_examples(rows)
    alone.update(rows, batch.labels, half_right(batch))
    parts = [task.scorer(rows) for _ in range(3)]
    for rank, scorer in enumerate(parts):
        mine = rows[rank::3]
        for portion in (mine[4:], mine[:4]):
            batch = task.test_examples(portion)
            scorer.update(portion, batch.labels, half_right(batch))
    merged = parts[1]
    for other in (parts[2], parts[0]):
        merged.merge(pickle.loads(pickle.dumps(other.collected())))
    assert merged.result() == alone.result()
    assert merged.summarize(merged.result()) == alone.summarize(alone.result())
    assert 0 < alone.result()["exact_accuracy"] < 1


def right_answers_score_full_marks(task: Task) -> None:
    rows = task.test_selection()
    scorer = task.scorer(rows)
    assert scorer.scorable
    batch = task.test_examples(rows)
    scorer.update(rows, batch.labels, Answers(batch.labels, torch.ones(len(rows)), torch.zeros(len(rows))))
    result = scorer.result()
    assert (result["exact_accuracy"], result["token_accuracy"], result["lm_loss"]) == (1, 1, 0)
    assert "exact accuracy 100.00 %" in scorer.summarize(result)


def every_identifier_has_a_name(task: Task) -> None:
    names = task.describe(np.unique(task.examples(np.arange(50)).identifiers.numpy()))
    assert all(names)
    assert len(names) == len(set(names))


def configuration_survives_json(config: TaskConfig) -> None:
    run = TrainConfig(task=config)
    back = TrainConfig.from_json(run.to_json())
    assert back == run
    assert type(back.task) is TASKS[kind_of(config)]


def only_promised_options_can_be_overridden(config: TaskConfig) -> None:
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    allowed = set(config.changeable)
    assert allowed <= names
    assert set(config.file_options) <= names
    assert config.override({}) == config
    for name in names - allowed:
        with pytest.raises(ValueError, match=name.replace("_", "-")):
            config.override({name: getattr(config, name)})
