"""The folder of a comparison: its settings, a file for every finished run, and the result.

- `settings.json`: the settings that all runs share;
- `runs/ARM-lr-RATE-seed-N.json`: a finished run (`experiment.Run`);
- `training/`: checkpoints of unfinished runs;
- `comparison.json`: settings, runs and statistics (`comparison.Result`); another comparison can copy its runs.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch.utils._pytree import tree_map

from jpmhc import files
from jpmhc.experiments.comparison.experiment import Job, Run, sort_options
from jpmhc.experiments.training.config import flatten_fields


def open_folder(out: Path, settings: dict[str, object]) -> None:
    """Make a comparison's folder, and write the settings that all runs share; or check an existing folder.

    Raises a ValueError if the existing folder has other settings, or has files but no settings.
    """
    path = out / "settings.json"
    settings = json.loads(json.dumps(tree_map(_round, settings), default=str))  # as it is when it is read again
    if path.exists():
        refuse_other_settings(out, read_settings(out), settings)
    elif out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise ValueError(f"{out} holds something that is no comparison: name another folder")
    (out / "runs").mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_rounded(path, settings)


def read_settings(out: Path) -> dict[str, object]:
    """Read the settings that all runs of a comparison's folder share."""
    return _read_json(out / "settings.json", "name another folder")


def refuse_other_settings(path: Path, stored: dict[str, object], wanted: dict[str, object]) -> None:
    """Raise a ValueError if the settings `stored` at `path` differ from the settings `wanted`."""
    old, new = flatten_fields(stored), flatten_fields(wanted)
    differing = [name for name in old | new if old.get(name) != new.get(name)]
    if differing:
        shown = "; ".join(
            f"{name.split('.')[-1]} ({old.get(name)} there, {new.get(name)} here)" for name in differing[:4]
        )
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise ValueError(f"{path} holds a comparison with other settings: {shown}{more}; name another folder")


def take_over_runs(out: Path, path: Path) -> None:
    """Copy runs from another comparison.json, `path`, to the folder `out`, except runs that `out` has already."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: --runs takes the comparison.json of another folder")
    result = _read_json(path, "leave it out")
    settings, runs = result.get("settings"), result.get("runs")
    if not isinstance(settings, dict) or not isinstance(runs, list):
        raise ValueError(f"{path} is no comparison.json: it has no settings and runs")
    refuse_other_settings(path, settings, read_settings(out))
    for run in runs:
        own = run_path(out, job_of(run))
        if not own.exists():
            write_rounded(own, run)


def job_of(run: Run) -> Job:
    """Return a run's arm, learning rate and seed."""
    return Job(run["arm"], run["learning_rate"], run["seed"])


def loss_of(run: Run) -> float:
    """Return the final loss of a run; infinite if it diverged."""
    return run["final"].get("loss", math.inf)


def run_path(out: Path, job: Job) -> Path:
    """Return the path of the file for a finished run."""
    return out / "runs" / f"{job.file_name}.json"


def read_runs(out: Path) -> list[Run]:
    """Read all finished runs, with each arm's options in alphabetical order (see `sort_options`)."""
    runs = [read_run(path) for path in sorted((out / "runs").glob("*.json"))]
    for run in runs:
        run["arm"] = sort_options(run["arm"])
    return list({job_of(run): run for run in runs}.values())


def read_run(path: Path) -> Run:
    """Read a finished run from its file."""
    advice = "remove it, and its run is done again"
    run = cast(Run, _read_json(path, advice))
    try:
        named = job_of(run).file_name
    except KeyError:
        named = None
    if named != path.stem:
        raise ValueError(f"{path} holds another run than its name says: {advice}")
    return run


def _read_json(path: Path, advice: str) -> dict[str, object]:
    """Read a JSON object from a file; the error for a damaged file ends with `advice`, a clause such as "remove it"."""
    try:
        return files.read_json_object(path)
    except ValueError as fault:
        raise ValueError(f"{fault}: {advice}") from None


def write_rounded(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file; floats are rounded to seven significant digits, and become null if they are not finite."""
    files.write_json(path, tree_map(_round, value))


def _round(value: object) -> object:
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
