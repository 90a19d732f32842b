"""The evaluation loop: every row asked once, shards put together, the model's answers read rightly."""

from typing import Any

import numpy as np
import pytest
import torch

from jpmhc.experiments.evaluation.checkpoints import RowNoise, fill_scorer, greedy_answers
from jpmhc.experiments.evaluation.scores import Answers
from jpmhc.experiments.models.recursive import Prediction, RecursiveConfig, RecursiveModel
from jpmhc.experiments.tasks.sudoku import Sudoku, SudokuConfig
from jpmhc.experiments.tasks.task import Batch
from jpmhc.experiments.training.processes import World


@pytest.fixture(scope="module")
def task() -> Sudoku:
    return SudokuConfig(puzzles=4, test_puzzles=50).build()


def some_wrong(batch: Batch) -> Answers:
    """Right exactly where the first digit is even, whatever the batch."""
    tokens = batch.labels.clone()
    tokens[tokens[:, 0] % 2 == 1, 3] = 0
    return Answers(tokens, torch.ones(len(batch)), tokens[:, 0].double())


@pytest.mark.parametrize("batch_size", [1, 7, 50, 1000])
def test_every_row_is_asked_once(task: Sudoku, batch_size: int) -> None:
    asked: list[int] = []
    progress: list[tuple[int, int]] = []

    def answer(batch: Batch) -> Answers:
        asked.append(len(batch))
        return some_wrong(batch)

    scorer = task.scorer(task.test_selection())
    fill_scorer(
        scorer, task, answer, batch_size=batch_size, progress=lambda done, total: progress.append((done, total))
    )
    result = scorer.result()
    assert sum(asked) == 50
    assert max(asked) <= batch_size
    assert progress[-1] == (50, 50)
    first = task.test_examples(np.arange(50)).labels[:, 0]
    assert result["exact_accuracy"] == pytest.approx(float((first % 2 == 0).double().mean()))
    assert result["lm_loss"] == pytest.approx(float(first.double().mean()))


def test_shards_give_the_result_of_one_process(task: Sudoku) -> None:
    alone = task.scorer(task.test_selection())
    fill_scorer(alone, task, some_wrong, batch_size=50)
    records: list[dict[str, Any]] = []

    class Gathering(World):
        def collect(self, value: dict[str, Any]) -> list[dict[str, Any]]:  # type: ignore[override]
            records.append(value)
            return records

    for rank in range(3):
        scorer = task.scorer(task.test_selection())
        fill_scorer(scorer, task, some_wrong, batch_size=4, world=Gathering(rank, 3, torch.device("cpu")))
    assert len(records[0]["rows"]) == 17
    assert scorer.result() == alone.result()  # the last process has gathered all


def test_the_rows_of_one_process_of_two_are_no_result(task: Sudoku) -> None:
    scorer = task.scorer(task.test_selection())
    for part in (scorer.rows[::2][:13], scorer.rows[::2][13:]):
        batch = task.test_examples(part)
        scorer.update(part, batch.labels, some_wrong(batch))
    with pytest.raises(ValueError, match="25 of 50 test rows have no answer yet"):
        scorer.result()


def test_answers_are_what_the_model_predicts(task: Sudoku) -> None:
    torch.manual_seed(0)
    config = RecursiveConfig(
        dim=16, heads=2, inner_multiple=16, puzzle_slots=1, h_cycles=1, l_cycles=1, halt_max_steps=2
    )
    model = RecursiveModel(config, task.vocabulary, task.length, task.identifier_count).eval()
    batch = task.test_examples(np.arange(5))
    answers = greedy_answers(model)(batch)
    prediction: Prediction = model.predict(batch.inputs, batch.identifiers)
    assert torch.equal(answers.tokens, prediction.logits.argmax(-1))
    assert answers.confidence.tolist() == pytest.approx((1 / (1 + np.exp(-prediction.q_halt.numpy()))).tolist())
    # Stablemax cross-entropy from its definition, s(x) = x + 1 for x >= 0 and 1 / (1 - x) below.
    x = prediction.logits.double().numpy()
    s = np.where(x >= 0, x + 1, 1 / (1 - np.minimum(x, 0)))
    chance = np.take_along_axis(s / s.sum(-1, keepdims=True), batch.labels.numpy()[..., None], -1)[..., 0]
    assert answers.loss.tolist() == pytest.approx((-np.log(chance)).mean(-1).tolist())


def small_model(task: Sudoku) -> RecursiveModel:
    torch.manual_seed(0)
    config = RecursiveConfig(dim=16, heads=2, inner_multiple=16, puzzle_slots=1, halt_max_steps=2)
    model = RecursiveModel(config, task.vocabulary, task.length, task.identifier_count).eval()
    torch.nn.init.normal_(model.core.q_head.weight)
    return model


def test_the_halting_head_chooses_among_tries(task: Sudoku) -> None:
    model, batch = small_model(task), task.test_examples(np.arange(12))
    alone = greedy_answers(model)(batch)
    several = greedy_answers(model, noise=0.5, tries=4)(batch)
    tries = [model.predict(batch.inputs, batch.identifiers)]
    tries += [model.predict(batch.inputs, batch.identifiers, RowNoise(batch, k, 0.5)) for k in (1, 2, 3)]
    trust = torch.stack([one.q_halt for one in tries])
    assert (trust.argmax(0) > 0).any()
    assert torch.equal(several.confidence, trust.max(0).values.double().sigmoid())
    for row, chosen in enumerate(trust.argmax(0)):
        assert torch.equal(several.tokens[row], tries[chosen].logits[row].argmax(-1))
    assert (several.confidence >= alone.confidence).all()


def test_noise_does_not_depend_on_the_batch(task: Sudoku) -> None:
    model = small_model(task)
    answer = greedy_answers(model, noise=0.5, tries=3)
    whole = answer(task.test_examples(np.arange(6)))
    parts = [answer(task.test_examples(np.arange(6)[part])) for part in (slice(0, 2), slice(2, 6))]
    assert torch.allclose(whole.confidence, torch.cat([part.confidence for part in parts]), atol=1e-6)


def test_noise_is_normal_with_the_given_scale(task: Sudoku) -> None:
    batch = task.test_examples(np.arange(40))
    noise = RowNoise(batch, 1, 0.3)
    first, second = (noise(torch.zeros(40, 50, 20)) for _ in range(2))
    assert float(first.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float((first * second).mean())) < 0.002  # fresh noise at every step
