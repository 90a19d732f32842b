"""How the configuration of a resumed run differs from the one its checkpoint was written under."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

from jpmhc.experiments.training.config import TrainConfig

_WHERE = {"out", "resume"}  # say where a run lies, not what it does
_BINDING = ("task.", "model.", "batch", "seed")  # a checkpoint fits these alone


@dataclass(frozen=True)
class Change:
    """One setting that differs, with its values as in JSON."""

    name: str
    """Field of the configuration, with a dot before a field of the task or of the model."""
    there: Any
    """Value in the checkpoint."""
    here: Any
    """Value now."""
    refused: bool
    """Whether a checkpoint cannot be resumed with it."""

    def __str__(self) -> str:
        """Write the change as an option: its value now, and the one that it replaces."""
        there = _spell(self.name, self.there)
        return f"{self.option} instead of {there.removeprefix(f'{_option(self.name)} ')}"

    @property
    def option(self) -> str:
        """The value now as it is typed after `jpmhc train`."""
        return _spell(self.name, self.here)


def list_changes(there: TrainConfig, here: TrainConfig) -> list[Change]:
    """List all settings that differ, in the order of the fields.

    Args:
        there: The configuration in the checkpoint.
        here: The configuration of the run that resumes it.
    """
    old, new = flatten_fields(json.loads(there.to_json())), flatten_fields(json.loads(here.to_json()))
    places = {f"task.{name}" for name in here.task.places}  # files may move: the fingerprint tells what they hold
    return [
        Change(name, old.get(name), new.get(name), name.startswith(_BINDING) and name not in places)
        for name in old | new
        if name not in _WHERE and old.get(name) != new.get(name)
    ]


def flatten_fields(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested fields as one level, with a dot between the names of a field and of the field in it."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= flatten_fields(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _option(name: str) -> str:
    return f"--{name.removeprefix('model.').replace('_', '-')}"


def _spell(name: str, value: Any) -> str:
    option = _option(name)
    if isinstance(value, bool):
        path, dot, last = option.rpartition(".")
        return option if value else f"{path}{dot}no-{last}" if dot else option.replace("--", "--no-", 1)
    words = " ".join(map(str, value)) or "(none)" if isinstance(value, list) else shlex.quote(str(value))
    return f"{option} {words}"
