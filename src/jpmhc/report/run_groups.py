"""Group runs that differ only in their seed, and draw each group as one line with a band for its seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpmhc.report.charts import DASHES, Dashes, Line
from jpmhc.report.run_record import RunRecord, flatten_options
from jpmhc.report.style import colour_of

# The options that do not change the trained model, apart from its seed.
_WHERE = {"out", "resume", "seed", "preset", "device", "keep", "checkpoint_every"}
_SHOWN = 3  # the most options in a group's name
_LONGEST = 60  # the most characters of an option's value in a group's name

Series = Callable[[RunRecord], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs of one configuration with different seeds."""

    name: str
    runs: Sequence[RunRecord]
    colour: str  # colour of the runs' mixer
    dashes: Dashes  # dashes that distinguish the group from other groups with the same mixer

    def line(self, series: Series) -> Line | None:
        """Return a line of the mean over seeds by step, with a band from the lowest to the highest seed.

        `series` returns the steps and values of one run.
        """
        logged = [pair for pair in map(series, self.runs) if len(pair[0])]
        if not logged:
            return None
        common = np.array(sorted(set.intersection(*(set(steps.tolist()) for steps, _ in logged))))
        if len(logged) == 1 or not len(common):
            return Line(self.name, *logged[0], self.colour, self.dashes)
        values = np.stack([values[np.isin(steps, common)][: len(common)] for steps, values in logged])
        return Line(self.name, common, values.mean(0), self.colour, self.dashes, values.min(0), values.max(0))


def draw_lines(groups: Sequence[RunGroup], series: Series) -> list[Line]:
    """Return one line for each group with values; `series` returns the steps and values of one run."""
    return [line for group in groups if (line := group.line(series)) is not None]


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group the runs with the same options apart from the seed, in the order of each group's first run."""
    members: dict[tuple[tuple[str, str], ...], list[RunRecord]] = {}
    for run in runs:
        options = {name: value for name, value in flatten_options(run.config).items() if name not in _WHERE}
        members.setdefault(tuple(sorted(options.items())), []).append(run)
    differing = list_differing([dict(key) for key in members])
    names = [_name_group(dict(key), own, differing) for key, own in members.items()]
    groups: list[RunGroup] = []
    for name, own in zip(names, members.values()):
        if names.count(name) > 1:
            name = f"{name} ({own[0].folder.name})"
        alike = sum(group.runs[0].mixer == own[0].mixer for group in groups)
        groups.append(RunGroup(name, own, colour_of(own[0].mixer), DASHES[alike % len(DASHES)]))
    return groups


def list_differing(options: Sequence[dict[str, str]]) -> list[str]:
    """Return the names of the options whose values differ between runs, in the order of the options."""
    names = dict.fromkeys(name for one in options for name in one)
    return [name for name in names if len({one.get(name) for one in options}) > 1]


def _name_group(options: dict[str, str], members: Sequence[RunRecord], differing: Sequence[str]) -> str:
    mixer, streams = members[0].mixer, options.get("model.streams")
    words = [f"{mixer}, {streams} streams" if mixer is not None else "plain residual"]
    others = [name for name in differing if name not in ("model.mixer", "model.streams")]
    words += [f"{name.rpartition('.')[2]} {options.get(name, '–')[:_LONGEST]}" for name in others[:_SHOWN]]
    if len(members) > 1:
        words.append(f"{len(members)} seeds")
    return ", ".join(words)
