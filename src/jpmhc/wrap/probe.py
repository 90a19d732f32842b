"""Find a model's residual layers by probing runs.

In a probing run, the hidden state of every candidate for a layer is replaced by a `Streams` object of one stream with
plain additions, which records the operations on it without changing the numbers. A candidate that returns its object is
a residual layer.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jpmhc.wrap.installation import CONTAINERS
from jpmhc.wrap.layers import Args, Kwargs, LayerPlan, replace_entries
from jpmhc.wrap.stream_modules import StreamModule, foreign_modules
from jpmhc.wrap.streams import Route, Streams, StreamStep, Trail, register_with_einops

# The errors that code may raise if it gets a `Streams` object instead of a tensor. Errors of the model itself have been
# raised before, in the plain run.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ONLY_ADDS = "computes nothing from its hidden state and only adds to it: the module that calls it is the layer"
Descent = Callable[[nn.Module, str], Iterator[list[str]]]


class PlainResidual:
    """The connection of one stream that computes the plain addition x + y."""

    def read(self, x: Tensor) -> tuple[Tensor, None]:
        return x.squeeze(-2), None

    def write(self, x: Tensor, y: Tensor, state: None) -> Tensor:
        return x + y.unsqueeze(-2)


class EveryRoute(Route):
    """A route on which every operation carries the residual stream.

    Attributes:
        additions: The number of additions.
        reads: The number of other computations from the hidden state.
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
        complaint: A clause on why its residual additions cannot be followed; "" if they can, or if it has none.
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
    """A hidden state between two layers: the call that returned it, the call that took it, and if it has other uses."""

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
        """Run the model with the hooks; turn an error inside a candidate into the candidate's complaint."""
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
            self.findings[
                self.failed
            ].complaint = f"raises {type(error).__name__} when its hidden state is followed ({message})"
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
            values = [*args, *(kwargs or {}).values()]
            values += [entry for value in values if isinstance(value, tuple | list) for entry in value]
            for boundary in self.boundaries:
                boundary.used |= result is not boundary.tensor and any(value is boundary.tensor for value in values)
        return result


def plan_entry(name: str, module: nn.Module, args: Args, kwargs: Kwargs) -> LayerPlan | None:
    """Return a plan with the candidate's first argument that can be a hidden state; None if there is none."""
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
    """Return a route's streams in a layer's output, with their index or key in the output."""
    if isinstance(output, Streams):
        return output, None
    pairs: Any = output.items() if isinstance(output, dict) else ()
    if isinstance(output, tuple | list):
        pairs = enumerate(output)
    for key, value in pairs:
        if isinstance(value, Streams) and value.route is route:
            return value, key
    return None, None


def plan_layers(model: nn.Module, names: list[str] | None, run: Callable[[], object]) -> list[LayerPlan]:
    """Find a model's residual layers, and the path of the residual stream through each layer.

    Candidates are the elements of the model's outermost lists of modules, or of inner lists if those elements cannot be
    followed. Without followed lists, candidates are the model's children, and finally the model itself.

    Args:
        model: The model.
        names: The names of the layers to follow; None to search for layers.
        run: A function that runs the model.

    Returns:
        A plan for each layer.
    """
    register_with_einops()
    complaints: dict[str, str] = {}
    if names is not None:
        probe = _run_probe(model, [names], run)
        _refuse_unfollowed(model, names, probe.findings)
        return _chain_layers(probe)
    lists = list(_lists_in(model, ""))
    only_adding: dict[str, str] = {}
    for descend, groups in ((_lists_in, lists), (_children_of, list(_children_of(model, ""))), (_nothing_in, [[""]])):
        result = _search(model, groups, descend, run, complaints, only_adding)
        if result is not None:
            return _chain_layers(result)
    complaints |= only_adding
    name = next(iter(complaints), lists[0][0] if lists else "")
    raise ValueError(
        f"{type(model).__name__} has no layer with residual additions x + f(x) that can be followed: "
        f"{_describe(model, name)} {complaints.get(name, 'has none')}"
    )


def _run_probe(model: nn.Module, groups: Sequence[Sequence[str]], run: Callable[[], object]) -> Probe:
    probe = Probe({name: model.get_submodule(name) for group in groups for name in group})
    probe.watch(run)
    return probe


def _search(
    model: nn.Module,
    groups: list[list[str]],
    descend: Descent,
    run: Callable[[], object],
    complaints: dict[str, str],
    only_adding: dict[str, str],
) -> Probe | None:
    """Probe groups of modules, and replace modules that cannot be followed by groups inside them, until all can be."""
    while groups:
        probe = _run_probe(model, groups, run)
        remaining: list[list[str]] = []
        for group in groups:
            if probe.failed is not None and probe.failed not in group:
                remaining.append(group)  # an error outside the group ended the run
                continue
            layers = _followed_layers(model, group, probe.findings)
            remaining += [layers] if layers else []
            remaining += [
                inner for name in group if name not in layers for inner in descend(model.get_submodule(name), name)
            ]
        complaints |= {name: finding.complaint for name, finding in probe.findings.items() if finding.complaint}
        only_adding |= {name: ONLY_ADDS for name, finding in probe.findings.items() if finding.only_adds}
        if remaining == groups and probe.failed is None:
            _refuse_complaints(model, probe.findings, complaints)
            return probe
        groups = remaining
    return None


def _followed_layers(model: nn.Module, group: list[str], findings: dict[str, Finding]) -> list[str]:
    """Return a list's modules that are layers; none if only some of a class can be followed, or widths differ."""
    followed = [name for name in group if findings[name].followed]
    others = [name for name in group if name not in followed]
    if any(findings[name].complaint for name in others):
        return []
    for name in others:
        if any(type(model.get_submodule(name)) is type(model.get_submodule(like)) for like in followed):
            if not findings[name].calls:
                raise ValueError(f"{_describe(model, name)} cannot be wrapped: these inputs do not reach it")
            return []
    for name in followed[1:]:
        if findings[name].plans[0].dim != findings[followed[0]].plans[0].dim:
            findings[name].complaint = _describe_width(name, followed[0], findings)
            return []
    return followed


def _lists_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    """Yield the names of the elements of each outermost list of modules inside a module."""
    children = [(f"{name}.{child}".lstrip("."), inner) for child, inner in module.named_children()]
    if isinstance(module, CONTAINERS) and children:
        yield [child for child, _ in children]
        return
    for child, inner in children:
        yield from _lists_in(inner, child)


def _children_of(module: nn.Module, name: str) -> Iterator[list[str]]:
    """Yield one group: the names of a module's children that have children themselves."""
    group = [f"{name}.{child}".lstrip(".") for child, inner in module.named_children() if any(inner.children())]
    if group:
        yield group


def _nothing_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    return iter(())


def _chain_layers(probe: Probe) -> list[LayerPlan]:
    """Return one plan for each layer, marked as first or last if it begins or ends a chain of layers."""
    joined = [(b.maker, b.taker) for b in probe.boundaries if b.taker is not None and not b.used]
    plans = []
    for name, finding in probe.findings.items():
        if not finding.plans:
            continue
        if any(plan != finding.plans[0] for plan in finding.plans):
            raise ValueError(f"{name} cannot be wrapped: it computes differently from call to call")
        plans.append(finding.plans[0])
    # A layer whose calls differ in being first or last of a chain becomes a chain of its own.
    single = set()
    for plan in plans:
        calls = [(plan.name, number + 1) for number in range(probe.findings[plan.name].calls)]
        if len({(any(c == taker for _, taker in joined), any(c == maker for maker, _ in joined)) for c in calls}) > 1:
            single.add(plan.name)
    joined = [(maker, taker) for maker, taker in joined if maker[0] not in single and taker[0] not in single]
    makers, takers = {maker[0] for maker, _ in joined}, {taker[0] for _, taker in joined}
    return [dataclasses.replace(plan, first=plan.name not in takers, last=plan.name not in makers) for plan in plans]


def _describe(model: nn.Module, name: str) -> str:
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def _refuse_complaints(model: nn.Module, findings: dict[str, Finding], complaints: dict[str, str]) -> None:
    """Raise an error if residual additions can be followed neither in a layer nor in the layers inside it."""
    for name, complaint in complaints.items():
        if not any(inner.startswith(f"{name}.") and finding.followed for inner, finding in findings.items()):
            raise ValueError(
                f"{_describe(model, name)} cannot be wrapped: it {complaint}; layers= names the layers to wrap instead"
            )


def _refuse_unfollowed(model: nn.Module, names: list[str], findings: dict[str, Finding]) -> None:
    """Raise an error if a layer in `layers=` cannot be followed, or if its width differs from the first layer's."""
    for name in names:
        finding = findings[name]
        if not finding.followed:
            complaint = finding.complaint or ONLY_ADDS * finding.only_adds
            complaint = complaint or (
                "makes no addition to its hidden state" if finding.calls else "is not reached by these inputs"
            )
            raise ValueError(f"{_describe(model, name)} cannot be wrapped: it {complaint}")
        if finding.plans[0].dim != findings[names[0]].plans[0].dim:
            complaint = _describe_width(name, names[0], findings)
            raise ValueError(f"{_describe(model, name)} cannot be wrapped: it {complaint}")


def _describe_width(name: str, first: str, findings: dict[str, Finding]) -> str:
    widths = findings[name].plans[0].dim, findings[first].plans[0].dim
    return f"has a hidden state of width {widths[0]} and {first} one of width {widths[1]}"
