"""Answers of a model to test rows, computed on one or several processes."""

from collections.abc import Callable

import torch

from jpmhc.experiments.evaluation.scores import Answers, RowScorer
from jpmhc.experiments.models.losses import row_cross_entropy
from jpmhc.experiments.models.recursive import RecursiveModel
from jpmhc.experiments.tasks.task import Batch, Task
from jpmhc.experiments.training.processes import ALONE, World


def fill_scorer(
    scorer: RowScorer,
    task: Task,
    answer: Callable[[Batch], Answers],
    *,
    batch_size: int,
    world: World = ALONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill a scorer with a model's answers to its test rows.

    Memory is bounded by one batch and the scorer's few bytes per row. Afterwards every process has the complete scorer.
    Its content does not depend on the number of processes, unless the answers do.

    Args:
        scorer: An empty scorer, `task.scorer(task.test_selection(...))`, for the same rows on every process.
        task: The task with the test rows.
        answer: A function that answers a batch, such as `greedy_answers(model)`.
        batch_size: Rows per call of `answer`; the last batch may be smaller.
        world: The processes, which divide the rows among themselves.
        progress: Called with the number of finished rows and the number of all rows of this process, first with 0.
    """
    mine = scorer.rows[world.rank :: world.size]
    progress(0, len(mine))
    for start in range(0, len(mine), batch_size):
        part = mine[start : start + batch_size]
        batch = task.test_examples(part)
        scorer.update(part, batch.labels, answer(batch))
        progress(start + len(part), len(mine))
    for collected in world.collect(scorer.collected()):
        scorer.merge(collected)


def greedy_answers(model: RecursiveModel) -> Callable[[Batch], Answers]:
    """Return a function that answers batches with a model's most likely tokens after all its supervision steps.

    The answers are on the CPU.
    """
    device = next(model.parameters()).device

    def answer(batch: Batch) -> Answers:
        batch = batch.to(device)
        prediction = model.predict(batch.inputs, batch.identifiers)
        return Answers(
            tokens=prediction.logits.argmax(-1).cpu(),
            confidence=torch.sigmoid(prediction.q_halt.double()).cpu(),
            loss=row_cross_entropy(prediction.logits, batch.labels).cpu(),
        )

    return answer
