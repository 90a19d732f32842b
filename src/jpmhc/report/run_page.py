"""The page of one run, or of several side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from jpmhc.report.arc_pictures import draw_tests
from jpmhc.report.page import Folded, Picture, Section, Table, draw_chart, render_page
from jpmhc.report.run_groups import RunGroup, Series, group_runs, list_differing
from jpmhc.report.run_mixing import mixing_section
from jpmhc.report.run_record import RunRecord, flatten_options, to_number
from jpmhc.report.svg import Axis, Line

_STEP = Axis("step", whole=True)
_LAYER = Axis("layer", whole=True)
# The most runs of a page.
MOST = 48
_LONGEST = 400  # characters of an option's value

_TRAINING = (
    ("training loss", "loss", "loss of a step", True),
    ("training rows solved exactly", "exact_accuracy", "share of halted rows", False),
    ("training tokens right", "token_accuracy", "share of tokens", False),
    ("gradient norm", "gradient_norm", "norm of the dense gradient", True),
    ("throughput", "sequences_per_second", "sequences per second", False),
    ("supervision steps used", "supervision_steps", "steps per halted row", False),
)
_HELD_OUT = (
    ("test loss", "lm_loss", "mean loss of a token", True),
    ("test rows solved exactly", "exact_accuracy", "share of rows", False),
    ("test tokens right", "token_accuracy", "share of tokens", False),
    ("tests solved in one attempt", "pass@1", "pass@1 by vote", False),
    ("tests solved in two attempts", "pass@2", "pass@2 by vote", False),
)
_OF_HALTED = ("exact_accuracy", "token_accuracy", "supervision_steps")


def render_runs(runs: Sequence[RunRecord]) -> str:
    """Return the HTML page of one or several runs."""
    if not 1 <= len(runs) <= MOST:
        raise ValueError(f"a page shows 1 to {MOST} runs, not {len(runs)}")
    names, groups = name_runs(runs), group_runs(runs)
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    notes = [f"{name}: {note}." for name, run in zip(names, runs) for note in run.notes]
    sections = [
        Section("Summary", notes, [_summary(names, runs), *_tabulate_spread(groups)]),
        Section("Training", (), (), [("", _charts(groups, "train", _TRAINING) + _rates_and_layers(groups))]),
        Section(
            "Evaluation",
            (),
            _evaluations(names, runs),
            [("", _charts(groups, "evaluate", _HELD_OUT) + _attempts(groups))],
        ),
        *(mixing_section(group) for group in groups),
        *(draw_tests(name, run.votes, len(runs)) for name, run in zip(names, runs)),
        _configuration(names, runs),
    ]
    return render_page(title, _describe(groups), sections)


def name_runs(runs: Sequence[RunRecord]) -> list[str]:
    """Name every run by its folder, with as many folders above it as it takes to tell the names apart."""
    parts = [run.folder.absolute().parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return names


def _describe(groups: Sequence[RunGroup]) -> list[str]:
    if any(len(group.runs) > 1 for group in groups):
        return ["A line is the mean over seeds, and its band reaches from the lowest seed to the highest."]
    return []


def _summary(names: Sequence[str], runs: Sequence[RunRecord]) -> Table:
    passes = any(run.series("evaluate", "pass@2")[1].size for run in runs)
    heading = ["run", "mixer", "streams", "task", "seed", "steps", "loss", "test rows exact", "test tokens right"]
    heading += ["pass@2"] if passes else []
    rows = []
    for name, run in zip(names, runs):
        model, done = run.config["model"], int(run.series("train", "step")[1][-1])
        row = [
            name,
            run.mixer or "plain residual",
            str(model.get("streams", "–")),
            str(run.config["task"].get("kind", "–")),
        ]
        row += [str(run.config.get("seed", "–")), f"{done} of {run.config.get('steps', '?')}"]
        row += [_number(run.last("train", "loss"))]
        row += [_share(run.last("evaluate", key)) for key in ("exact_accuracy", "token_accuracy")]
        rows.append(
            row
            + ([_share(run.last("evaluate", "pass@2"))] if passes else [])
            + [_number(run.last("train", "sequences_per_second"))]
        )
    return Table([*heading, "sequences/s"], rows, "The last numbers that were logged.")


def _tabulate_spread(groups: Sequence[RunGroup]) -> list[Table]:
    """Return the table of means and standard deviations over seeds, where there are several."""
    if all(len(group.runs) == 1 for group in groups):
        return []
    columns: list[tuple[str, str, str, Callable[[float], str]]] = [
        ("loss", "train", "loss", _number),
        ("test loss", "evaluate", "lm_loss", _number),
        ("test rows exact", "evaluate", "exact_accuracy", _share),
        ("test tokens right", "evaluate", "token_accuracy", _share),
        ("pass@2", "evaluate", "pass@2", _share),
    ]
    columns = [c for c in columns if any(run.series(c[1], c[2])[1].size for group in groups for run in group.runs)]
    rows = []
    for group in groups:
        row = [group.name]
        for _, kind, key, write in columns:
            values = np.array([run.last(kind, key) for run in group.runs])
            spread = f" ± {_spread_text(float(values.std(ddof=1)), write is _share)}" if len(values) > 1 else ""
            row.append(write(float(values.mean())) + spread)
        rows.append(row)
    note = "Mean and standard deviation over seeds, of the last numbers that each run has logged."
    return [Table(["configuration", *(name for name, *_ in columns)], rows, note)]


def _charts(groups: Sequence[RunGroup], kind: str, charts: Sequence[tuple[str, str, str, bool]]) -> list[Picture]:
    found = []
    for title, key, label, logarithmic in charts:
        lines = [line for group in groups if (line := group.line(_logged(kind, key))) is not None]
        axis = Axis(label, logarithmic)
        if lines:
            found.append(draw_chart(title, lines, _STEP, axis))
    return found


def _logged(kind: str, key: str) -> Series:
    """Return what gives a logged number; accuracies of a step in which no row halted are no measurement."""

    def series(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        steps, values = run.series(kind, key)
        if kind == "train" and key in _OF_HALTED:
            halted = run.series(kind, "halted")[1]
            if len(halted) == len(values):
                return steps[halted > 0], values[halted > 0]
        return steps, values

    return series


def find_rates(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and the learning rates there, also before a resumption that changed the base rate."""
    steps, factor = run.series("train", "rate")
    base = np.full(len(steps), to_number(run.config.get("lr")))
    for line in reversed(run.of_kind("resume")):
        changes = line.get("changes")
        for change in changes if isinstance(changes, list) else []:
            if isinstance(change, dict) and change.get("name") == "lr":
                base[steps <= to_number(line["step"])] = to_number(change.get("there"))
    return steps, factor * base


def _rates_and_layers(groups: Sequence[RunGroup]) -> list[Picture]:
    found = []
    lines = [line for group in groups if (line := group.line(find_rates)) is not None]
    if lines:
        found.append(draw_chart("learning rate", lines, _STEP, Axis("rate of AdamAtan2")))
    layers: list[str] = []
    lines = []
    for group in groups:
        logged = [
            line["layer_gradient_norms"] for line in group.runs[0].of_kind("train") if "layer_gradient_norms" in line
        ]
        logged = [norms for norms in logged if isinstance(norms, dict)]
        if logged:
            layers = max(layers, list(map(str, logged[-1])), key=len)
            recent = logged[-max(1, len(logged) // 10) :]
            means = [float(np.mean([to_number(norms.get(layer)) for norms in recent])) for layer in logged[-1]]
            lines.append(Line(group.name, list(range(1, len(means) + 1)), means, group.colour, group.dash))
    if lines:
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(layers[:24], 1))
        note = f"Mean over the last tenth of the log, first seed. {shown}{' …' if len(layers) > 24 else ''}"
        found.append(draw_chart("gradient norm by layer", lines, _LAYER, Axis("norm of its gradient", True), note))
    return found


def _attempts(groups: Sequence[RunGroup]) -> list[Picture]:
    """Draw pass@k over k, of the last evaluation."""
    lines = []
    for group in groups:
        logged = group.runs[0].of_kind("evaluate")
        found = {
            int(name[5:]): to_number(value)
            for name, value in (logged[-1] if logged else {}).items()
            if name.startswith("pass@") and name[5:].isdigit() and int(name[5:]) > 0
        }
        if found:
            order = sorted(found)
            lines.append(Line(group.name, order, [found[k] for k in order], group.colour, group.dash))
    if not lines:
        return []
    axis = Axis("share of tests", limits=(0.0, 1.0))
    note = "Last evaluation during training, first seed."
    return [draw_chart("tests solved in k attempts", lines, Axis("attempts k", True), axis, note)]


def _evaluations(names: Sequence[str], runs: Sequence[RunRecord]) -> list[Table]:
    """Return the table of what `jpmhc evaluate` wrote."""
    keys = ("exact_accuracy", "token_accuracy", "pass@1", "pass@2", "pass@5", "pass@10")
    rows = []
    for name, run in zip(names, runs):
        for file, found in run.evaluations.items():
            for result in found["results"]:
                metrics = result.get("metrics") if isinstance(result, dict) else None
                if not isinstance(metrics, dict):
                    continue
                errors = metrics.get("standard_error") or {}
                cells = [
                    _share(to_number(metrics.get(key)))
                    + (f" ± {_share(to_number(errors[key]))}" if key in errors else "")
                    for key in keys
                ]
                rows.append([f"{name}: {file}", str(result.get("step", "–")), str(result.get("tests", "–")), *cells])
    used = [k for k in range(3 + len(keys)) if any(row[k] != "–" for row in rows)]
    heading = ["evaluation", "step", "tests", *(key.replace("_", " ") for key in keys)]
    if not rows:
        return []
    return [
        Table(
            [heading[k] for k in used], [[row[k] for k in used] for row in rows], "± is the error of drawing variants."
        )
    ]


def _configuration(names: Sequence[str], runs: Sequence[RunRecord]) -> Section:
    options = [{name: value[:_LONGEST] for name, value in flatten_options(run.config)} for run in runs]
    differing = list_differing(options) if len(runs) > 1 else []
    tables = []
    if differing:
        rows = [[name, *(one.get(name, "–") for one in options)] for name in differing]
        tables.append(Table(["option", *names], rows, "Options that differ; all others are the same."))
    starts = [
        [
            name,
            str(line["step"]),
            *(
                str(line.get(key) or "–")[:_LONGEST]
                for key in ("jpmhc", "torch", "python", "commit", "device", "processes")
            ),
            _name_program(str(line.get("command") or "–"))[:_LONGEST],
        ]
        for name, run in zip(names, runs)
        for line in run.of_kind("start")
    ]
    if starts:
        heading = ["run", "from step", "jpmhc", "torch", "python", "commit", "device", "processes", "command"]
        tables.append(Table(heading, starts, "A plus after the commit: the source had been changed since."))
    folded = [
        Folded(f"Configuration of {name}", "\n".join(f"{option} = {value}" for option, value in one.items()))
        for name, one in zip(names, options)
    ]
    return Section("Configuration", (), tables, (), folded)


def _name_program(command: str) -> str:
    """Return a command without the folder of this package or of its script."""
    program, space, rest = command.partition(" ")
    known = {"__main__.py": "python -m jpmhc", "jpmhc": "jpmhc"}
    return known.get(program.rpartition("/")[2], program) + space + rest


def _spread_text(value: float, is_share: bool) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}" if is_share else f"{value:.1g}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"
