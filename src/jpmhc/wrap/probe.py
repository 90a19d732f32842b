"""The search for a model's residual layers by probing runs.

In a probing run the model computes once with the hidden state of every candidate for a layer replaced by an object that
follows what is done to it: one stream with plain additions, so that the numbers stay the same. A candidate whose output
is that object is a residual layer.
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

# Errors that a computation may raise when it meets an object instead of a tensor. The plain run comes first, so that
# the caller's own errors have been raised there.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ONLY_ADDS = "computes nothing from its hidden state and only adds to it: the module that calls it is the layer"
Descent = Callable[[nn.Module, str], Iterator[list[str]]]


class PlainResidual:
    """The connection of one stream that is x + y."""

    def read(self, x: Tensor) -> tuple[Tensor, None]:
        return x.squeeze(-2), None

    def write(self, x: Tensor, y: Tensor, state: None) -> Tensor:
        return x + y.unsqueeze(-2)


class EveryRoute(Route):
    """A route that every operation carries on, whatever becomes of its result.

    Attributes:
        additions: The number of additions.
        reads: How often something was computed from the hidden state.
        complaint: An operation that cannot be followed; "" if there is none.
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
        calls: The number of its calls.
        plans: One for each call through which the residual stream could be followed.
        complaint: Why its residual additions cannot be followed; "" if they can, or if it has none.
        only_adds: Whether it adds to its hidden state without computing anything from it. A connection there would
            read nothing and would be reduced at once, so that it would do nothing.
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
    """A hidden state between two layers: the call that made it, the call that took it, whether it has other uses."""

    tensor: Tensor
    maker: tuple[str, int]
    taker: tuple[str, int] | None = None
    used: bool = False


class Probe(TorchFunctionMode):
    """The hooks of one probing run, and a watch on every torch function that is called in it.

    Attributes:
        findings: The result for each candidate.
        boundaries: The hidden states that candidates returned.
        failed: The candidate in which the run was interrupted by an error, or None.
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
        """Run the model under the hooks; an error inside a candidate becomes that candidate's complaint."""
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
    """Find the first argument of a candidate that can be a hidden state; None if there is none."""
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


def plan_layers(model: nn.Module, names: list[str] | None, run: Callable[[], object]) -> list[LayerPlan]:
    """Find the residual layers of a model and how the residual stream runs through them.

    Candidates are the elements of the model's lists of modules: the outermost lists first, and the lists inside them if
    these cannot be followed. A model without such lists may have its layers as attributes, or be one layer.

    Args:
        model: The model.
        names: The names of the layers to follow; None looks for them.
        run: Runs the model.

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
    """Probe groups of modules, and the groups inside those that cannot be followed, until nothing changes."""
    while groups:
        probe = _run_probe(model, groups, run)
        remaining: list[list[str]] = []
        for group in groups:
            if probe.failed is not None and probe.failed not in group:
                remaining.append(group)  # the run was interrupted elsewhere
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
    """Return the layers in a list of modules: none if only some of a kind can be followed, or their widths differ."""
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
    """Yield the outermost lists of modules in a module, each as the names of its elements."""
    children = [(f"{name}.{child}".lstrip("."), inner) for child, inner in module.named_children()]
    if isinstance(module, CONTAINERS) and children:
        yield [child for child, _ in children]
        return
    for child, inner in children:
        yield from _lists_in(inner, child)


def _children_of(module: nn.Module, name: str) -> Iterator[list[str]]:
    """Yield the children of a module that have children themselves, as one group."""
    group = [f"{name}.{child}".lstrip(".") for child, inner in module.named_children() if any(inner.children())]
    if group:
        yield group


def _nothing_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    return iter(())


def _chain_layers(probe: Probe) -> list[LayerPlan]:
    """Return one plan for each layer, with its place in a chain of layers that hand their hidden state to the next."""
    joined = [(b.maker, b.taker) for b in probe.boundaries if b.taker is not None and not b.used]
    plans = []
    for name, finding in probe.findings.items():
        if not finding.plans:
            continue
        if any(plan != finding.plans[0] for plan in finding.plans):
            raise ValueError(f"{name} cannot be wrapped: it computes differently from call to call")
        plans.append(finding.plans[0])
    # A layer that is called at several places of a chain cannot know its place: it stands alone.
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
    """Raise an error if neither a layer's residual additions can be followed nor those of the layers inside it."""
    for name, complaint in complaints.items():
        if not any(inner.startswith(f"{name}.") and finding.followed for inner, finding in findings.items()):
            raise ValueError(
                f"{_describe(model, name)} cannot be wrapped: it {complaint}; layers= names the layers to wrap instead"
            )


def _refuse_unfollowed(model: nn.Module, names: list[str], findings: dict[str, Finding]) -> None:
    """Raise an error if a layer in `layers=` cannot be followed, or has another width than the first."""
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
