"""Asking a model about test rows and scoring its answers, on one process or on many."""

from collections.abc import Callable
from typing import Any

import torch

from jpmhc.experiments.models.losses import row_cross_entropy
from jpmhc.experiments.models.recursive import RecursiveModel
from jpmhc.experiments.tasks.batch import Answers, Batch
from jpmhc.experiments.tasks.task import Scorer, Task


def fill_scorer(
    scorer: Scorer,
    task: Task,
    answer: Callable[[Batch], Answers],
    *,
    batch_size: int,
    rank: int = 0,
    processes: int = 1,
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda mine: [mine],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a scorer with a model's answers to its test rows.

    Memory is bounded by one batch and the scorer's few bytes for each row. The scorer is complete on every process
    afterwards, and equal to the bit however many processes there were, provided that `answer` is.

    Args:
        scorer: an empty scorer, `task.scorer(task.test_selection(...))`; for the same rows on every process.
        task: gives the rows.
        answer: the model, `greedy_answers(model)`.
        batch_size: rows that the model is asked about at a time; the last batch may be smaller.
        rank: number of this process; it asks about every `processes`-th row.
        processes: how many processes there are.
        gather: gives every process the list of all processes' records, as `torch.distributed.all_gather_object` does.
        progress: called with (rows done, rows to do) of this process.
    """
    mine = scorer.rows[rank::processes]
    for start in range(0, len(mine), batch_size):
        part = mine[start : start + batch_size]
        batch = task.test_examples(part)
        scorer.update(part, batch, answer(batch))
        if progress is not None:
            progress(start + len(part), len(mine))
    for collected in gather(scorer.collected()):
        scorer.merge(collected)


def greedy_answers(model: RecursiveModel) -> Callable[[Batch], Answers]:
    """Return a function that answers batches with a model's most likely tokens after all its supervision steps.

    The answers come back on the CPU, whatever device the model is on.
    """
    device = next(model.parameters()).device

    def answer(batch: Batch) -> Answers:
        here = batch.to(device)
        prediction = model.predict(here.inputs, here.identifiers)
        return Answers(
            tokens=prediction.logits.argmax(-1).cpu(),
            confidence=torch.sigmoid(prediction.q_halt.double()).cpu(),
            loss=row_cross_entropy(prediction.logits, here.labels).cpu(),
        )

    return answer
