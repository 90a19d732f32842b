"""One optimiser step: rows in, gradients, updates, and the numbers that describe it."""

import math
import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jpmhc.experiments.models import Carry, Step, refill_rows
from jpmhc.experiments.tasks.task import Batch
from jpmhc.experiments.training.learner import Learner


class NonFiniteLoss(ValueError):
    """The loss is not a finite number; the message says in which step, on which rows, and what was saved."""


class Sums(NamedTuple):
    """Sums over the rows of a step, over all processes."""

    loss: float
    language: float
    halting: float
    halted: float  # rows that halted; the next three are sums over them
    exact: float
    correct: float
    steps: float
    stop: float  # processes that were asked to stop


def take_step(
    learner: Learner, rows: Batch, minimum: Tensor, *, logs: bool = False, stop: bool = False
) -> tuple[Sums, dict[str, Tensor]]:
    """Train the learner by one step on this process's rows.

    Args:
        learner: What is trained.
        rows: New rows; each is taken where the row before it has halted.
        minimum: Supervision steps before which each row may not halt.
        logs: Whether the norms of all gradients are wanted.
        stop: Whether this process was asked to stop.

    Returns:
        Sums over all processes, and norms of the gradient (of every parameter if `logs`, and "total").
    """
    config, carries, last = learner.config, learner.carries, len(learner.carries) - 1
    size = len(learner.rows) // len(carries)
    total = torch.zeros(len(Sums._fields), dtype=torch.float64, device=learner.world.device)
    total[-1] = float(stop)
    fetched = _Fetched()
    before, finite = list(carries), []
    for i, carry in enumerate(carries):
        cut = slice(i * size, (i + 1) * size)
        carry = refill_rows(carry, rows.inputs[cut], rows.labels[cut], rows.identifiers[cut])
        puzzle = learner.model.puzzles(carry.identifiers)
        with learner.distributed.exchanging_gradients(i == last):
            out: Step = learner.distributed.module(
                puzzle, carry.inputs, carry.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, minimum[cut]
            )
            total += _sum_rows(out)
            finite.append(torch.isfinite(out.language + config.model.halting_weight * out.halting))
            if i == last:
                fetched = _Fetched(learner.world.sum(total))
            learner.distributed.backward(out.loss / config.batch, i == last)
        before[i] = carry
        carries[i] = carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)
    # The forward pass is long done when the backward pass has been queued, so reading the loss here costs no wait.
    sums = Sums(*fetched.values())
    if not math.isfinite(sums.loss):
        _save_and_refuse(learner, sums.loss, before, finite)
    rate = config.learning_rate_factor(learner.step)
    norms = dict(learner.distributed.gradient_norms()) if logs else {}
    norms["total"] = learner.distributed.step(rate)
    learner.puzzle_optimiser.param_groups[0]["lr"] = rate * config.puzzle_lr
    learner.puzzle_optimiser.step()
    learner.puzzle_optimiser.zero_grad(set_to_none=True)
    if learner.frame_optimiser is not None:
        learner.frame_optimiser.param_groups[0]["lr"] = rate * config.frame_lr
        learner.frame_optimiser.step()
        learner.frame_optimiser.zero_grad(set_to_none=True)
    if learner.average is not None:
        learner.average.update()
    learner.step += 1
    return sums, norms


def describe_step(learner: Learner, sums: Sums, norms: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the log records of the step just done."""
    batch, halted = learner.config.batch, max(sums.halted, 1.0)
    layers: dict[str, float] = {}
    for name, norm in norms.items():
        if name != "total":
            layer = re.sub(r"^(network\..*?\d+)\..*", r"\1", name)
            layers[layer] = layers.get(layer, 0.0) + float(norm) ** 2
    largest = max(layers, key=lambda layer: layers[layer])
    return {
        "loss": sums.loss / batch,
        "lm_loss": sums.language / batch,
        "q_loss": sums.halting / batch,
        "halted": int(sums.halted),
        "exact_accuracy": sums.exact / halted,
        "token_accuracy": sums.correct / halted,
        "supervision_steps": sums.steps / halted,
        "rate": learner.config.learning_rate_factor(learner.step - 1),
        "gradient_norm": float(norms["total"]),
        "largest_layer_gradient_norm": math.sqrt(layers[largest]),
        "largest_layer": largest,
        "layer_gradient_norms": {layer: math.sqrt(square) for layer, square in layers.items()},
    }


def _save_and_refuse(learner: Learner, loss: float, before: list[Carry], finite: list[Tensor]) -> None:
    """Save what gave a loss that is not finite, rows in flight included, and name the step, the rows and the mixer."""
    learner.carries = before
    path = learner.save(learner.config.out / "failed")
    bad = [number for carry, good in zip(before, finite) for number in carry.identifiers[~good].tolist()]
    bad = [number for part in learner.world.collect(bad) for number in part]
    names = learner.task.describe(np.unique(bad))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise NonFiniteLoss(
        f"the loss of step {learner.step + 1} with mixer {learner.config.model.mixer} is {loss}, on {len(bad)} rows of "
        f"{shown}; the state before it is in {path}"
    )


class _Fetched:
    """A tensor on its way to the host, which waits for this tensor alone and not for work queued after it."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor is not None and tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[float]:
        """Return the numbers, once they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        assert self.host is not None
        return self.host.tolist()


def _sum_rows(out: Step) -> Tensor:
    """Add up the numbers of `Sums` over the rows of one part, `stop` being 0."""
    halted = out.halted.double()
    parts = (
        out.loss.detach(),
        out.language.detach().sum(),
        out.halting.detach().sum(),
        halted.sum(),
        (halted * out.exact).sum(),
        (halted * out.correct).sum(),
        (halted * out.steps).sum(),
    )
    return torch.stack([part.double() for part in (*parts, torch.zeros_like(parts[0]))])
