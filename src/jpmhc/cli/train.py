"""The command `jpmhc train`."""

import dataclasses
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import torch
import tyro

from jpmhc.cli.command import parse_and_call
from jpmhc.cli.forms import make_option_form, read_option_form
from jpmhc.cli.output import is_first_process
from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.tasks.registry import TASKS, kind_of
from jpmhc.experiments.training import loop
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.presets import PRESETS


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc train` and run it with the defaults of the preset and the task they name."""
    parse_and_call(train_with_defaults(defaults_in(words)), "jpmhc train", words)


def defaults_in(words: Sequence[str]) -> TrainConfig:
    """Return the preset that the words name, on the task that they name: the defaults of all other options."""
    default = PRESETS[value_of("--preset", words, PRESETS) or "laptop"]
    kind = value_of("--task.kind", words, TASKS)
    if default.compile and (value_of("--device", words, ("cpu",)) or not torch.cuda.is_available()):
        default = dataclasses.replace(default, compile=False)  # on a CPU it takes minutes and gains little
    return default if kind in (None, kind_of(default.task)) else default.with_task(str(kind))


def value_of(option: str, words: Sequence[str], known: Collection[str]) -> str | None:
    """Find the known value that follows an option; tyro refuses unknown ones."""
    for word, following in zip(words, [*words[1:], ""]):
        value = following if word == option else word.removeprefix(f"{option}=")
        if word.startswith(option) and value in known:
            return value
    return None


def train_with_defaults(default: TrainConfig) -> Callable[[Any], None]:
    """Return the command's function with the given defaults."""
    known: Any = Literal[tuple(TASKS)]
    kinds = Annotated[known, tyro.conf.arg(help="Which task; it decides the other options of this group.")]
    task = make_option_form(default.task, kind=(kinds, kind_of(default.task)))
    model = Annotated[RecursiveConfig, tyro.conf.arg(name="")]
    form = make_option_form(default, task=(type(task), task), model=(model, default.model))

    def train(config: Annotated[type(form), tyro.conf.arg(name="")] = form) -> None:  # type: ignore[valid-type]
        """Train the recursive model on Sudoku or ARC.

        Example: jpmhc train --preset laptop --mixer cayley --streams 4 --out out/cayley
        Example: jpmhc train --preset arc-small --task.kind sudoku --task.size 9

        Every default below is that of the preset named on the command line (laptop, if none is); --task.kind puts
        another task in the place of the preset's, and the options --task.… are then that task's. On a CPU nothing is
        compiled unless --compile asks for it. Several processes:
        torchrun --nproc-per-node 8 -m jpmhc train --preset paper
        """
        run_training(read_option_form(config, TrainConfig, task=read_option_form(config.task, TASKS[config.task.kind])))

    return train


def run_training(config: TrainConfig) -> None:
    """Train and print how the run ended; a run that a signal ended exits as a shell reports it."""
    outcome = loop.train(config)
    end = "stopped by a signal" if outcome.stopped else "finished"
    if outcome.checkpoint is None and is_first_process():
        print(f"{end} before the first step: nothing was trained, and nothing was saved")
    elif is_first_process():
        log = config.out / "log.jsonl"
        print(f"{end} after {outcome.step} steps; checkpoint: {outcome.checkpoint}; log: {log}")
    if outcome.stopped:
        sys.exit(128 + outcome.stopped)  # 130 for Ctrl-C
