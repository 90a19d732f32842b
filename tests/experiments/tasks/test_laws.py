"""Every task of the registry against the laws of tasks."""

from collections.abc import Callable

import pytest

from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.task import Task, TaskConfig
from tests.experiments.tasks import laws

# Options that make a task small; a task that is not named here is tried as it is.
SMALL: dict[str, dict] = {
    "sudoku": {"puzzles": 20, "test_puzzles": 12},
    "arc": {"tasks": ("25d8a9c8", "25ff71a9", "a85d4709"), "test_on": "training", "augmentations": 5, "side": 4},
}


@pytest.fixture(scope="module", params=list(TASKS))
def config(request: pytest.FixtureRequest) -> TaskConfig:
    return TASKS[request.param](**SMALL.get(request.param, {}))


@pytest.fixture(scope="module")
def task(config: TaskConfig) -> Task:
    return config.build()


@pytest.mark.parametrize(
    "law",
    [
        laws.rows_have_the_promised_shape,
        laws.a_resumed_run_gets_the_batches_it_would_have_got,
        laws.scores_do_not_depend_on_order_or_processes,
        laws.right_answers_score_full_marks,
        laws.every_identifier_has_a_name,
    ],
)
def test_laws_of_tasks(task: Task, law: Callable[[Task], None]) -> None:
    law(task)


@pytest.mark.parametrize(
    "law",
    [
        laws.rows_are_a_function_of_configuration_and_position,
        laws.another_seed_is_another_task,
        laws.configuration_survives_json,
        laws.only_promised_options_can_be_overridden,
    ],
)
def test_laws_of_configurations(config: TaskConfig, law: Callable[[TaskConfig], None]) -> None:
    law(config)


def test_selection(task: Task, config: TaskConfig) -> None:
    laws.selections_are_ordered_and_without_repetition(task, config)
