"""Answers to ARC tests in the form that ARC Prize takes."""

from jpmhc.experiments.tasks.task import Answered


def submission(answered: list[Answered]) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Write two attempts for every test of a task.

    Where only one grid was voted for it is both attempts; where none was, an attempt is one black cell.
    """
    found: dict[str, list[dict[str, list[list[int]]]]] = {}
    for answer in answered:
        grids = [candidate.grid.tolist() for candidate in answer.candidates] or [[[0]]]
        attempts = {"attempt_1": grids[0], "attempt_2": grids[min(1, len(grids) - 1)]}
        found.setdefault(answer.puzzle, []).append(attempts)
    return found
