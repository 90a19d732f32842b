"""Reading, checking and renaming the weights of a published checkpoint, without running code from the file."""

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from jpmhc.experiments.models import RecursiveConfig, RecursiveCore
from jpmhc.experiments.tasks.task import Task

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


def read_vocabulary(weights: dict[str, Tensor], path: Path) -> int:
    """Return the number of different tokens that a model knows."""
    if _TOKENS not in weights:
        raise ValueError(f"{path} lacks {_TOKENS}")
    return len(weights[_TOKENS])


def refuse_table(weights: dict[str, Tensor], identifiers: int, path: Path, names: Path) -> None:
    """Raise a ValueError unless the puzzle table in the file `path` has one row per identifier in the file `names`."""
    if _TABLE in weights and len(weights[_TABLE]) != identifiers:
        raise ValueError(
            f"{names} names {identifiers} rows, but {_TABLE} in {path} has {len(weights[_TABLE])}: they belong to "
            "different data"
        )


def count_layers(weights: dict[str, Tensor]) -> int:
    """Return the number of layers in a checkpoint."""
    return len({name.split(".")[2] for name in weights if name.startswith("L_level.layers.")})


def name_parameters(config: RecursiveConfig) -> dict[str, str]:
    """Return each tensor's name in `RecursiveCore` by its published name, without the puzzle table."""
    names = dict(_NAMES)
    prefix = "network" if config.plain else "network.connections"
    for layer in range(config.layers):
        for half, sublayer in enumerate((_SUBLAYERS[config.between_positions], _FEED_FORWARD)):
            for theirs, ours in sublayer.items():
                names[f"L_level.layers.{layer}.{theirs}"] = f"{prefix}.{2 * layer + half}.sublayer.{ours}"
    return names


def refuse_weights(weights: dict[str, Tensor], config: RecursiveConfig, task: Task, path: Path) -> None:
    """Raise a ValueError if weights have other names or shapes than the task and the plain configuration need.

    Messages name the file of the weights, `path`.
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
