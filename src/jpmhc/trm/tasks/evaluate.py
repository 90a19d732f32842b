"""Ask a model about test rows and score what it says, on one process or sharded over many."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from jpmhc import checks
from jpmhc.trm.model.losses import row_cross_entropy
from jpmhc.trm.model.recursive import RecursiveModel
from jpmhc.trm.tasks.batch import Answers, Batch, Scorer, Task

Scored = TypeVar("Scored", bound=Scorer)


def evaluate(
    task: Task,
    scorer: Scored,
    answer: Callable[[Batch], Answers],
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scored:
    """Fill a scorer with a model's answers to test rows.

    Memory is bounded by one batch and the scorer's few bytes a row.

    Args:
        task: gives the rows.
        scorer: an empty scorer, `task.scorer(task.test_selection(...))`; for the same rows on every rank.
        answer: the model, `answers_of(model)`.
        batch_size: rows asked about at a time; the last batch may be smaller.
        rank: this process among `world`; it asks about every `world`-th row.
        world: number of processes.
        gather: gives every rank the list of all ranks' states, as `torch.distributed.all_gather_object` does.
        progress: called with (rows done, rows to do) of this rank.

    Returns:
        The scorer, complete on every rank; it gives the same numbers to the bit however many ranks there were,
        provided that `answer` does.
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one row, not {batch_size}.")
    if world > 1 and gather is None:
        raise ValueError("an evaluation on several ranks needs a way to gather their results.")
    mine = scorer.rows[rank::world]
    for start in range(0, len(mine), batch_size):
        part = mine[start : start + batch_size]
        batch = task.test_examples(part)
        scorer.update(part, batch, answer(batch))
        if progress is not None:
            progress(start + len(part), len(mine))
    if gather is not None:
        for state in gather(scorer.state()):
            scorer.merge(state)
    return scorer


def answers_of(model: RecursiveModel) -> Callable[[Batch], Answers]:
    """The greedy answers of a model after all its supervision steps; they stay on the CPU, whatever the device."""
    device = next(model.parameters()).device

    def answer(batch: Batch) -> Answers:
        here = batch.to(device)
        with checks.unchecked():  # whoever scores the answers looks at them
            prediction = model.predict(here.inputs, here.identifiers)
        return Answers(
            tokens=prediction.logits.argmax(-1).cpu(),
            confidence=torch.sigmoid(prediction.q_halt.double()).cpu(),
            loss=row_cross_entropy(prediction.logits, here.labels).cpu(),
        )

    return answer
