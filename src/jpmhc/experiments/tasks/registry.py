"""The tasks of the recursive model by the name that the command line and a saved configuration give them.

The language task beside them is not here: a decoder of its own learns it, in comparisons alone.
"""

from jpmhc.experiments.tasks.arc import ArcConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.tasks.task import TaskConfig

TASKS: dict[str, type[TaskConfig]] = {"sudoku": SudokuConfig, "arc": ArcConfig}


def kind_of(config: TaskConfig) -> str:
    """Return the name of a configuration's task."""
    return next(kind for kind, cls in TASKS.items() if isinstance(config, cls))
