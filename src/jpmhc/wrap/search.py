"""Search a model for its residual layers by probing runs, from its lists of modules down to the model itself.

A layer is followed if the probing run traces the residual stream through it, from its input to its output.
"""

import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from jpmhc.wrap.installation import CONTAINERS
from jpmhc.wrap.layers import LayerPlan
from jpmhc.wrap.probe import Finding, Probe
from jpmhc.wrap.streams import register_with_einops

ONLY_ADDS = "computes nothing from its hidden state and only adds to it: the module that calls it is the layer"
Descent = Callable[[nn.Module, str], Iterator[list[str]]]


def plan_layers(model: nn.Module, names: list[str] | None, run: Callable[[], object]) -> list[LayerPlan]:
    """Find a model's residual layers, and the path of the residual stream through each layer.

    Args:
        names: The names of the layers to follow; None to search for layers.
        run: Calls the model with its inputs.

    Returns:
        A plan for each layer.
    """
    register_with_einops()
    search = Search(model, run)
    return chain_layers(search.find_layers() if names is None else search.follow(names))


class Search:
    """The search for a model's layers.

    Attributes:
        complaints: By name, a clause on why the residual additions of a module cannot be followed.
        only_adding: The names of modules that add to their hidden state without computing anything from it.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object]) -> None:
        self.model, self.run = model, run
        self.complaints: dict[str, str] = {}
        self.only_adding: list[str] = []

    def find_layers(self) -> Probe:
        """Return a probing run in which all candidates are layers.

        The first candidates are the elements of the model's outermost lists of modules. Elements that cannot be
        followed are replaced by the elements of the lists inside them. If no list can be followed, the model's children
        are the candidates, and finally the model itself.
        """
        lists = list(_lists_in(self.model, ""))
        groups_of_children = list(_children_of(self.model, ""))
        for descend, groups in ((_lists_in, lists), (_children_of, groups_of_children), (_nothing_in, [[""]])):
            probe = self._descend(groups, descend)
            if probe is not None:
                return probe
        name = next(iter([*self.complaints, *self.only_adding]), lists[0][0] if lists else "")
        complaint = self.complaints.get(name, ONLY_ADDS if name in self.only_adding else "has none")
        raise ValueError(
            f"{type(self.model).__name__} has no layer with residual additions x + f(x) that can be followed: "
            f"{self._describe(name)} {complaint}"
        )

    def follow(self, names: list[str]) -> Probe:
        """Return a probing run with these layers as candidates. Raise an error if a layer cannot be followed."""
        probe = self._probe([names])
        for name in names:
            finding = probe.findings[name]
            complaint = finding.complaint or ONLY_ADDS * finding.only_adds
            if finding.followed:
                complaint = _describe_width(name, names[0], probe.findings)
            elif not complaint:
                missing = "makes no addition to its hidden state"
                complaint = missing if finding.calls else "is not reached by these inputs"
            if complaint:
                raise ValueError(f"{self._describe(name)} cannot be wrapped: it {complaint}")
        return probe

    def _probe(self, groups: list[list[str]]) -> Probe:
        probe = Probe({name: self.model.get_submodule(name) for group in groups for name in group})
        probe.watch(self.run)
        return probe

    def _descend(self, groups: list[list[str]], descend: Descent) -> Probe | None:
        """Return a probing run of modules that can all be followed.

        A module that cannot be followed is replaced by modules inside it. Return None if no module can be followed.

        Args:
            groups: The names of the first candidates, in groups such as the elements of one list.
            descend: Yields the groups inside a module.
        """
        while groups:
            probe = self._probe(groups)
            remaining: list[list[str]] = []
            for group in groups:
                if probe.failed is not None and probe.failed not in group:
                    remaining.append(group)  # an error outside the group ended the run
                    continue
                layers = self._followed_layers(group, probe.findings)
                remaining += [layers] if layers else []
                others = [name for name in group if name not in layers]
                remaining += [inner for name in others for inner in descend(self.model.get_submodule(name), name)]
            for name, finding in probe.findings.items():
                if finding.complaint:
                    self.complaints[name] = finding.complaint
                self.only_adding += [name] * finding.only_adds
            if remaining == groups and probe.failed is None:
                self._refuse_complaints(probe.findings)
                return probe
            groups = remaining
        return None

    def _followed_layers(self, group: list[str], findings: dict[str, Finding]) -> list[str]:
        """Return a group's layers; no layers if only some modules of a class can be followed, or if widths differ."""
        followed = [name for name in group if findings[name].followed]
        others = [name for name in group if name not in followed]
        if any(findings[name].complaint for name in others):
            return []
        kinds = {type(self.model.get_submodule(name)) for name in followed}
        for name in others:
            if type(self.model.get_submodule(name)) in kinds:
                if not findings[name].calls:
                    raise ValueError(f"{self._describe(name)} cannot be wrapped: these inputs do not reach it")
                return []
        for name in followed:
            findings[name].complaint = _describe_width(name, followed[0], findings)
            if findings[name].complaint:
                return []
        return followed

    def _refuse_complaints(self, findings: dict[str, Finding]) -> None:
        """Raise the error for a module that has a complaint and contains no module that can be followed."""
        for name, complaint in self.complaints.items():
            if not any(inner.startswith(f"{name}.") and finding.followed for inner, finding in findings.items()):
                raise ValueError(
                    f"{self._describe(name)} cannot be wrapped: it {complaint}; give the layers to wrap by layers="
                )

    def _describe(self, name: str) -> str:
        return f"{name or 'the model'} ({type(self.model.get_submodule(name)).__name__})"


def _describe_width(name: str, first: str, findings: dict[str, Finding]) -> str:
    """Return a clause that says how the hidden states of two layers differ in width; "" if they do not."""
    width, other = findings[name].plans[0].dim, findings[first].plans[0].dim
    return "" if width == other else f"has a hidden state of width {width} and {first} one of width {other}"


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
    group = [f"{name}.{child}".lstrip(".") for child, inner in module.named_children() if [*inner.children()]]
    if group:
        yield group


def _nothing_in(module: nn.Module, name: str) -> Iterator[list[str]]:
    return iter(())


def chain_layers(probe: Probe) -> list[LayerPlan]:
    """Return one plan per layer of a probing run, with the layers joined to chains that hand on streams.

    A plan's `first` is set if the layer gets a hidden state instead of streams, `last` if it returns a hidden state.
    """
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
