"""A probing run: which modules are residual layers, and which operations lead from their input to their output.

The candidates are modules that may be residual layers. The hidden state of every candidate is replaced by a `Streams`
object of one stream with plain additions, which records the operations on it without changing the numbers. A candidate
that returns its object is a residual layer.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jpmhc.wrap.additions import tensors_in
from jpmhc.wrap.layers import Args, Kwargs, LayerPlan, replace_entries
from jpmhc.wrap.stream_modules import StreamModule, foreign_modules
from jpmhc.wrap.streams import Route, Streams, StreamStep, Trail

# The errors that code may raise if it gets a `Streams` object instead of a tensor. Errors of the model itself have been
# raised before, in the plain run.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class PlainResidual:
    """A connection of one stream that computes the plain addition x + y."""

    def read(self, x: Tensor) -> tuple[Tensor, None]:
        return x.squeeze(-2), None

    def write(self, x: Tensor, y: Tensor, state: None) -> Tensor:
        return x + y.unsqueeze(-2)


class EveryRoute(Route):
    """A route on which every operation carries the residual stream.

    Attributes:
        additions: The number of additions to the hidden state.
        reads: The number of computations from the hidden state that do not carry the residual stream.
        complaint: A clause about an operation that cannot be followed; "" if there is none.
    """

    def __init__(self) -> None:
        super().__init__((), ())
        self.additions, self.reads, self.complaint = 0, 0, ""

    def carries(self, trail: Trail, step: StreamStep) -> bool:
        self.additions += step.name == "add"
        return True

    def connection(self, trail: Trail) -> Any:
        return PlainResidual()

    def following(self, trail: Trail) -> None:
        return None

    def note(self, complaint: str) -> None:
        self.complaint = complaint

    def note_read(self) -> None:
        self.reads += 1


@dataclass
class Finding:
    """The result of a probing run for one candidate.

    Args:
        calls: The number of the candidate's calls.
        plans: A plan for each call through which the residual stream could be followed.
        complaint: A clause on why the candidate's residual additions cannot be followed; "" if there is no reason.
        only_adds: Whether the candidate adds to its hidden state without computing anything else from it. A connection
            there would have no effect, because nothing reads the streams before they are reduced.
    """

    calls: int = 0
    plans: list[LayerPlan] = field(default_factory=list)
    complaint: str = ""
    only_adds: bool = False

    @property
    def followed(self) -> bool:
        return self.calls > 0 and len(self.plans) == self.calls


@dataclass
class Boundary:
    """A hidden state that a candidate returned, possibly for another candidate.

    Attributes:
        tensor: The hidden state.
        maker: The call that returned it: the candidate's name and the number of the call.
        taker: The call that got it as its hidden state; None without such a call.
        used: Whether anything else uses it.
    """

    tensor: Tensor
    maker: tuple[str, int]
    taker: tuple[str, int] | None = None
    used: bool = False


class Probe(TorchFunctionMode):
    """One probing run: hooks on the candidates, and a mode that watches the uses of the candidates' outputs.

    Attributes:
        findings: The result for each candidate.
        boundaries: The hidden states that candidates returned.
        failed: The candidate in which an error ended the run; None without an error.
    """

    def __init__(self, candidates: dict[str, nn.Module]) -> None:
        super().__init__()
        self.findings = {name: Finding() for name in candidates}
        self.boundaries: list[Boundary] = []
        self.failed: str | None = None
        self._candidates = candidates
        self._foreign: dict[str, list[StreamModule]] = {name: [] for name in candidates}
        self._entered: list[tuple[LayerPlan, EveryRoute]] = []

    def watch(self, run: Callable[[], object]) -> None:
        """Call `run` with the hooks; an error inside a candidate becomes the candidate's complaint."""
        handles = []
        for name, module in self._candidates.items():
            handles.append(module.register_forward_pre_hook(self._make_begin(name), with_kwargs=True))
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
            message = (str(error).strip().splitlines() or [""])[0]
            complaint = f"raises {type(error).__name__} when its hidden state is followed ({message})"
            self.findings[self.failed].complaint = complaint
        finally:
            for handle in handles:
                handle.remove()

    def _make_begin(self, name: str) -> Callable[..., Any]:
        def begin(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
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

    def _end(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        if not self._entered or self._candidates[self._entered[-1][0].name] is not module:
            return None
        plan, route = self._entered.pop()
        finding = self.findings[plan.name]
        streams, leaves = find_streams(output, route)
        complaint = route.complaint if route.additions else ""
        if streams is None or complaint:
            if streams is None and route.additions and not complaint:
                complaint = "returns something that the additions to its hidden state do not lead to"
            finding.complaint = finding.complaint or complaint
            return replace_entries(output, {})
        with torch._C.DisableTorchFunction():
            x = streams.x.squeeze(-2)
        met = tuple(foreign.name for foreign in self._foreign[plan.name] if foreign.met)
        plan = dataclasses.replace(plan, steps=streams.trail, leaves=leaves, modules=met)
        finding.only_adds |= plan.additions > 0 and not route.reads
        if plan.additions and route.reads:
            finding.plans.append(plan)
            self.boundaries.append(Boundary(x, (plan.name, finding.calls)))
        return plan.with_leaving(output, x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.boundaries and getattr(func, "__name__", "") != "__get__":
            values = tensors_in([*args, *(kwargs or {}).values()])
            for boundary in self.boundaries:
                boundary.used |= result is not boundary.tensor and any(value is boundary.tensor for value in values)
        return result


def plan_entry(name: str, module: nn.Module, args: Args, kwargs: Kwargs) -> LayerPlan | None:
    """Return a plan whose hidden state is a candidate's first floating-point argument [..., d]; None without one."""
    arguments: list[tuple[int | None, str | None, object]] = [(index, None, value) for index, value in enumerate(args)]
    arguments += [(None, key, value) for key, value in kwargs.items()]
    for position, keyword, value in arguments:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 2:
            names = list(inspect.signature(module.forward).parameters)
            if position is not None:
                keyword = names[position] if position < len(names) else None
            elif keyword in names:
                position = names.index(keyword)
            kind = type(module).__name__
            return LayerPlan(name, position, keyword, value.ndim, value.shape[-1], kind=kind)
    return None


def find_streams(output: Any, route: Route) -> tuple[Streams | None, int | str | None]:
    """Return a route's streams in a layer's output, and their index or key; None for each that does not exist."""
    if isinstance(output, Streams):
        return output, None
    pairs: Any = output.items() if isinstance(output, dict) else ()
    if isinstance(output, tuple | list):
        pairs = enumerate(output)
    for key, value in pairs:
        if isinstance(value, Streams) and value.route is route:
            return value, key
    return None, None
