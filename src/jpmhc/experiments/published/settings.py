"""Conversion of a published checkpoint's configuration, `all_config.yaml`, into this package's settings."""

import re
from pathlib import Path

from torch.utils._pytree import tree_map

from jpmhc.experiments.models import RecursiveConfig
from jpmhc.experiments.models.layers import NORM_EPS
from jpmhc.files import JsonObject

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
    """Return the model's configuration from the settings; raise a ValueError for settings that this package lacks."""
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
    """Return the fields of `TrainConfig` that the settings contain."""
    settings = {name: value for name, value in settings.items() if value is not None}
    fields = {ours: settings[theirs] for theirs, ours in _TRAINING.items() if theirs in settings}
    if "beta1" in settings and "beta2" in settings:
        fields["betas"] = (settings["beta1"], settings["beta2"])
    if "ema" in settings:
        fields["ema"] = settings.get("ema_rate", 0.999) if settings["ema"] is True else 0.0
    return fields
