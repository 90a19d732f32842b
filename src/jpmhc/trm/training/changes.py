"""How the configuration of a resumed run differs from the one its checkpoint was written under."""

import json
from dataclasses import dataclass
from typing import Any

from jpmhc.trm.training.config import TrainConfig

_WHERE = {"out", "resume"}  # say where a run lies, not what it does
_BINDING = ("task.", "model.", "batch", "seed")  # a checkpoint fits these alone
_PLACES = {"task.extra_tasks", "task.evaluation_tasks"}  # files may move: the task's fingerprint tells what they hold


@dataclass(frozen=True)
class Change:
    """One setting, with its values as in JSON."""

    name: str
    """Field of the configuration, with a dot before a field of the task or of the model."""
    there: Any
    """In the checkpoint."""
    here: Any
    """Now."""

    @property
    def refused(self) -> bool:
        """Whether a checkpoint cannot be gone on from with it."""
        return self.name.startswith(_BINDING) and self.name not in _PLACES

    def __str__(self) -> str:
        """As options: what is said now, and what it is said instead of."""
        option = self.name.removeprefix("model.").replace("_", "-")
        return f"{_spelt(option, self.here)} instead of {_spelt(option, self.there).removeprefix(f'--{option} ')}"


def changes(there: TrainConfig, here: TrainConfig) -> list[Change]:
    """All settings that differ, in the order of the fields."""
    old, new = _flat(json.loads(there.to_json())), _flat(json.loads(here.to_json()))
    names = [name for name in old | new if name not in _WHERE]
    return [Change(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _spelt(option: str, value: Any) -> str:
    if isinstance(value, bool):
        path, _, name = option.rpartition(".")
        return f"--{path}{'.' if path else ''}{'' if value else 'no-'}{name}"
    words = " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)
    return f"--{option} {words}"
