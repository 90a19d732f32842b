"""Answering the tests of a run's task by vote, and writing the answers in the form in which they are handed in."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jpmhc.experiments.models.device import refuse_device
from jpmhc.experiments.tasks.task import Answered, VotingTask
from jpmhc.experiments.training.checkpoint import locate_checkpoint
from jpmhc.experiments.training.evaluation import Choices, answer_rows, rebuild_task, require_votes
from jpmhc.experiments.training.processes import join_processes
from jpmhc.experiments.training.progress import Display
from jpmhc.experiments.training.result_files import name_result_file, require_writable, write_result

# Ending of the file beside a submission that also holds the votes.
VOTES = ".votes.json"


@dataclass(frozen=True)
class PredictConfig(Choices):
    """A prediction."""

    run: Path | None = None
    """Folder of a run, whose newest checkpoint is taken, or of a checkpoint."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks to answer; empty: all that the run tests."""
    out: Path | None = None
    """File for the answers, in the form that ARC Prize takes; None: in the run's folder, named after the step and the
    choices above."""


def predict_answers(config: PredictConfig) -> tuple[list[Answered], Path]:
    """Answer tests by vote; the first process writes the submission and, in a run's folder, the votes.

    Returns:
        The answers, and the file that the submission is in.
    """
    if config.run is None:
        raise ValueError("name the folder of a run or of a checkpoint to predict with")
    checkpoint = locate_checkpoint(config.run)
    require_votes(checkpoint, "no answers to hand in")
    out = config.out or name_result_file(checkpoint, "submissions", config.words(), config.tasks)
    require_writable(out)
    with join_processes(config.device) as world, Display(world.rank == 0) as display:
        refuse_device(checkpoint.config.model, world.device)
        task = cast(VotingTask, rebuild_task(checkpoint, config, display))
        rows = task.test_selection(config.variants, config.sample_seed)
        scorer = task.vote_scorer(task.rows_of_puzzles(rows, config.tasks) if config.tasks else rows)
        answer_rows(scorer, task, checkpoint, config, world, display)
        answered = scorer.answered()
        if world.rank == 0:
            write_result(out, json.dumps(task.submission(answered)) + "\n")
            if config.out is None:
                write_result(out.with_suffix(VOTES), json.dumps(list_votes(answered)) + "\n")
    return answered, out


def list_votes(answered: list[Answered]) -> dict[str, Any]:
    """Return tests, their candidates and the votes for them, ready for JSON; reports show them."""

    def tests() -> Iterator[dict[str, Any]]:
        for one in answered:
            candidates = [{"grid": c.grid.tolist(), "votes": c.votes, "of": c.of} for c in one.candidates]
            truth = None if one.output is None else one.output.tolist()
            yield {
                "task": one.puzzle,
                "test": one.test,
                "input": one.input.tolist(),
                "output": truth,
                "candidates": candidates,
            }

    return {"format": "jpmhc votes 1", "tests": list(tests())}
