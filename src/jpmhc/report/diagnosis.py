"""Write a diagnosis as a figure and a page, and the measured singular values as CSV."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jpmhc.diagnose import Diagnosis, Spectrum
from jpmhc.diagnose.compare import TheoryComparison
from jpmhc.files import write_csv
from jpmhc.report.charts import Axis, Chart, Dashes, Line, draw_figure
from jpmhc.report.page import Section, Table, render_page, show_matrix
from jpmhc.report.style import COMPARED
from jpmhc.spectra.density import COLLAPSED

_DECADES = 6  # a chart shows singular values down to this many decades below the largest
_LAYER = Axis("layer", whole=True)
_BELOW = Axis("share of directions below", limits=(0.0, 1.02))
_LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99)


def plot_diagnosis(diagnosis: Diagnosis) -> Figure:
    """Return a figure with a diagnosis's verdict, measured and predicted spectra, layers and streams."""
    lines = [f"{number}. {line}" for number, line in enumerate(diagnosis.verdict, 1)]
    wrapped = "\n".join(textwrap.fill(line, 150, subsequent_indent="    ") for line in lines)
    heading = f"{diagnosis.model}, from {diagnosis.start} to {diagnosis.stop}\n\n{wrapped}\n"
    theory = [chart for item in diagnosis.comparisons[-1:] for chart in _draw_theory(item)]
    return draw_figure([_draw_map(diagnosis), *theory, *_draw_layers(diagnosis)], heading=heading)


def plot_spectrum(spectrum: Spectrum) -> Figure:
    """Return a figure of the distribution function of measured singular values."""
    limit = (COLLAPSED * spectrum.typical(), "collapsed")
    line = _draw_spectrum(spectrum.method, spectrum, COMPARED[0])
    return draw_figure([Chart("", [line], _singular_axis([spectrum]), _BELOW, [limit])], columns=1)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the HTML page of a diagnosis."""
    verdict = [f"{number}. {line}" for number, line in enumerate(diagnosis.verdict, 1)]
    maps = [_draw_map(diagnosis), *(chart for item in diagnosis.comparisons for chart in _draw_theory(item))]
    blocks = [
        show_matrix(f"token {item.position}", item.blocks.tolist(), logarithmic=True)
        for item in diagnosis.comparisons
        if diagnosis.streams is not None
    ]
    heading = "From stream (column) to stream (row), mean squared singular value"
    sections = [
        Section("Singular values", tables=[_tabulate(diagnosis)], charts=maps),
        Section("Layers", charts=_draw_layers(diagnosis), pictures=[(heading, blocks)]),
        Section("All numbers", [f"Note: {note}" for note in diagnosis.notes], folded=[("As text", str(diagnosis))]),
    ]
    lead = [f"From {diagnosis.start} to {diagnosis.stop}.", *verdict]
    return render_page(f"Diagnosis of {diagnosis.model}", lead, sections)


def write_singular_values(diagnosis: Diagnosis, path: Path) -> Path:
    """Write all measured singular values and their weights in the spectrum as CSV, and return the file's path."""
    spectra = {"whole map": diagnosis.whole} | {f"token {key}": value for key, value in diagnosis.tokens.items()}
    for item in diagnosis.comparisons:
        spectra[f"layers, token {item.position}"] = item.measured
        if item.rotated is not None:
            spectra[f"with shared modes, token {item.position}"] = item.rotated
    rows = (
        (name, probe, f"{s:.7g}", f"{w:.7g}")
        for name, spectrum in spectra.items()
        for probe, (values, weights) in enumerate(zip(spectrum.values, spectrum.weights))
        for s, w in zip(values, weights)
    )
    return write_csv(path, ("map", "probe", "singular_value", "weight"), rows)


def _tabulate(diagnosis: Diagnosis) -> Table:
    rows = []
    for name, spectrum, limit in diagnosis.list_spectra():
        floor = spectrum.floor if isinstance(spectrum, Spectrum) else 0.0  # smaller values are rounding errors
        values = [spectrum.quantile(level) for level in _LEVELS]
        cells = [f"{value:.3g}" if value > floor else f"< {floor:.0e}" for value in values]
        if isinstance(spectrum, Spectrum):
            cells += [f"{spectrum.largest:.3g}", f"{spectrum.below(limit):.1%}"]
        else:
            cells += ["–", f"{spectrum.collapsed(limit):.1%}"]
        rows.append([name, *cells])
    heading = ["singular values at", *(f"{level:.0%}" for level in _LEVELS), "largest", "collapsed"]
    return Table(heading, rows)


def _draw_spectrum(name: str, spectrum: Spectrum, colour: str, dashes: Dashes = ()) -> Line:
    """Return the distribution function of measured singular values as a step line: equal values show as a jump."""
    values, shares = spectrum.cumulative()
    return Line(name, np.maximum(values, spectrum.floor), np.minimum(shares, 1.0), colour, dashes, steps=True)


def _singular_axis(spectra: Sequence[Spectrum]) -> Axis:
    top = max(spectrum.largest for spectrum in spectra)
    bottom = max(min(spectrum.smallest for spectrum in spectra), top * 10.0**-_DECADES, 1e-30)
    return Axis("singular value", True, (bottom * 0.8, max(top * 1.25, bottom * 2)))


def _draw_map(diagnosis: Diagnosis) -> Chart:
    spectra = [diagnosis.whole, *diagnosis.tokens.values()]
    names = [f"whole map ({diagnosis.whole.method})", *(f"token {key}" for key in diagnosis.tokens)]
    lines = [_draw_spectrum(*parts) for parts in zip(names, spectra, itertools.cycle(COMPARED))]
    marks = [(COLLAPSED * diagnosis.whole.typical(), "collapsed"), (diagnosis.gain, "the signal's gain")]
    return Chart("the map", lines, _singular_axis(spectra), _BELOW, marks)


def _draw_theory(item: TheoryComparison) -> list[Chart]:
    """Return a chart of the map of all streams through all layers and, if it was measured, of the model's own map."""
    charts = []
    for kind, compared in (("through all layers", item), ("mean stream", item.own)):
        if compared is None:
            continue
        measured, rotated, predicted = compared.measured, compared.rotated, compared.predicted
        lines = [_draw_spectrum("measured", measured, COMPARED[0])]
        if rotated is not None:
            name = f"{item.rotation} (KS {compared.rotated_kolmogorov:.2g})"
            lines.append(_draw_spectrum(name, rotated, COMPARED[1], (3, 3)))
        if predicted is not None:
            s, shares = predicted.x.sqrt().numpy(), predicted.cumulative().numpy()
            name = f"theory (KS {compared.kolmogorov:.2g}, W₁ {compared.wasserstein:.2g})"
            lines.append(Line(name, s, shares, COMPARED[2], (6, 3), marker=""))
        limit = (COLLAPSED * measured.typical(), "collapsed")
        charts.append(Chart(f"{kind}, token {item.position}", lines, _singular_axis([measured]), _BELOW, [limit]))
    return charts


def _draw_layers(diagnosis: Diagnosis) -> list[Chart]:
    if not diagnosis.layers:
        return []
    numbers = np.arange(1, len(diagnosis.layers) + 1)
    gains = [
        Line("gain of the sublayer", numbers, [layer.gain for layer in diagnosis.layers], COMPARED[1]),
        Line("squared gradient at its output", numbers, [layer.gradient for layer in diagnosis.layers], COMPARED[0]),
    ]
    predicted = np.array([layer.predicted for layer in diagnosis.layers])  # NaN for layers without a prediction
    known = predicted > 0
    if known.any():
        line = Line("the same by the theory", numbers[known], predicted[known], COMPARED[2], (6, 3), marker="")
        gains.append(line)
    charts = [Chart("gains and gradients", gains, _LAYER, Axis("mean squared singular value", True))]
    if diagnosis.streams is not None:
        similarity, dominance = diagnosis.streams.similarity.numpy(), diagnosis.streams.dominance.numpy()
        positions = np.arange(1, len(similarity) + 1)
        lines = [
            Line("similarity: mean cosine of two streams", positions, similarity, COMPARED[0]),
            Line("dominance: the longest stream's share", positions, dominance, COMPARED[1]),
        ]
        charts.append(Chart("streams", lines, _LAYER, Axis("after the layer")))
    return charts
