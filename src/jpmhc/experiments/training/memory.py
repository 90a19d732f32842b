"""Estimates of the memory that training needs, before it starts.

The estimate is a lower bound: weights with their optimiser state and average, the puzzle table, and the activations
that the backward pass needs in any case. A run that passes the check may still run out of memory, but a run that fails
the check certainly would.
"""

import torch

from jpmhc.experiments.models.layers import inner_width
from jpmhc.experiments.models.recursive import RecursiveModel
from jpmhc.experiments.tasks.task import Task
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.processes import World
from jpmhc.machine import free_memory

_GIB = 2**30


def refuse_memory(config: TrainConfig, task: Task, world: World) -> None:
    """Raise a ValueError if training needs more memory than is free; the message names a fitting --accumulate value."""
    rows = config.batch // world.size
    fixed, per_row = state_bytes(config, task), activation_bytes(config, task)
    free = free_memory(world.device)
    if (needed := fixed + per_row * (rows // config.accumulate)) <= free:
        return
    parts = [parts for parts in range(1, rows + 1) if rows % parts == 0 and fixed + per_row * (rows // parts) <= free]
    advice = f"--accumulate {parts[0]} works on {rows // parts[0]} rows at a time, or " if parts else ""
    raise ValueError(
        f"training needs at least {needed / _GIB:,.1f} GiB for {rows // config.accumulate} rows at a time, and "
        f"{free / _GIB:,.1f} GiB are free on this {world.device.type}: {advice}take a smaller batch or model"
    )


def state_bytes(config: TrainConfig, task: Task) -> int:
    """Return the bytes of weights, gradients, moments and averages, and of the puzzle table.

    With ZeRO only the puzzle table counts, because each process has only shards of the other tensors.
    """
    with torch.device("meta"):
        core = RecursiveModel(config.model, task.vocabulary, task.length, 1).core
    weights = sum(p.numel() for p in core.parameters())
    copies = 4 + bool(config.ema) if config.strategy == "ddp" else 0  # shards are smaller
    return 4 * (copies * weights + task.identifier_count * config.model.dim)


def activation_bytes(config: TrainConfig, task: Task) -> int:
    """Return the bytes of activations per row that the backward pass needs; only the last outer cycle has gradients.

    Each layer saves the inputs and outputs of its matrix products: queries, keys, values and the attention's output,
    gates and values of the feed-forward layer, both layers' outputs, and the streams before each connection.
    """
    model = config.model
    positions = model.puzzle_slots + task.length
    inner = inner_width(model.dim, model.expansion, model.inner_multiple)
    if model.between_positions == "attention":
        mixing = 4 * model.dim * positions
    else:
        mixing = 2 * inner_width(positions, model.expansion, model.inner_multiple) * model.dim
    layer = mixing + (2 * inner + 2 * model.dim) * positions
    if not model.plain:
        layer += 2 * model.streams * model.dim * positions
    size = 2 if model.compute == "bfloat16" else 4
    return size * layer * model.layers * (model.l_cycles + 1)
