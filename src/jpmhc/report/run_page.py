"""Write the HTML page about one run, or about several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jpmhc.files import JsonObject
from jpmhc.report.arc_answers import show_answers
from jpmhc.report.charts import DASHES, Axis, Chart, Dashes, Line
from jpmhc.report.page import Picture, Section, Table, render_page, show_matrix
from jpmhc.report.run_record import RunRecord, flatten_options, to_number
from jpmhc.report.style import PLAIN, colour_of

_STEP = Axis("step", whole=True)
MOST = 48  # the most runs of a page
_LONGEST = 400  # the most characters of an option's value

# Charts for each kind of logged line: title, number's name in the log, axis label, whether the axis is logarithmic.
_CHARTS = {
    "train": (
        ("training loss", "loss", "loss of a step", True),
        ("training rows solved exactly", "exact_accuracy", "share of halted rows", False),
        ("training tokens right", "token_accuracy", "share of tokens", False),
        ("gradient norm", "gradient_norm", "norm of the dense gradient", True),
        ("throughput", "sequences_per_second", "sequences per second", False),
        ("supervision steps used", "supervision_steps", "steps per halted row", False),
    ),
    "evaluate": (
        ("test loss", "lm_loss", "mean loss of a token", True),
        ("test rows solved exactly", "exact_accuracy", "share of rows", False),
        ("test tokens right", "token_accuracy", "share of tokens", False),
        ("tests solved in one attempt", "pass@1", "pass@1 by vote", False),
        ("tests solved in two attempts", "pass@2", "pass@2 by vote", False),
    ),
}
_OF_HALTED = ("exact_accuracy", "token_accuracy", "supervision_steps")
_MOST_MAPS = 24  # the most heat maps of a section
_MOST_STREAMS = 16  # of a heat map
_DECADES = 6  # the most decades of the axis of singular values
# The options that do not change the trained model, apart from its seed.
_WHERE = {"out", "resume", "seed", "preset", "device", "keep", "checkpoint_every"}
_SHOWN = 3  # the most options in a group's name
_LONGEST_NAMED = 60  # the most characters of an option's value in a group's name
_SCORES = ("exact_accuracy", "token_accuracy", "pass@1", "pass@2", "pass@5", "pass@10")

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
    words += [f"{name.rpartition('.')[2]} {options.get(name, '–')[:_LONGEST_NAMED]}" for name in others[:_SHOWN]]
    if len(members) > 1:
        words.append(f"{len(members)} seeds")
    return ", ".join(words)


def render_runs(runs: Sequence[RunRecord]) -> str:
    """Return the HTML page of one or several runs."""
    if not 1 <= len(runs) <= MOST:
        raise ValueError(f"a page shows 1 to {MOST} runs, not {len(runs)}")
    names, groups = name_runs(runs), group_runs(runs)
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    notes = [f"{name}: {note}." for name, run in zip(names, runs) for note in run.notes]
    rates = Chart("learning rate", draw_lines(groups, find_rates), _STEP, Axis("rate of AdamAtan2"))
    training = [*draw_logged(groups, "train"), rates, _draw_layers(groups)]
    held_out = [*draw_logged(groups, "evaluate"), _draw_attempts(groups)]
    sections = [
        Section("Summary", notes, [_summarize(names, runs), *_tabulate_spread(groups)]),
        Section("Training", charts=training),
        Section("Evaluation", tables=_tabulate_evaluations(names, runs), charts=held_out),
        *(_show_mixing(group) for group in groups),
        *(show_answers(name, run.answered, len(runs)) for name, run in zip(names, runs)),
        _show_configuration(names, runs),
    ]
    several = any(len(group.runs) > 1 for group in groups)
    lead = ["A line is the mean over seeds, and its band reaches from the lowest seed to the highest."] * several
    return render_page(title, lead, sections)


def name_runs(runs: Sequence[RunRecord]) -> list[str]:
    """Name each run by its folder, preceded by as many parent folders as the names need to differ."""
    parts = [run.folder.absolute().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def _summarize(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
    heading = ["run", "mixer", "streams", "task", "seed", "steps", "loss", "test rows exact", "test tokens right"]
    rows = []
    for name, run in zip(names, runs):
        model, done = run.config["model"], int(run.series("train", "step")[1][-1])
        settings = (model.get("streams", "–"), run.config["task"].get("kind", "–"), run.config.get("seed", "–"))
        row = [name, run.mixer or "plain residual", *map(str, settings), f"{done} of {run.config.get('steps', '?')}"]
        row += [_number(run.last("train", "loss"))]
        row += [_share(run.last("evaluate", key)) for key in ("exact_accuracy", "token_accuracy", "pass@2")]
        rows.append([*row, _number(run.last("train", "sequences_per_second"))])
    return _drop_empty([*heading, "pass@2", "sequences/s"], rows, 9, "The last numbers that were logged.")


def _drop_empty(heading: Sequence[str], rows: Sequence[Sequence[str]], first: int, note: str) -> Table:
    """Return a table without empty columns; columns before number `first` always stay."""
    columns = [k for k in range(len(heading)) if k < first or any(row[k] != "–" for row in rows)]
    return Table([heading[k] for k in columns], [[row[k] for k in columns] for row in rows], note)


def _tabulate_spread(groups: Sequence[RunGroup]) -> list[Table]:
    """Return a table of means and standard deviations over seeds, or no table if each group has one run."""
    if all(len(group.runs) == 1 for group in groups):
        return []
    columns: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("loss", "train", "loss", _number),
        ("test loss", "evaluate", "lm_loss", _number),
        ("test rows exact", "evaluate", "exact_accuracy", _share),
        ("test tokens right", "evaluate", "token_accuracy", _share),
        ("pass@2", "evaluate", "pass@2", _share),
    ]
    rows = []
    for group in groups:
        row = [group.name]
        for _, kind, key, write in columns:
            values = np.array([run.last(kind, key) for run in group.runs])
            mean, spread = write(float(values.mean())), float(values.std(ddof=1)) if len(values) > 1 else math.nan
            digits = ".1%" if write is _share else ".1g"
            row.append(mean if mean == "–" or math.isnan(spread) else f"{mean} ± {spread:{digits}}")
        rows.append(row)
    note = "Mean and standard deviation over seeds, of the last numbers that each run has logged."
    return [_drop_empty(["configuration", *(name for name, *_ in columns)], rows, 1, note)]


def draw_logged(groups: Sequence[RunGroup], kind: str) -> list[Chart]:
    """Return charts, over the steps, of the numbers in the log's lines of one kind, "train" or "evaluate"."""
    return [
        Chart(title, draw_lines(groups, _logged(kind, key)), _STEP, Axis(label, logarithmic))
        for title, key, label, logarithmic in _CHARTS[kind]
    ]


def _logged(kind: str, key: str) -> Series:
    """Return a function from a run to the steps and values of the number `key` in log lines of a kind.

    Training accuracies of steps in which no row halted are left out.
    """

    def series(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        steps, values = run.series(kind, key)
        if kind == "train" and key in _OF_HALTED:
            halted = run.series(kind, "halted")[1]
            if len(halted) == len(values):
                return steps[halted > 0], values[halted > 0]
        return steps, values

    return series


def find_rates(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the logged steps and their learning rates; the base rate may change where the run was resumed."""
    steps, factor = run.series("train", "rate")
    base = np.full(len(steps), to_number(run.config.get("lr")))
    for line in reversed(run.of_kind("resume")):
        changes = line.get("changes")
        for change in changes if isinstance(changes, list) else []:
            if isinstance(change, dict) and change.get("name") == "lr":
                base[steps <= to_number(line["step"])] = to_number(change.get("there"))
    return steps, factor * base


def _draw_layers(groups: Sequence[RunGroup]) -> Chart:
    """Return a chart of each layer's gradient norm, averaged over the last tenth of the log."""
    layers: list[str] = []
    lines = []
    for group in groups:
        logged = [line.get("layer_gradient_norms") for line in group.runs[0].of_kind("train")]
        norms = [one for one in logged if isinstance(one, dict)]
        if norms:
            layers = max(layers, list(map(str, norms[-1])), key=len)
            recent = norms[-max(1, len(norms) // 10) :]
            means = [float(np.mean([to_number(one.get(layer)) for one in recent])) for layer in norms[-1]]
            lines.append(Line(group.name, range(1, len(means) + 1), means, group.colour, group.dashes))
    names = ", ".join(f"{number} {name}" for number, name in enumerate(layers[:24], 1))
    note = f"Mean over the last tenth of the log, first seed. {names}{' …' if len(layers) > 24 else ''}"
    y = Axis("norm of its gradient", True)
    return Chart("gradient norm by layer", lines, Axis("layer", whole=True), y, note=note)


def _draw_attempts(groups: Sequence[RunGroup]) -> Chart:
    """Return a chart of pass@k by k, from the last evaluation during training."""
    lines = []
    for group in groups:
        logged = group.runs[0].of_kind("evaluate")
        scores = {
            int(name[5:]): to_number(value)
            for name, value in (logged[-1] if logged else {}).items()
            if name.startswith("pass@") and name[5:].isdigit() and int(name[5:]) > 0
        }
        if scores:
            order = sorted(scores)
            lines.append(Line(group.name, order, [scores[k] for k in order], group.colour, group.dashes))
    x, y = Axis("attempts k", True), Axis("share of tests", limits=(0.0, 1.0))
    note = "Last evaluation during training, first seed."
    return Chart("tests solved in k attempts", lines, x, y, note=note)


def _tabulate_evaluations(names: Sequence[str], runs: Sequence[RunRecord]) -> list[Table]:
    """Return a table of the results that `jpmhc evaluate` wrote, or no table without results."""
    rows = []
    for name, run in zip(names, runs):
        for file, evaluation in run.evaluations.items():
            for result in evaluation["results"]:
                metrics = result.get("metrics") if isinstance(result, dict) else None
                if not isinstance(metrics, dict):
                    continue
                errors = metrics.get("standard_error") or {}
                cells = [
                    _share(to_number(metrics.get(key)))
                    + (f" ± {_share(to_number(errors[key]))}" if key in errors else "")
                    for key in _SCORES
                ]
                rows.append([f"{name}: {file}", str(result.get("step", "–")), str(result.get("tests", "–")), *cells])
    heading = ["evaluation", "step", "tests", *(key.replace("_", " ") for key in _SCORES)]
    note = "± is the error of drawing variants." if any("±" in cell for row in rows for cell in row) else ""
    return [_drop_empty(heading, rows, 1, note)] if rows else []


def _show_mixing(group: RunGroup) -> Section:
    """Return the section about a group's skips; the section is empty if the first run logged no "mixing" lines."""
    logged = group.runs[0].of_kind("mixing")
    if not logged:
        return Section("")
    last = logged[-1]
    text = f"At step {last['step']}, averaged over tokens" + (", first seed." if len(group.runs) > 1 else ".")
    charts = [_draw_product(group, last), *_draw_history(group)]
    return Section(f"Skips: {group.name}", [text], _tabulate_mixing(last), charts, _show_maps(last))


def _show_maps(last: JsonObject) -> list[tuple[str, list[Picture]]]:
    skips = last.get("skips")
    maps = [
        show_matrix(str(name), [[to_number(value) for value in row] for row in matrix])
        for name, matrix in (skips.items() if isinstance(skips, dict) else ())
        if _is_matrix(matrix)
    ]
    more = f", the first {_MOST_MAPS} of {len(maps)}" if len(maps) > _MOST_MAPS else ""
    return [(f"Mean skip H of each connection{more}: to stream (row) from stream (column)", maps[:_MOST_MAPS])]


def _is_matrix(matrix: object) -> bool:
    if not isinstance(matrix, list) or not 1 <= len(matrix) <= _MOST_STREAMS:
        return False
    widths = {len(row) if isinstance(row, list) else 0 for row in matrix}
    return len(widths) == 1 and 1 <= widths.pop() <= _MOST_STREAMS


def _tabulate_mixing(last: JsonObject) -> list[Table]:
    distance, violation = (last.get(key) for key in ("distance_to_identity", "violation"))
    if not isinstance(distance, dict) or not isinstance(violation, dict):
        return []
    rows = [
        [str(name), f"{to_number(value):.3g}", f"{to_number(violation.get(name)):.1e}"]
        for name, value in distance.items()
    ]
    return [Table(["connection", "distance of H to I", "violation of its set"], rows[:64])]


def _draw_product(group: RunGroup, last: JsonObject) -> Chart:
    """Return a chart with one line per singular value of the product of the first k skips, over k.

    `last` is the last "mixing" line of the group's first run, which has the values for measured and for random skips.
    """
    lines: list[Line] = []
    for key, name, colour, dashes in (
        ("random_product_over_depth", "random skips of this mixer, as the theory draws them", PLAIN, (4.0, 3.0)),
        ("product_over_depth", "measured", group.colour, ()),
    ):
        values = last.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(row, list) for row in values):
            continue
        depth = range(1, len(values) + 1)
        for k in range(min(map(len, values))):
            lines.append(Line(name, depth, [to_number(row[k]) for row in values], colour, dashes))
    finite = np.array([value for line in lines for value in line.y if 0 < value < np.inf])
    top = max(2.0, float(finite.max(initial=0)) * 1.3)
    limits = max(min(0.5, float(finite.min(initial=1)) / 1.3), top * 10.0**-_DECADES), top
    note = "Mean over tokens of each singular value of H_k … H_1 within one supervision step."
    x, y = Axis("connections passed", whole=True), Axis("singular value", True, limits)
    return Chart("product of all skips over depth", lines, x, y, note=note)


def _draw_history(group: RunGroup) -> list[Chart]:
    share = Axis("share of singular values below 0.1", limits=(-0.02, 1.02))
    charts: tuple[tuple[str, Axis, Series], ...] = (
        ("distance of the skips to I", Axis("mean over connections"), _combine("distance_to_identity", np.mean)),
        ("violation of the set", Axis("largest of all connections", True), _combine("violation", np.max)),
        ("lost by the product of all skips", share, lambda run: run.series("mixing", "product_collapsed")),
    )
    return [Chart(title, draw_lines([group], series), _STEP, y) for title, y, series in charts]


def _combine(key: str, combine: Callable[[list[float]], float]) -> Series:
    """Return a function from a run to the steps and values of the number `key`, combined over all connections."""

    def series(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        logged = [line for line in run.of_kind("mixing") if isinstance(line.get(key), dict) and line[key]]
        values = [float(combine([to_number(value) for value in line[key].values()])) for line in logged]
        return np.array([line["step"] for line in logged], dtype=float), np.array(values)

    return series


def _show_configuration(names: Sequence[str], runs: Sequence[RunRecord]) -> Section:
    options = [{name: value[:_LONGEST] for name, value in flatten_options(run.config).items()} for run in runs]
    differing = list_differing(options) if len(runs) > 1 else []
    tables = []
    if differing:
        rows = [[name, *(one.get(name, "–") for one in options)] for name in differing]
        tables.append(Table(["option", *names], rows, "Options that differ; all others are the same."))
    keys = ("jpmhc", "torch", "python", "commit", "device", "processes")
    starts = []
    for name, run in zip(names, runs):
        for line in run.of_kind("start"):
            cells = [str(line.get(key) or "–")[:_LONGEST] for key in keys]
            command = _name_program(str(line.get("command") or "–"))[:_LONGEST]
            starts.append([name, str(line["step"]), *cells, command])
    if starts:
        note = "A plus after the commit: the source had been changed since."
        tables.append(Table(["run", "from step", *keys, "command"], starts, note))
    folded = [
        (f"Configuration of {name}", "\n".join(f"{option} = {value}" for option, value in one.items()))
        for name, one in zip(names, options)
    ]
    return Section("Configuration", tables=tables, folded=folded)


def _name_program(command: str) -> str:
    """Return a command line without the folder of the program `jpmhc`."""
    program, space, rest = command.partition(" ")
    known = {"__main__.py": "python -m jpmhc", "jpmhc": "jpmhc"}
    return known.get(program.rpartition("/")[2], program) + space + rest


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"
