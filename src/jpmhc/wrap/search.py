"""The search for a model's residual layers, by probing runs, and the refusal of what cannot be followed."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from jpmhc.wrap.plan import LayerPlan
from jpmhc.wrap.probe import Finding, Probe

Run = Callable[[], Any]
Descent = Callable[[nn.Module, str], Iterator[list[str]]]
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def plan_layers(model: nn.Module, names: list[str] | None, run: Run) -> list[LayerPlan]:
    """Find the residual layers of a model and how the residual stream runs through them.

    Candidates are the elements of the model's lists of modules, the outermost lists first; where they cannot be
    followed, the lists inside them. A model without any may have its layers as single attributes, or be one layer.

    Args:
        model: The model.
        names: The names of the layers to follow; None looks for them.
        run: Runs the model.

    Returns:
        A plan for each layer.
    """
    complaints: dict[str, str] = {}
    if names is not None:
        probe = _probe(model, [names], run)
        _refuse_unfollowed(model, names, probe.findings)
        return _chain_layers(probe)
    lists = list(_lists_in(model, ""))
    for descend, groups in ((_lists_in, lists), (_children_of, list(_children_of(model, ""))), (_nothing_in, [[""]])):
        found = _search(model, groups, descend, run, complaints)
        if found is not None:
            return _chain_layers(found)
    name = next(iter(complaints), lists[0][0] if lists else "")
    said = f"{_describe(model, name)} {complaints.get(name, 'has none')}"
    raise ValueError(
        f"{type(model).__name__} has no layer with residual additions x + f(x) that can be followed: {said}"
    )


def _probe(model: nn.Module, groups: list[list[str]], run: Run) -> Probe:
    probe = Probe({name: model.get_submodule(name) for group in groups for name in group})
    probe.watch(run)
    return probe


def _search(
    model: nn.Module, groups: list[list[str]], descend: Descent, run: Run, complaints: dict[str, str]
) -> Probe | None:
    """Probe groups of modules, and what is inside those that cannot be followed, until nothing changes."""
    while groups:
        probe = _probe(model, groups, run)
        remaining: list[list[str]] = []
        for group in groups:
            if probe.failed is not None and probe.failed not in group:
                remaining.append(group)  # the run broke off elsewhere
                continue
            kept = _kept(model, group, probe.findings)
            remaining += [kept] if kept else []
            remaining += [new for name in group if name not in kept for new in descend(model.get_submodule(name), name)]
        complaints |= {name: found.complaint for name, found in probe.findings.items() if found.complaint}
        if remaining == groups and probe.failed is None:
            _refuse_complaints(model, probe.findings, complaints)
            return probe
        groups = remaining
    return None


def _kept(model: nn.Module, group: list[str], findings: dict[str, Finding]) -> list[str]:
    """The elements of a list that are layers: none if only some of a kind can be followed, or their widths differ."""
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
            findings[name].complaint = _other_width(name, followed[0], findings)
            return []
    return followed


def _lists_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    """The outermost lists of modules in a module, each as the names of its elements."""
    children = [(f"{name}.{child}".lstrip("."), inner) for child, inner in module.named_children()]
    if isinstance(module, CONTAINERS) and children:
        yield [child for child, _ in children]
        return
    for child, inner in children:
        yield from _lists_in(inner, child)


def _children_of(module: nn.Module, name: str) -> Iterator[list[str]]:
    """The children of a module that have children themselves, as one group."""
    group = [f"{name}.{child}".lstrip(".") for child, inner in module.named_children() if any(inner.children())]
    if group:
        yield group


def _nothing_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    return iter(())


def _chain_layers(probe: Probe) -> list[LayerPlan]:
    """Make one plan for each layer, with its place in a chain of layers that hand their hidden state to the next."""
    joined = [(b.maker, b.taker) for b in probe.boundaries if b.taker is not None and not b.used]
    plans = []
    for name, finding in probe.findings.items():
        if not finding.plans:
            continue
        if any(plan != finding.plans[0] for plan in finding.plans):
            raise ValueError(f"{name} cannot be wrapped: it computes differently from call to call")
        plans.append(finding.plans[0])
    # A layer that is called at several places of a chain cannot know its place: it stands alone.
    places: dict[str, set[tuple[bool, bool]]] = {plan.name: set() for plan in plans}
    for plan in plans:
        for call in range(1, probe.findings[plan.name].calls + 1):
            here = (plan.name, call)
            places[plan.name].add(
                (any(here == taker for _, taker in joined), any(here == maker for maker, _ in joined))
            )
    single = {name for name, found in places.items() if len(found) > 1}
    joined = [(maker, taker) for maker, taker in joined if maker[0] not in single and taker[0] not in single]
    makers, takers = {maker[0] for maker, _ in joined}, {taker[0] for _, taker in joined}
    return [dataclasses.replace(plan, first=plan.name not in takers, last=plan.name not in makers) for plan in plans]


def _describe(model: nn.Module, name: str) -> str:
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def _refuse_complaints(model: nn.Module, findings: dict[str, Finding], complaints: dict[str, str]) -> None:
    """Refuse a model with a layer whose residual additions cannot be followed, nor those of layers inside it."""
    for name, complaint in complaints.items():
        if not any(inner.startswith(f"{name}.") and found.followed for inner, found in findings.items()):
            raise ValueError(
                f"{_describe(model, name)} cannot be wrapped: it {complaint}; layers= names the layers to wrap instead"
            )


def _refuse_unfollowed(model: nn.Module, names: list[str], findings: dict[str, Finding]) -> None:
    """Refuse layers that were asked for and cannot be followed, or are of different widths."""
    for name in names:
        found = findings[name]
        if not found.followed:
            what = found.complaint or (
                "makes no addition to its hidden state" if found.calls else "is not reached by these inputs"
            )
            raise ValueError(f"{_describe(model, name)} cannot be wrapped: it {what}")
        if found.plans[0].dim != findings[names[0]].plans[0].dim:
            raise ValueError(f"{_describe(model, name)} cannot be wrapped: it {_other_width(name, names[0], findings)}")


def _other_width(name: str, first: str, findings: dict[str, Finding]) -> str:
    widths = findings[name].plans[0].dim, findings[first].plans[0].dim
    return f"has a hidden state of width {widths[0]} and {first} one of width {widths[1]}"
