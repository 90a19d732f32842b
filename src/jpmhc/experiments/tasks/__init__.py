"""The tasks that models learn, and the tasks of the recursive model by name, as on the command line and in saved runs.

All tasks have the interface in `task.py`, except the language task, which only the language decoder learns.
"""

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.tasks.task import TaskConfig

TASKS: dict[str, type[TaskConfig]] = {"sudoku": SudokuConfig, "arc": ArcConfig}


def kind_of(config: TaskConfig) -> str:
    """Return the name in `TASKS` of the task that a configuration describes."""
    return next(kind for kind, cls in TASKS.items() if isinstance(config, cls))
