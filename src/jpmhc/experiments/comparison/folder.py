"""The folder of a comparison: its settings, a file for every finished run, and the result.

- `settings.json`: what was asked for;
- `runs/MIXER-seed-N.json`: a finished run (`jpmhc.experiments.comparison.experiment` says what is in it);
- `training/`: files of runs that go on;
- `comparison.json`: everything in one file, see `comparison.compare`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpmhc.experiments.comparison.experiment import Run
from jpmhc.experiments.training.changes import flatten_fields
from jpmhc.files import write_file


def open_folder(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a new comparison; refuse a folder that holds something else.

    Args:
        out: The folder, made if need be.
        settings: The task and everything else that all runs of the folder must share.
    """
    path = out / "settings.json"
    settings = json.loads(json.dumps(settings, default=str))
    if path.exists():
        refuse_other_settings(out, read_json(path, "name another folder"), settings)
        return
    if out.exists() and (not out.is_dir() or any(not name.name.startswith(".") for name in out.iterdir())):
        raise ValueError(f"{out} holds something that is no comparison: name another folder")
    (out / "runs").mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def refuse_other_settings(out: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a folder whose runs were made with other settings."""
    old, new = flatten_fields(there), flatten_fields(here)
    differing = [name for name in old | new if old.get(name) != new.get(name)]
    if differing:
        shown = "; ".join(
            f"{name.split('.')[-1]} ({old.get(name)} there, {new.get(name)} here)" for name in differing[:4]
        )
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise ValueError(f"{out} holds a comparison with other settings: {shown}{more}; name another folder")


def run_path(out: Path, mixer: str, seed: int) -> Path:
    """Return the file of one run."""
    return out / "runs" / f"{mixer}-seed-{seed}.json"


def read_runs(out: Path, mixers: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[Run]:
    """Read those runs that have ended, mixer by mixer."""
    for mixer in mixers:
        for seed in seeds:
            if (path := run_path(out, mixer, seed)).exists():
                advice = "remove it, and its run is done again"
                run = read_json(path, advice)
                if (run.get("mixer"), run.get("seed")) != (mixer, seed):
                    raise ValueError(f"{path} does not hold the run of {mixer} with seed {seed}: {advice}")
                yield run


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Read a file of a comparison; where it is damaged, the advice says what to do."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"{path} is damaged ({fault}): {advice}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no JSON object): {advice}")
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file whole or not at all; numbers that are not finite become null."""
    write_file(path, json.dumps(_replace_non_finite(value)))


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
