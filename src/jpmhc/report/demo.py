"""The demonstration's table for a terminal, its summary in five lines, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.table import Table as TerminalTable

from jpmhc.experiments.comparison.statistics import student_quantile
from jpmhc.experiments.demo import PLAIN, SHARES, DemoConfig, DemoRun, Spectra
from jpmhc.mixers import sample_skips
from jpmhc.report.charts import Axis, Chart, Line
from jpmhc.report.page import Section, Table, render_page, write_page
from jpmhc.report.style import INK, colour_of

_HEADING = ("model", "loss", "over plain", "weakest", "finished", "J 90 %", "theory", "J 10 %", "theory")
_ON_TERMINAL = 7  # the number of columns that fit into a terminal of 80 characters
_NOTE = (
    "loss: held-out squared error over the targets' variance, mean ± deviation of seeds; over plain: the same seed's "
    "difference; weakest: the weakest layer's gradient over the last layer's; finished: smallest singular value of the "
    "product of all skips, 1 if no difference between streams is lost; J: the singular value of the model's own "
    "Jacobian that 90 % (or 10 %) lie below, measured and predicted"
)


class _Group:
    """The runs of one mixer with different seeds, and their means."""

    def __init__(self, name: str, runs: Sequence[DemoRun]) -> None:
        self.name, self.runs = name, runs
        self.losses = np.array([run.losses[-1] for run in runs])
        self.gradients = np.array([run.gradients for run in runs])
        self.smallest_value = float(np.mean([run.product[-1] if run.product else np.nan for run in runs]))
        self.largest_value = float(np.mean([run.product[0] if run.product else np.nan for run in runs]))
        self.spectra = next((run.spectra for run in runs if run.spectra is not None), None)
        self.fresh = next((run.fresh for run in runs if run.fresh is not None), None)

    @property
    def weakest(self) -> float:
        """The smallest gradient of all layers divided by the last layer's gradient."""
        layers = self.gradients.mean(0)
        return float(layers.min() / layers[-1])

    @property
    def diverged(self) -> bool:
        return not np.isfinite(self.losses).all()


def _group(outcomes: Sequence[DemoRun]) -> list[_Group]:
    names = dict.fromkeys(outcome.name for outcome in outcomes)
    return [_Group(name, [o for o in outcomes if o.name == name]) for name in names]


def _spread(values: np.ndarray, form: str = ".3f") -> str:
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{spread}"


def _cells(group: _Group, plain: _Group) -> list[str]:
    if group.diverged:
        return [group.name, "diverged", *["–"] * (len(_HEADING) - 2)]
    over = "–" if group is plain else _spread(group.losses - plain.losses, "+.3f")
    spectra = group.spectra
    ends = ["–"] * 4
    if spectra is not None:
        ends = [
            f"{np.interp(p, SHARES, part):.2f}" for p in (0.9, 0.1) for part in (spectra.measured, spectra.predicted)
        ]
    return [group.name, _spread(group.losses), over, f"{group.weakest:.2f}", f"{group.smallest_value:.2g}", *ends]


def tabulate_outcomes(outcomes: Sequence[DemoRun], config: DemoConfig) -> TerminalTable:
    """Return a table for the terminal, with the plain residual network in the first row."""
    groups = _group(outcomes)
    table = TerminalTable(title=config.title, caption=_NOTE, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in _HEADING[:_ON_TERMINAL]:
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for group in groups:
        table.add_row(*_cells(group, groups[0])[:_ON_TERMINAL])
    return table


def sum_up(outcomes: Sequence[DemoRun], config: DemoConfig) -> list[str]:
    """Return five sentences that summarise the runs: loss, gradients, streams, theory, and a caution."""
    plain, *others = _group(outcomes)
    finished = [group for group in others if not group.diverged]
    lost = [group.name for group in others if group.diverged]
    verdicts = []
    for group in finished:
        differences = group.losses - plain.losses
        mean, count = differences.mean(), len(differences)
        if count == 1:
            verdicts.append(f"{group.name} {mean:+.3f}")
            continue
        reach = student_quantile(count - 1) * differences.std(ddof=1) / count**0.5
        word = ("lower" if mean < 0 else "higher") if abs(mean) > reach else "undecided"
        verdicts.append(f"{group.name} {word} ({mean:+.3f} ± {reach:.3f})")
    verdicts += [f"{name} diverged" for name in lost]
    how = "seed by seed with 95 % intervals" if config.seeds > 1 else "with one seed, which decides nothing"
    dips = {group.name: group.weakest for group in (plain, *finished)}
    after = [group.spectra.apart for group in (plain, *finished) if group.spectra is not None]
    before = float("nan") if plain.fresh is None else plain.fresh.apart
    collapsed = [group.name for group in finished if group.smallest_value < 0.1]
    low, high = min(after, default=np.nan), max(after, default=np.nan)
    with_modes = [group.spectra.apart_with_modes for group in (plain, *finished) if group.spectra is not None]
    return [
        f"1. Loss: plain {_spread(plain.losses)}. Beside it, {how}: {', '.join(verdicts)}.",
        f"2. Gradients: the weakest layer's gradient is this share of the last layer's: {_list(dips)}.",
        f"3. Streams: the product of {config.depth} skips keeps this share of the smallest difference between them: "
        f"{_list({group.name: group.smallest_value for group in finished})}. "
        + (f"Collapsed (below 0.1): {', '.join(collapsed)}." if collapsed else "Nothing has collapsed."),
        f"4. Theory: predicted and measured singular values of the model's own Jacobian are {before:.2f} (KS) apart "
        f"before training, and {low:.2f} to {high:.2f} after training: the theory takes the layers for independent, "
        "but training adds the same few matrices to all of them. With these matrices as measured, they are "
        f"{min(with_modes, default=np.nan):.2f} to {max(with_modes, default=np.nan):.2f} apart.",
        f"5. {_explain_lead(finished, plain)}This is one small task and {config.count_seeds()}: it shows what skips "
        "do, and does not rank mixers for your model; jpmhc recommend and docs/guides/which_mixer.md do that.",
    ]


def _explain_lead(groups: Sequence[_Group], plain: _Group) -> str:
    """Return a remark on mixers that beat the plain network and may scale the stream; empty if there are none."""
    leading = [one for one in groups if one.losses.mean() < plain.losses.mean() and _may_scale(one)]
    if not leading:
        return ""
    most = _list({one.name: one.largest_value for one in leading})
    return (
        "A mixer whose rows need not sum to one, and whose singular values are not bounded, may also scale the "
        f"residual stream (largest singular value of the product: {most}). Most of its lead in loss comes from that "
        "(docs/guides/command_line.md has the test), and nothing bounds it in a deeper model. "
    )


def _may_scale(group: _Group) -> bool:
    """Return whether the mixer's random skips have row sums other than 1 and singular values above 1."""
    streams = len(group.runs[0].start)
    skips = sample_skips(group.name, streams, (64,), generator=torch.Generator().manual_seed(0))
    moved, largest = (skips.sum(-1) - 1).abs().max(), torch.linalg.matrix_norm(skips, 2).max()
    return bool(moved > 1e-3 and largest > 1 + 1e-3)


def _list(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in values.items())


def write_demo_page(outcomes: Sequence[DemoRun], config: DemoConfig, path: Path) -> Path:
    """Write the demonstration's page, and return the file's path."""
    groups = _group(outcomes)
    rows = [_cells(group, groups[0]) for group in groups]
    spectra = [_draw_spectrum("before training, all models", PLAIN, groups[0].fresh)]
    spectra += [_draw_spectrum(f"{group.name}, trained", group.name, group.spectra) for group in groups]
    sections = [
        Section("In five lines", sum_up(outcomes, config)),
        Section("The numbers", tables=[Table(_HEADING, rows, _NOTE)]),
        Section(
            "The curves",
            ["A line is the mean over seeds, and its band reaches from the lowest seed to the highest."],
            charts=_draw_curves(groups),
        ),
        Section(
            "The model's own Jacobian, measured and predicted",
            [
                "The singular values of the map from hidden state to hidden state at one example of the first seed: "
                "measured, and predicted by the theory from the model's reads, writes and skips and from the singular "
                "values of its sublayers. Before training every model computes the same function, whatever its mixer."
            ],
            charts=spectra,
        ),
    ]
    return write_page(render_page("One deep stack, plain and with mixers", [config.title], sections), path)


def _draw_curves(groups: Sequence[_Group]) -> list[Chart]:
    """Return charts of the loss by step, the gradient by layer, and the singular values of the product of all skips."""
    learned = [group for group in groups if not group.diverged]
    losses = [_line(one, one.runs[0].steps, np.array([run.losses for run in one.runs])) for one in learned]
    layers = range(1, groups[0].gradients.shape[1] + 1)
    gradients = [_line(one, layers, one.gradients) for one in learned]
    ranks = range(1, len(groups[-1].runs[0].start) + 1)
    products = []
    for one in learned:
        if one.name != PLAIN:
            products.append(Line("before training", ranks, one.runs[0].start, colour_of(one.name), dashes=(3, 3)))
            products.append(_line(one, ranks, np.array([run.product for run in one.runs])))
    position = Axis("singular value, by size", limits=(0.5, len(ranks) + 0.5), whole=True)
    return [
        Chart("Loss", losses, Axis("step"), Axis("held-out error / variance", logarithmic=True)),
        Chart("Gradient at each layer's weights", gradients, Axis("layer"), Axis("gradient norm", logarithmic=True)),
        Chart("Product of all skips", products, position, Axis("size", logarithmic=True)),
    ]


def _line(group: _Group, x: Sequence[float], values: np.ndarray) -> Line:
    dashes = (6.0, 3.0) if group.name == PLAIN else ()
    return Line(group.name, x, values.mean(0), colour_of(group.name), dashes, values.min(0), values.max(0))


def _draw_spectrum(title: str, name: str, spectra: Spectra | None) -> Chart:
    """Return a chart of the measured and the predicted spectrum; the chart is empty without spectra."""
    x, y = Axis("share of singular values below"), Axis("singular value", logarithmic=True)
    if spectra is None:
        return Chart(title, (), x, y)
    lines = [
        Line("measured", SHARES, spectra.measured, colour_of(name), steps=True),
        Line("theory", SHARES, spectra.predicted, colour_of(name), dashes=(4, 3)),
        Line("theory with shared modes", SHARES, spectra.with_modes, INK, dashes=(2, 2)),
    ]
    note = f"KS distance {spectra.apart:.3f}, with shared modes {spectra.apart_with_modes:.3f}"
    return Chart(title, lines, x, y, note=note)
