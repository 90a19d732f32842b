"""Log the cheap numbers of a diagnosis while a model trains: the product of the skips, the streams, the gains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from jpmhc import checks
from jpmhc.connections import HyperConnection
from jpmhc.diagnose.layers import measure_streams
from jpmhc.diagnose.record import LayerCall, Recording, find_layers, longest_chain, record_layers

FACTOR = 10.0  # numbers beyond this factor raise an alarm; a diagnosis calls it collapse or explosion
_ALARMS = {  # the alarm of each number, when it is too small and when it is too large; None if it cannot be
    "skips/geometric_mean": (
        "the skips forget differences between streams: their product multiplies them by",
        "the skips stretch the streams: their product multiplies them by",
    ),
    "skips/direct_path": (
        "the skips lose the streams' mean: their product multiplies it by",
        "the skips stretch the streams' mean: their product multiplies it by",
    ),
    "signal_gain/largest": (None, "a sublayer's output is larger than its input, by the factor"),
}


@dataclass
class Watch:
    """The numbers logged so far.

    Attributes:
        records: For each watched step, a dict with the step's number as "step" and with the logged numbers by name.
        step: The number of the current training step.
        alarms: {name of a number: the step of its first alarm, and the alarm's sentence}.
    """

    records: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    alarms: dict[str, tuple[int, str]] = field(default_factory=dict)


def watch(
    model: nn.Module,
    every: int = 100,
    log: Callable[[int, dict[str, float]], None] | None = None,
    *,
    start: int = 0,
) -> AbstractContextManager[Watch]:
    """Log statistics of skips, streams and sublayers during training, once every `every` steps.

    A step begins with the first call of the model in train mode after a step of an optimizer that has the model's
    parameters; further calls before the next optimizer step (gradient accumulation) belong to the same step. The
    model's results, gradients and random numbers do not change. Steps that are not watched cost nothing. A warning is
    given if the optimizer lacks the connections' weights. Another warning is given the first time that a number is not
    finite, that the product of the skips shrinks or stretches the streams more than tenfold, or that a sublayer's
    output is more than ten times its input.

    Args:
        model: The model, whose hyper-connections are watched, or whose layers if it has no hyper-connections.
        every: The number of steps between watched steps; step 1 is the first watched step.
        log: Called with the step and the numbers, for example to write to TensorBoard; by default a line is printed.
            Of several processes only the first one logs.
        start: The number of steps before this run, if it resumes an earlier run.

    Example:
        >>> import jpmhc
        >>> layers = [jpmhc.HyperConnection(nn.Linear(8, 8), 8, index=k) for k in range(3)]
        >>> model = jpmhc.HyperConnectionStack(layers, expand=True, reduce=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> with jpmhc.diagnose.watch(model, every=2, log=lambda step, numbers: None) as seen:
        ...     for _ in range(4):
        ...         model(torch.randn(10, 8)).square().mean().backward()
        ...         optimizer.step()
        >>> [record["step"] for record in seen.records]
        [1, 3]
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    checks.whole_number(every, "every")
    checks.whole_number(start, "start", 0)
    if log is not None and not callable(log):
        raise ValueError(f"log must be a function of the step and the numbers, got {checks.quote(log)}")
    layers = find_layers(model)
    if not layers:
        raise ValueError(
            "this model has no list of layers and no hyper-connections (delayed reads do not count): nothing to watch"
        )
    return _watching(model, layers, every, log or _print_line, start)


@contextmanager
def _watching(
    model: nn.Module, layers: Sequence[nn.Module], every: int, log: Callable[[int, dict[str, float]], None], start: int
) -> Iterator[Watch]:
    seen = Watch(step=start)
    active: list[tuple[ExitStack, Recording]] = []
    stepped = True
    untrained: set[int] | None = None  # the connections' weights, until one of them is in an optimizer that steps

    def note_step(optimizer: Optimizer, *ignored: Any) -> None:
        nonlocal stepped, untrained
        if untrained is None:
            maps = [module.map for module in model.modules() if isinstance(module, HyperConnection)]
            untrained = {id(parameter) for one in maps for parameter in one.parameters() if parameter.requires_grad}
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]] if untrained else []
        if any(id(parameter) in untrained for parameter in given):
            untrained = set()
        if not stepped:  # only the first optimizer step after the model's call counts
            own = set(map(id, model.parameters()))
            stepped = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def begin(module: nn.Module, given: Any) -> None:
        nonlocal stepped, untrained
        if not module.training or active or not stepped:
            return
        if untrained:
            untrained = set()
            warnings.warn(
                "the optimizer does not have the weights of the hyper-connections, which stay as they are: make it "
                "after wrap, of jpmhc.parameter_groups(model, weight_decay)",
                stacklevel=2,
            )
        seen.step, stepped = seen.step + 1, False
        if (seen.step - 1) % every == 0:
            stack, recording = ExitStack(), Recording()
            stack.enter_context(record_layers(model, layers, recording))
            active.append((stack, recording))

    def end(module: nn.Module, given: Any, output: Any) -> None:
        if not active:
            return
        stack, recording = active.pop()
        stack.close()
        if output is None or not recording.calls:
            return
        numbers = summarise_calls(recording.calls)
        seen.records.append({"step": seen.step, **numbers})
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        for name, alarm in find_alarms(numbers).items():
            if first and name not in seen.alarms:
                warnings.warn(f"step {seen.step}: {alarm}", stacklevel=2)
            seen.alarms.setdefault(name, (seen.step, alarm))
        if first:
            log(seen.step, numbers)

    handles = [
        model.register_forward_pre_hook(torch.compiler.disable(begin)),
        model.register_forward_hook(torch.compiler.disable(end), always_call=True),
        register_optimizer_step_post_hook(note_step),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
        while active:
            active.pop()[0].close()


@torch.no_grad()
def summarise_calls(calls: list[LayerCall]) -> dict[str, float]:
    """Return the numbers to log for the calls of one run: on skips, on streams, and on the sublayers' signal gains."""
    numbers: dict[str, float] = {}
    chain = longest_chain(calls) or calls
    if chain[0].coefficients is not None:
        streams = measure_streams(chain)
        numbers |= {
            "skips/distance": sum(map(_distance_to_identity, chain)) / len(chain),
            "skips/smallest": float(streams.product[-1]),
            "skips/geometric_mean": streams.geometric_mean,
            "skips/direct_path": streams.direct,
            "similarity": float(streams.similarity[-1]),
            "dominance": float(streams.dominance[-1]),
            "effective_rank": float(streams.rank[-1]),
        }
    gains = [_signal_gain(call) for call in calls]
    named = {"largest": max(gains), "mean": sum(gains) / len(gains), "last": gains[-1]}
    return numbers | {f"signal_gain/{name}": value for name, value in named.items()}


def find_alarms(numbers: dict[str, float]) -> dict[str, str]:
    """Return {name: alarm sentence} for the numbers that are not finite or beyond a limit, a factor of ten.

    >>> find_alarms({"skips/direct_path": 0.95, "signal_gain/largest": 20.0})
    {'signal_gain/largest': "a sublayer's output is larger than its input, by the factor 20"}
    """
    alarms = {}
    for name, value in numbers.items():
        small, large = _ALARMS.get(name, (None, None))
        sentence = large if abs(value) > FACTOR else small if abs(value) < 1 / FACTOR else None
        if not math.isfinite(value):
            alarms[name] = f"{name} is {value}"
        elif sentence is not None:
            alarms[name] = f"{sentence} {value:.3g}"
    return alarms


def _distance_to_identity(call: LayerCall) -> float:
    """Return the Frobenius norm ‖H − I‖ of a connection's skips H, averaged over tokens."""
    assert call.coefficients is not None
    skip = call.coefficients.skip.double()
    return float(torch.linalg.matrix_norm(skip - torch.eye(skip.shape[-1]).to(skip)).mean())


def _signal_gain(call: LayerCall) -> float:
    """Return the root mean square of a sublayer's output (or a plain layer's change) divided by its input's."""
    change = call.output if call.coefficients is not None else call.output - call.inside
    size = float(call.inside.detach().float().square().mean().sqrt())
    return float(change.detach().float().square().mean().sqrt()) / max(size, 1e-30)


def _print_line(step: int, numbers: dict[str, float]) -> None:
    print(f"step {step}: " + ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()))
