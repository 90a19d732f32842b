"""Import of a published Tiny Recursive Model into a run folder, which evaluation, prediction and training can use.

The files are the checkpoint, whose weights are read without running code from the file, `all_config.yaml` with the
settings, and `identifiers.json` with the names of the puzzle table's rows.
"""

import dataclasses
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from jpmhc.experiments.models.layers import NORM_EPS
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveCore
from jpmhc.experiments.tasks import TASKS
from jpmhc.experiments.tasks.task import PublishedTask, Task, TaskOptions, read_identifiers
from jpmhc.experiments.training import checkpoint, run_folder
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.experiments.training.progress import Display
from jpmhc.files import JsonObject, explaining_write_errors, write_file

_IDENTIFIERS = "identifiers.json"  # the copy in the run's folder

# Required settings of the architecture, and the names of the fields of `RecursiveConfig` for them.
_NEEDED = {
    "H_cycles": "h_cycles",
    "L_cycles": "l_cycles",
    "L_layers": "layers",
    "hidden_size": "dim",
    "num_heads": "heads",
    "expansion": "expansion",
    "halt_max_steps": "halt_max_steps",
    "halt_exploration_prob": "halt_exploration",
}
# Optional settings, with the public code's defaults.
_DEFAULTS = {
    "forward_dtype": "bfloat16",
    "mlp_t": False,
    "pos_encodings": None,
    "puzzle_emb_len": 16,
    "puzzle_emb_ndim": 0,
    "rms_norm_eps": NORM_EPS,
    "rope_theta": 1e4,
    "name": "",
}
# Settings that do not change answers: H_layers, which the public code ignores, and two settings of the training loss.
_WITHOUT_EFFECT = {"H_layers", "loss", "no_ACT_continue"}

_TRAINING = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "lr_warmup_steps": "warmup",
    "puzzle_emb_lr": "puzzle_lr",
    "puzzle_emb_weight_decay": "puzzle_weight_decay",
    "global_batch_size": "batch",
    "seed": "seed",
}

_PREFIXES = ("_orig_mod.model.inner.", "model.inner.")  # of names in compiled models and in other models
_TABLE = "puzzle_emb.weights"
_TOKENS = "embed_tokens.embedding_weight"
_NAMES = {
    "H_init": "h_init",
    "L_init": "l_init",
    _TOKENS: "tokens",
    "lm_head.weight": "token_head.weight",
    "q_head.weight": "q_head.weight",
    "q_head.bias": "q_head.bias",
}
_SUBLAYERS = {
    "attention": {"self_attn.qkv_proj.weight": "qkv.weight", "self_attn.o_proj.weight": "out.weight"},
    "mlp": {"mlp_t.gate_up_proj.weight": "gate_up.weight", "mlp_t.down_proj.weight": "down.weight"},
}
_FEED_FORWARD = {"mlp.gate_up_proj.weight": "gate_up.weight", "mlp.down_proj.weight": "down.weight"}


@dataclass(frozen=True)
class ImportResult:
    """The result of an import."""

    config: TrainConfig
    checkpoint: Path
    remark: str  # sentence about data of the model that are missing in the task; empty if none are missing


def import_model(
    file: Path,
    identifiers: Path,
    config: Path,
    out: Path,
    mixer: str | None = None,
    streams: int | None = None,
    task_options: TaskOptions | None = None,
) -> ImportResult:
    """Write a run folder with a published checkpoint, after all files have been checked.

    The published files have no optimiser state and no rows in progress, so `train --resume` begins at step 0 with the
    imported weights.

    Args:
        file: The checkpoint.
        identifiers: The identifiers.json of the model's training data, with the puzzle of each row of the puzzle table.
        config: The all_config.yaml from the checkpoint's folder, with the numbers of cycles.
        out: Folder of the new run.
        mixer: Mixer of hyper-connections to add to the model, whose outputs stay equal; None for no hyper-connections.
        streams: Number of residual streams of the hyper-connections; None for four.
        task_options: Options of the model's task by name.
    """
    run_folder.refuse_used_folder(out)
    copies = {out / _IDENTIFIERS: identifiers, out / "all_config.yaml": config}
    for copy, original in copies.items():
        if copy.exists() and copy.read_bytes() != original.read_bytes():
            raise ValueError(f"{copy} is there already and would be overwritten: choose another --out")
    settings = read_settings(config)
    plain = read_model_settings(settings, config)
    if mixer is None and streams is not None:
        raise ValueError("--streams is for hyper-connections: name their mixer with --mixer")
    model = plain
    if mixer is not None:
        model = dataclasses.replace(plain, mixer=mixer, streams=4 if streams is None else streams, mixer_eps=NORM_EPS)
    weights = read_checkpoint(file)
    layers = len({name.split(".")[2] for name in weights if name.startswith("L_level.layers.")})
    if layers != plain.layers:
        raise ValueError(f"{file} has {layers} layers, but {config} says that L_layers is {plain.layers}")
    if _TOKENS not in weights:
        raise ValueError(f"{file} lacks {_TOKENS}")
    vocabulary, rows = len(weights[_TOKENS]), len(read_identifiers(identifiers))
    if _TABLE in weights and len(weights[_TABLE]) != rows:
        raise ValueError(
            f"{identifiers} names {rows} rows, but {_TABLE} in {file} has {len(weights[_TABLE])}: they belong to "
            "different data"
        )
    with Display() as display, display.preparing("preparing the puzzles"):
        published = _find_task(vocabulary, identifiers, task_options or {}, file)
        task = published.config.build()
    refuse_weights(weights, plain, task, file)
    core, table = rename_weights(weights, model, task)
    options = {name: getattr(published.config, name) for name in published.config.file_options}
    moved = {name: out / _IDENTIFIERS for name, path in options.items() if path == Path(os.path.abspath(identifiers))}
    try:
        run = dataclasses.replace(
            PRESETS["trm"],
            model=model,
            task=dataclasses.replace(published.config, **moved),  # type: ignore[type-var]
            out=out,
            **read_training_settings(settings),
        )
        run = TrainConfig.from_json(run.to_json())  # raises an error for values of the wrong type
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config}: {error}") from None
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
        explaining_write_errors(out),
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
            path = checkpoint.finish_checkpoint(path, run, task.fingerprint(), ranks=0)
            write_file(out / "config.json", run.to_json() + "\n")
        except OSError:  # such as a full disk: remove the new files, so that the import can be repeated
            for path in new:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise
    return ImportResult(run, path, published.remark)


def _find_task(vocabulary: int, identifiers: Path, task_options: TaskOptions, file: Path) -> PublishedTask:
    """Return the task whose vocabulary the published model has; raise a ValueError for options the task lacks."""
    for cls in TASKS.values():
        known = {option.name for option in dataclasses.fields(cls)}  # type: ignore[arg-type]
        options = {name: value for name, value in task_options.items() if name in known}
        if published := cls.of_published_model(vocabulary, identifiers, options):
            if unknown := task_options.keys() - known:
                raise ValueError(f"the model's task has no option {min(unknown).replace('_', '-')}: leave it out")
            return published
    raise ValueError(f"{file} knows {vocabulary} tokens; no model of {' or '.join(TASKS)} has this number")


def read_settings(path: Path) -> JsonObject:
    """Read `all_config.yaml`; raise a ValueError if it is not the configuration of a published model."""
    import yaml  # an extra

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not a YAML file ({reason})") from None
    settings = tree_map(_read_number, settings)
    if not isinstance(settings, dict) or not isinstance(settings.get("arch"), dict):
        raise ValueError(f"{path} has no section arch, so it is not the all_config.yaml of a published model")
    return settings


def _read_number(value: object) -> object:
    """Turn a text such as 1e-4 into a number; YAML 1.1 reads only 1.0e-4 as a number."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def read_model_settings(settings: JsonObject, path: Path) -> RecursiveConfig:
    """Return the model's configuration from the content of `all_config.yaml`.

    Raises a ValueError, which names the file `path`, for settings that this package does not have.
    """
    arch = {name: value for name, value in settings["arch"].items() if value is not None}
    if missing := [name for name in _NEEDED if name not in arch]:
        raise ValueError(f"{path} lacks arch.{missing[0]}, which the weights do not show")
    if unknown := sorted(arch.keys() - _NEEDED.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT):
        raise ValueError(f"{path} has arch.{unknown[0]}, a setting that the public model does not have")
    chosen = {**_DEFAULTS, **arch}
    if not isinstance(chosen["mlp_t"], bool):
        raise ValueError(f"{path} has mlp_t {chosen['mlp_t']!r}; it must be true or false")
    wanted = {
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 1e4,
        "puzzle_emb_ndim": arch["hidden_size"],
        "pos_encodings": chosen["pos_encodings"] if chosen["mlp_t"] else "rope",
    }
    for name, value in wanted.items():
        if chosen[name] != value:
            raise ValueError(f"{path} has {name} {chosen[name]}; only models with {name} {value} can be imported")
    if chosen["forward_dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"{path} has forward_dtype {chosen['forward_dtype']}; it must be float32 or bfloat16")
    if chosen["name"] and "trm@" not in str(chosen["name"]):
        raise ValueError(f"{path} is of {chosen['name']}, not of the recursive model trm@TinyRecursiveReasoningModel")
    try:
        return RecursiveConfig(
            **{ours: arch[theirs] for theirs, ours in _NEEDED.items()},
            between_positions="mlp" if chosen["mlp_t"] else "attention",
            puzzle_slots=1 if chosen["puzzle_emb_len"] == 0 else chosen["puzzle_emb_len"],
            compute=chosen["forward_dtype"],
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_training_settings(settings: JsonObject) -> JsonObject:
    """Return the fields of `TrainConfig` that the content of `all_config.yaml` sets, by name."""
    settings = {name: value for name, value in settings.items() if value is not None}
    fields = {ours: settings[theirs] for theirs, ours in _TRAINING.items() if theirs in settings}
    if "beta1" in settings and "beta2" in settings:
        fields["betas"] = (settings["beta1"], settings["beta2"])
    if "ema" in settings:
        fields["ema"] = settings.get("ema_rate", 0.999) if settings["ema"] is True else 0.0
    return fields


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint by name, without the names' common prefix.

    Only tensors are loaded. They stay on disk until they are used, because the puzzle table has gigabytes.
    """
    if not path.is_file():
        raise ValueError(f"there is no checkpoint at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a file of torch.save, or is incomplete: its table of contents is missing")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} holds more than tensors, which could run code: it is not loaded") from None
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} is not a state dict: it must hold tensors by name, and nothing else")
    prefix = next((p for p in _PREFIXES if all(str(name).startswith(p) for name in content)), None)
    if prefix is None or not content:
        raise ValueError(f"{path} is not of a published model: its names do not begin with {' or '.join(_PREFIXES)}")
    return {name.removeprefix(prefix): value for name, value in content.items()}


def name_parameters(config: RecursiveConfig) -> dict[str, str]:
    """Return a dict from published tensor names to the names in `RecursiveCore`; the puzzle table is left out."""
    names = dict(_NAMES)
    prefix = "network" if config.plain else "network.connections"
    for layer in range(config.layers):
        for half, sublayer in enumerate((_SUBLAYERS[config.between_positions], _FEED_FORWARD)):
            for theirs, ours in sublayer.items():
                names[f"L_level.layers.{layer}.{theirs}"] = f"{prefix}.{2 * layer + half}.sublayer.{ours}"
    return names


def refuse_weights(weights: dict[str, Tensor], config: RecursiveConfig, task: Task, path: Path) -> None:
    """Raise a ValueError if weights have other names, shapes or types than needed, or entries that are not finite.

    `config` is the configuration without hyper-connections, which published models lack. Messages name the weights'
    file `path`.
    """
    try:
        with torch.device("meta"):  # shapes only, because the configuration may describe a huge model
            core = RecursiveCore(config, task.vocabulary, task.length).state_dict()
    except (OverflowError, RuntimeError, TypeError):
        raise ValueError(f"the configuration asks for impossibly large tensors, so it does not fit {path}") from None
    expected = {theirs: list(core[ours].shape) for theirs, ours in name_parameters(config).items()}
    expected[_TABLE] = [task.identifier_count, config.dim]
    for differing, sentence in (
        (sorted(expected.keys() - weights.keys()), "lacks {}, which the configuration asks for"),
        (sorted(weights.keys() - expected.keys()), "has {}, for which the configuration has no place"),
    ):
        if differing:
            raise ValueError(f"{path} {sentence.format(', '.join(differing))}")
    for name, shape in expected.items():
        if list(weights[name].shape) != shape:
            raise ValueError(
                f"{name} in {path} has shape {list(weights[name].shape)}; the configuration asks for {shape}"
            )
        if not weights[name].is_floating_point():
            raise ValueError(
                f"{name} in {path} has the type {weights[name].dtype}; weights must be floating-point numbers"
            )
        if weights[name].is_meta or not weights[name].to_dense().isfinite().all():
            raise ValueError(f"{name} in {path} has entries that are not finite numbers")


def rename_weights(weights: dict[str, Tensor], config: RecursiveConfig, task: Task) -> tuple[dict[str, Tensor], Tensor]:
    """Return published weights as the state dict of a model's core, and the puzzle table.

    Hyper-connections, which published models lack, have their initial parameters.
    """
    core = RecursiveCore(config, task.vocabulary, task.length).state_dict()
    renamed = {ours: weights[theirs].float() for theirs, ours in name_parameters(config).items()}
    return {**core, **renamed}, weights[_TABLE].float()
