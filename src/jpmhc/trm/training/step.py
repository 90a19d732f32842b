"""One optimiser step: rows in, gradients, updates, and what is said about it."""

import math
import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jpmhc import checks
from jpmhc.trm.model import Carry, Step, refill
from jpmhc.trm.tasks.batch import Batch
from jpmhc.trm.training.state import State


class NonFiniteLoss(ValueError):
    """The loss is not a finite number; the message says where, and where the state was saved."""


class Sums(NamedTuple):
    """Sums over the rows of a step, over all ranks."""

    loss: float
    language: float
    halting: float
    halted: float  # rows that halted; the next three are sums over them
    exact: float
    correct: float
    steps: float
    stop: float  # ranks that were asked to stop


def advance(
    state: State, rows: Batch, minimum: Tensor, *, logs: bool = False, stop: bool = False
) -> tuple[Sums, dict[str, Tensor]]:
    """One step on this rank's rows.

    Args:
        state: The run, moved by one step.
        rows: Candidates for the rows that have halted.
        minimum: Supervision steps before which each row may not halt.
        logs: Whether gradient norms are asked for.
        stop: Whether this rank was asked to stop.

    Returns:
        Sums over all ranks, and norms of the gradient (of every parameter, and "total").
    """
    config, carries, last = state.config, state.carries, len(state.carries) - 1
    size = len(state.rows) // len(carries)
    total = torch.zeros(len(Sums._fields), dtype=torch.float64, device=state.world.device)
    total[-1] = float(stop)
    fetched = _Fetched()
    before, finite = list(carries), []
    for i, carry in enumerate(carries):
        cut = slice(i * size, (i + 1) * size)
        carry = refill(carry, rows.inputs[cut], rows.labels[cut], rows.identifiers[cut])
        puzzle = state.model.puzzles(carry.identifiers)
        # A mixer's own refusal would know neither step nor rows, and leave other ranks waiting: the loss shows it too.
        with state.shared.parts(i == last), checks.unchecked():
            out: Step = state.shared.module(
                puzzle, carry.inputs, carry.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, minimum[cut]
            )
            total += _sums(out)
            finite.append(torch.isfinite(out.language + config.model.halting_weight * out.halting))
            if i == last:
                fetched = _Fetched(state.world.sum(total))
            state.shared.backward(out.loss / config.batch, i == last)
        before[i] = carry
        carries[i] = carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)
    # The forward pass is long done when the backward pass has been queued, so reading the loss here costs no wait.
    sums = Sums(*fetched.values())
    if not math.isfinite(sums.loss):
        _fail(state, sums.loss, before, finite)
    rate = config.rate(state.step)
    norms = dict(state.shared.gradient_norms()) if logs else {}
    norms["total"] = state.shared.step(rate)
    state.sign.param_groups[0]["lr"] = rate * config.puzzle_lr
    state.sign.step()
    state.sign.zero_grad(set_to_none=True)
    if state.frames is not None:
        state.frames.param_groups[0]["lr"] = rate * config.frame_lr
        state.frames.step()
        state.frames.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update()
    state.step += 1
    return sums, norms


def described(state: State, sums: Sums, norms: dict[str, Tensor]) -> dict[str, Any]:
    """What the log says about the step just done."""
    batch, halted = state.config.batch, max(sums.halted, 1.0)
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
        "rate": state.config.rate(state.step - 1),
        "gradient_norm": float(norms["total"]),
        "largest_layer_gradient_norm": math.sqrt(layers[largest]),
        "largest_layer": largest,
    }


def _fail(state: State, loss: float, before: list[Carry], finite: list[Tensor]) -> None:
    """Save the state that gave a loss that is not finite, rows in flight included, and say which rows did."""
    state.carries = before
    path = state.save(state.config.out / "failed")
    bad = [number for carry, good in zip(before, finite) for number in carry.identifiers[~good].tolist()]
    bad = [number for part in state.world.collect(bad) for number in part]
    names = state.task.describe(np.unique(bad))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise NonFiniteLoss(
        f"the loss of step {state.step + 1} is {loss}, on {len(bad)} rows of {shown}; the state before it is in {path}"
    )


class _Fetched:
    """A tensor on its way to the host, which waits for it alone and not for work queued after it."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.event: torch.cuda.Event | None = None
        self.host = tensor
        if tensor is not None and tensor.device.type == "cuda":
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self.event is not None:
            self.event.synchronize()
        assert self.host is not None
        return self.host.tolist()


def _sums(out: Step) -> Tensor:
    """The sums of one part, without the last."""
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
