"""The contract between a comparison and what it trains.

An experiment trains one model with one mixer and one seed and returns what came of it, as a dictionary that goes to
JSON as it is:

- `mixer`, `seed`, `parameters`, `seconds`, `environment` (device, versions, commit);
- `diverged`: the step after which the loss was no finite number, or null;
- `final`: numbers at the end of the run, by name: the validation `loss`, and what the curves below end with. Empty if
  the run diverged;
- `curves`: lists along training, each group with its own `step`: `train` (`loss`, `gradient_norm`, averaged over the
  steps since the entry before), `validation` (`loss`, for puzzles also `exact_accuracy` and `token_accuracy`) and
  `mixing` (the product of all H_res that a token passes: `smallest`, `median`, `largest` singular value, the share
  `collapsed` of them below 0.1, and the mean `distance_to_identity` of a single H_res; without entries for a plain
  model).

With the same seed every mixer gets the same data in the same order, the same number of steps, the same learning rates
and the same initial weights outside its connections.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from jpmhc.experiments.models.connections import ConnectionConfig, is_for_connections

PLAIN = "plain"  # the word for plain residual connections, beside the mixers' names

Config = TypeVar("Config", bound=ConnectionConfig)
Run = dict[str, Any]
Show = Callable[[str, int, int], None]  # name of the run, steps done, steps in all


class Experiment(ABC):
    """What a comparison trains: a frozen dataclass of settings that all its runs share."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything that decides the outcome, but mixer and seed, ready for JSON."""

    @abstractmethod
    def check(self, mixers: Sequence[str]) -> None:
        """Refuse mixers that these settings cannot train, and settings that do not go together."""

    @abstractmethod
    def train(
        self, mixer: str, mixers: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, show: Show
    ) -> Iterator[Run]:
        """Train one mixer with several seeds, one after the other, and yield each run when it has ended.

        Args:
            mixer: The mixer, or `PLAIN`.
            mixers: All mixers of the comparison.
            seeds: The seeds.
            folder: Place for files of the runs. A run was written when the next one is asked for, so that its files
                may be removed then.
            device: Where to train.
            show: Called now and then with how far a run is.
        """


def configure_mixer(config: Config, mixer: str) -> Config:
    """Return a model's configuration with a mixer; `PLAIN` takes away streams and all options of connections."""
    if mixer != PLAIN:
        return dataclasses.replace(config, mixer=mixer)
    plain: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(config) if is_for_connections(f.name)}
    return dataclasses.replace(config, mixer=ConnectionConfig.mixer, streams=ConnectionConfig.streams, **plain)
