"""The tasks of the recursive model by name, as on the command line and in saved configurations.

The language task is not among them, because only the language decoder learns it, in comparisons.
"""

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.tasks.task import TaskConfig

TASKS: dict[str, type[TaskConfig]] = {"sudoku": SudokuConfig, "arc": ArcConfig}


def kind_of(config: TaskConfig) -> str:
    """Return the name of the task that a configuration is for."""
    return next(kind for kind, cls in TASKS.items() if isinstance(config, cls))
