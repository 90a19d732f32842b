"""Import of a published checkpoint into a run folder, which evaluation, prediction and training can use."""

import dataclasses
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.models.layers import NORM_EPS
from jpmhc.experiments.published.settings import read_model_settings, read_settings, read_training_settings
from jpmhc.experiments.published.weights import (
    count_layers,
    read_checkpoint,
    read_vocabulary,
    refuse_table,
    refuse_weights,
    rename_weights,
)
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.task import PublishedTask, TaskOptions, read_identifiers
from jpmhc.experiments.training import checkpoint, run_folder
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.experiments.training.progress import Display
from jpmhc.files import write_file

PRESET = "trm"  # the settings of the public code
_IDENTIFIERS = "identifiers.json"  # the copy in the run's folder

_REASONS = {
    "file": "name the checkpoint to import, such as step_518071",
    "identifiers": "name the model's identifiers.json with --identifiers: it has the puzzle of each row of the table",
    "config": "name the model's all_config.yaml with --config: it has the numbers of cycles, which the model needs",
    "out": "name a folder for the run with --out",
}


@dataclass(frozen=True)
class ImportConfig:
    """The settings of an import."""

    file: Path | None = None  # The checkpoint, such as step_518071.
    identifiers: Path | None = None
    """The identifiers.json of the model's training data, which names the puzzle of each row of the puzzle table."""
    config: Path | None = None  # The all_config.yaml from the checkpoint's folder.
    out: Path | None = None  # Folder of the new run.
    mixer: str | None = None
    """Mixer of hyper-connections to add to the model, whose outputs stay equal; None: no hyper-connections."""
    streams: int | None = None  # Number of residual streams of the hyper-connections; None: four.
    task_options: TaskOptions = field(default_factory=dict)  # Options of the model's task by name.


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    config: TrainConfig
    checkpoint: Path
    remark: str  # sentence about data of the model that are missing in the task; empty if none are missing


def import_model(choices: ImportConfig) -> ImportResult:
    """Write a run folder with a published checkpoint, after all files have been checked.

    The published files have no optimiser state and no rows in progress, so `train --resume` begins at step 0 with the
    imported weights.
    """
    file, identifiers, config_file, out = (_require_path(choices, name) for name in _REASONS)
    run_folder.refuse_used_folder(out)
    copies = {out / _IDENTIFIERS: identifiers, out / "all_config.yaml": config_file}
    for copy, original in copies.items():
        if copy.exists() and copy.read_bytes() != original.read_bytes():
            raise ValueError(f"{copy} is there already and would be overwritten: choose another --out")
    settings = read_settings(config_file)
    plain = read_model_settings(settings, config_file)
    model = _add_connections(plain, choices)
    weights = read_checkpoint(file)
    if (layers := count_layers(weights)) != plain.layers:
        raise ValueError(f"{file} has {layers} layers, but {config_file} says that L_layers is {plain.layers}")
    vocabulary = read_vocabulary(weights, file)
    refuse_table(weights, len(read_identifiers(identifiers)), file, identifiers)
    with Display() as display, display.preparing("preparing the puzzles"):
        published = _find_task(vocabulary, identifiers, choices)
        task = published.config.build()
    refuse_weights(weights, plain, task, file)
    core, table = rename_weights(weights, model, task)
    options = {name: getattr(published.config, name) for name in published.config.file_options}
    moved = {name: out / _IDENTIFIERS for name, path in options.items() if path == Path(os.path.abspath(identifiers))}
    try:
        config = dataclasses.replace(
            PRESETS[PRESET],
            model=model,
            task=dataclasses.replace(published.config, **moved),  # type: ignore[type-var]
            out=out,
            **read_training_settings(settings),
        )
        config = TrainConfig.from_json(config.to_json())  # raises an error for values of the wrong type
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config_file}: {error}") from None
    content = {
        "shape": (vocabulary, task.length, task.identifier_count),
        "core": core,
        "average": None,
        "puzzles": {"weight": table},
        "frames": None,
        "dense": None,
    }
    with (
        run_folder.lock_folder(out, new=True),
        run_folder.explaining_write_errors(out),
        Display() as display,
        display.preparing("writing the run"),
    ):
        new = [path for path in (*copies, out / "checkpoints", out / "config.json") if not path.exists()]
        try:
            for copy, original in copies.items():
                if not copy.exists():
                    write_file(copy, original.read_bytes())
            path = checkpoint.begin_checkpoint(out, 0)
            checkpoint.write_part(path, "shared.pt", content)
            path = checkpoint.finish_checkpoint(path, config, task.fingerprint(), ranks=0)
            write_file(out / "config.json", config.to_json() + "\n")
        except OSError:  # such as a full disk: remove the new files, so that the import can be repeated
            for path in new:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise
    return ImportResult(config, path, published.remark)


def _require_path(choices: ImportConfig, name: str) -> Path:
    path: Path | None = getattr(choices, name)
    if path is None:
        raise ValueError(_REASONS[name])
    return path


def _add_connections(model: RecursiveConfig, choices: ImportConfig) -> RecursiveConfig:
    """Return the model's configuration with the hyper-connections of `choices`, with the plain model's norm eps."""
    if choices.mixer is None and choices.streams is not None:
        raise ValueError("--streams is for hyper-connections: name their mixer with --mixer")
    if choices.mixer is None:
        return model
    streams = 4 if choices.streams is None else choices.streams
    return dataclasses.replace(model, mixer=choices.mixer, streams=streams, mixer_eps=NORM_EPS)


def _find_task(vocabulary: int, identifiers: Path, choices: ImportConfig) -> PublishedTask:
    """Return the task whose vocabulary the published model has; raise a ValueError for options the task lacks."""
    for cls in TASKS.values():
        known = {option.name for option in dataclasses.fields(cls)}  # type: ignore[arg-type]
        options = {name: value for name, value in choices.task_options.items() if name in known}
        if published := cls.of_published_model(vocabulary, identifiers, options):
            if unknown := choices.task_options.keys() - known:
                raise ValueError(f"the model's task has no option {min(unknown).replace('_', '-')}: leave it out")
            return published
    raise ValueError(f"{choices.file} knows {vocabulary} tokens; no model of {' or '.join(TASKS)} has this number")
