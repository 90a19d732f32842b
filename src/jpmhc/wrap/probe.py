"""One probing run: how the residual stream runs through each of a model's candidates for a layer.

The model computes once with every candidate's hidden state replaced by an object that follows what is done to it: one
stream with plain additions, so that the numbers stay what they are. A candidate whose output is that object is a
residual layer.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jpmhc.wrap.modules import StreamModule, foreign_modules
from jpmhc.wrap.plan import LayerPlan, replace_entries
from jpmhc.wrap.route import Route, StreamStep
from jpmhc.wrap.streams import Streams

# What a computation may raise that meets an object where it expects a tensor. The plain run comes first: errors that
# are the caller's own have been raised there.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class PlainResidual:
    """The connection of one stream that is x + y."""

    def read(self, x: Tensor) -> tuple[Tensor, None]:
        return x.squeeze(-2), None

    def write(self, x: Tensor, y: Tensor, state: None) -> Tensor:
        return x + y.unsqueeze(-2)


class EveryRoute(Route):
    """A route that goes on with every operation, whatever becomes of the result."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.additions, self.complaint = 0, ""

    def carries(self, trail: tuple[StreamStep, ...], step: StreamStep) -> bool:
        self.additions += step.name == "add"
        return True

    def connection(self, trail: tuple[StreamStep, ...]) -> PlainResidual:
        return PlainResidual()

    def following(self, trail: tuple[StreamStep, ...]) -> None:
        return None

    def note(self, complaint: str) -> None:
        self.complaint = complaint


@dataclass
class Finding:
    """What a probing run saw of one candidate.

    Args:
        calls: How often it was called.
        plans: One for each call through which the residual stream could be followed.
        complaint: What it does with residual additions that cannot be followed; "" where it has none.
    """

    calls: int = 0
    plans: list[LayerPlan] = field(default_factory=list)
    complaint: str = ""

    @property
    def followed(self) -> bool:
        return self.calls > 0 and len(self.plans) == self.calls


@dataclass
class Boundary:
    """A hidden state between two layers: which call made it, which took it, and whether anything else used it."""

    tensor: Tensor
    maker: tuple[str, int]
    taker: tuple[str, int] | None = None
    used: bool = False


class Probe(TorchFunctionMode):
    """The hooks of one probing run, and a watch on every torch function that is called in it.

    Attributes:
        findings: What was seen of each candidate.
        boundaries: The hidden states that candidates returned.
        failed: The candidate in which the run broke off, or None.
    """

    def __init__(self, candidates: dict[str, nn.Module]) -> None:
        super().__init__()
        self.findings = {name: Finding() for name in candidates}
        self.boundaries: list[Boundary] = []
        self.failed: str | None = None
        self._candidates = candidates
        self._foreign: dict[str, list[StreamModule]] = {name: [] for name in candidates}
        self._entered: list[tuple[LayerPlan, EveryRoute]] = []

    def watch(self, run: Callable[[], Any]) -> None:
        """Run the model under the hooks; a failure inside a candidate is that candidate's complaint."""
        handles = []
        for name, module in self._candidates.items():
            handles.append(module.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._end, with_kwargs=True))
            for inner, foreign in foreign_modules(module).items():
                self._foreign[name].append(StreamModule(inner))
                handles += self._foreign[name][-1].register(foreign)
        try:
            with self:
                run()
        except FAILURES as error:
            if not self._entered:
                raise
            self.failed = self._entered[0][0].name
            said = f"raises {type(error).__name__} when its hidden state is followed"
            self.findings[self.failed].complaint = f"{said} ({(str(error).strip().splitlines() or [''])[0]})"
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str) -> Callable[..., Any]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            finding = self.findings[name]
            finding.calls += 1
            with torch._C.DisableTorchFunction():
                plan = plan_entry(name, module, args, kwargs)
                if plan is None:
                    return None
                x, route = plan.entering(args, kwargs), EveryRoute()
                self._entered.append((plan, route))
                for boundary in self.boundaries:
                    if boundary.tensor is x:
                        boundary.used |= boundary.taker is not None
                        boundary.taker = (name, finding.calls)
                return plan.with_entering(args, kwargs, Streams(x.unsqueeze(-2), route))

        return begin

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._entered or self._candidates[self._entered[-1][0].name] is not module:
            return None
        plan, route = self._entered.pop()
        finding = self.findings[plan.name]
        found, leaves = find_streams(output, route)
        complaint = route.complaint if route.additions else ""
        if found is None or complaint:
            if found is None and route.additions and not complaint:
                complaint = "returns something that the additions to its hidden state do not lead to"
            finding.complaint = finding.complaint or complaint
            return replace_entries(output, {})
        with torch._C.DisableTorchFunction():
            x = found.x.squeeze(-2)
        met = tuple(foreign.name for foreign in self._foreign[plan.name] if foreign.met)
        plan = dataclasses.replace(plan, steps=found.trail, leaves=leaves, modules=met)
        if plan.additions:
            finding.plans.append(plan)
            self.boundaries.append(Boundary(x, (plan.name, finding.calls)))
        return plan.with_leaving(output, x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.boundaries and getattr(func, "__name__", "") != "__get__":
            given = [*args, *(kwargs or {}).values()]
            given += [entry for value in given if isinstance(value, tuple | list) for entry in value]
            for boundary in self.boundaries:
                boundary.used |= result is not boundary.tensor and any(value is boundary.tensor for value in given)
        return result


def plan_entry(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerPlan | None:
    """Find where a candidate's hidden state enters: the first argument that can be one; None if there is none."""
    given: list[tuple[int | None, str | None, Any]] = [(place, None, value) for place, value in enumerate(args)]
    given += [(None, key, value) for key, value in kwargs.items()]
    for position, keyword, value in given:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            names = list(inspect.signature(module.forward).parameters)
            if position is not None:
                keyword = names[position] if position < len(names) else None
            elif keyword in names:
                position = names.index(keyword)
            return LayerPlan(name, position, keyword, value.ndim, value.shape[-1])
    return None


def find_streams(output: Any, route: Route) -> tuple[Streams | None, int | str | None]:
    """Find the streams of a route in a layer's output, and their index or key there."""
    if isinstance(output, Streams):
        return output, None
    pairs: Any = output.items() if isinstance(output, dict) else ()
    if isinstance(output, tuple | list):
        pairs = enumerate(output)
    for key, value in pairs:
        if isinstance(value, Streams) and value.route is route:
            return value, key
    return None, None
