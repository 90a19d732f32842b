"""Runs that differ by their seed alone belong together: one line on a chart, with the spread of the seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpmhc.report.run_record import RunRecord, flatten_options
from jpmhc.report.style import colour_of
from jpmhc.report.svg import Line

# Options that say where and how a run was done, not what was trained.
_WHERE = {"out", "resume", "seed", "preset", "device", "keep", "checkpoint_every"}
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2")
_SHOWN = 3  # options in a name
_LONGEST = 60  # characters of a value

Series = Callable[[RunRecord], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one configuration with different seeds.

    Attributes:
        name: What legends call it.
        runs: The runs.
        colour: The colour of their mixer.
        dash: Tells it from another group of the same mixer.
    """

    name: str
    runs: Sequence[RunRecord]
    colour: str
    dash: str

    def line(self, series: Series, name: str | None = None) -> Line | None:
        """Return a line of a number over steps: of several seeds the mean, with a band from lowest to highest.

        Args:
            series: Gives the steps and the numbers of one run.
            name: Another name for the legend.
        """
        found = [pair for pair in map(series, self.runs) if len(pair[0])]
        if not found:
            return None
        name = name or self.name
        if len(found) == 1:
            return Line(name, *found[0], self.colour, self.dash)  # type: ignore[arg-type]
        common = np.array(sorted(set.intersection(*(set(steps.tolist()) for steps, _ in found))))
        if not len(common):
            return Line(name, *found[0], self.colour, self.dash)  # type: ignore[arg-type]
        values = np.stack([values[np.isin(steps, common)][: len(common)] for steps, values in found])
        ends = values.min(0).tolist(), values.max(0).tolist()
        return Line(name, common.tolist(), values.mean(0).tolist(), self.colour, self.dash, *ends)


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Gather runs whose options are the same but for the seed, in the order in which they are named."""
    groups: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(_what_was_trained(run).items())), []).append(run)
    differing = list_differing([dict(key) for key in groups])
    names = [_name_group(dict(key), members, differing) for key, members in groups.items()]
    found: list[RunGroup] = []
    for name, members in zip(names, groups.values()):
        if names.count(name) > 1:
            name = f"{name} ({members[0].folder.name})"
        mixer = members[0].mixer
        alike = sum(one.runs[0].mixer == mixer for one in found)
        found.append(RunGroup(name, members, colour_of(mixer), _DASHES[alike % len(_DASHES)]))
    return found


def list_differing(options: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of the options that are not the same everywhere, in their order."""
    names = dict.fromkeys(name for one in options for name in one)
    return [name for name in names if len({one.get(name) for one in options}) > 1]


def _what_was_trained(run: RunRecord) -> dict[str, str]:
    return {name: value for name, value in flatten_options(run.config) if name not in _WHERE}


def _name_group(options: dict[str, str], members: Sequence[RunRecord], differing: Sequence[str]) -> str:
    mixer, streams = members[0].mixer, options.get("model.streams")
    words = [f"{mixer}, {streams} streams" if mixer is not None else "plain residual"]
    others = [name for name in differing if name not in ("model.mixer", "model.streams")]
    words += [f"{name.rpartition('.')[2]} {options.get(name, '–')[:_LONGEST]}" for name in others[:_SHOWN]]
    if len(members) > 1:
        words.append(f"{len(members)} seeds")
    return ", ".join(words)
