"""The command `jpmhc train`."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from jpmhc.cli.output import is_first_process
from jpmhc.trm.training import loop
from jpmhc.trm.training.config import PRESETS, TrainConfig


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc train` and run it with the defaults of the preset they name."""
    tyro.cli(train_with_defaults(preset_in(words)), prog="jpmhc train", args=words)


def preset_in(words: Sequence[str]) -> TrainConfig:
    """Return the preset that the words name, which decides the defaults of all other options."""
    for word, following in zip(words, [*words[1:], ""]):
        name = following if word == "--preset" else word.removeprefix("--preset=")
        if word.startswith("--preset") and name in PRESETS:
            return PRESETS[name]
    return PRESETS["laptop"]


def train_with_defaults(default: TrainConfig) -> Callable[[TrainConfig], None]:
    """Return the command's function with the defaults of one preset."""

    def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")] = default) -> None:
        """Train the recursive model on Sudoku or ARC.

        Example: jpmhc train --preset laptop --mixer cayley --streams 4 --out out/cayley

        Every default below is that of the preset named on the command line (laptop, if none is). Several processes:
        torchrun --nproc-per-node 8 -m jpmhc train --preset paper
        """
        outcome = loop.train(config)
        state = "stopped by a signal" if outcome.stopped else "finished"
        if is_first_process():
            log = config.out / "log.jsonl"
            print(f"{state} after {outcome.step} steps; checkpoint: {outcome.checkpoint}; log: {log}")
        if outcome.stopped:
            sys.exit(128 + outcome.stopped)  # as a shell reports a process that a signal ended: 130 for Ctrl-C

    return train
