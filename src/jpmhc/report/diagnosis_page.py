"""The page of a diagnosis: the verdict, spectra beside the theory, layers and streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jpmhc.diagnose import Diagnosis, Spectrum
from jpmhc.diagnose.theory import TheoryComparison
from jpmhc.report.page import Folded, Picture, Section, Table, draw_chart, render_page
from jpmhc.report.style import COMPARED
from jpmhc.report.svg import Axis, Line, draw_matrix
from jpmhc.spectra.density import COLLAPSED

# Decades below the largest singular value that a chart shows.
_DECADES = 6
_LAYER = Axis("layer", whole=True)
_BELOW = Axis("share of directions below", limits=(0.0, 1.0))


def render_diagnosis(found: Diagnosis) -> str:
    """Return the HTML page of a diagnosis."""
    title = f"Diagnosis of {found.model}"
    text = [f"From {found.start} to {found.stop}.", *(f"{k}. {line}" for k, line in enumerate(found.verdict, 1))]
    maps = [_draw_map(found), *(_draw_theory(item) for item in found.comparisons)]
    blocks = [
        Picture(f"token {item.position}", draw_matrix(item.blocks.tolist()), small=True)
        for item in found.comparisons
        if found.streams is not None
    ]
    heading = "From stream (column) to stream (row), mean squared singular value"
    sections = [
        Section("Singular values", (), _quantiles(found), [("", maps)]),
        Section("Layers", (), (), [("", _draw_layers(found)), (heading, blocks)]),
        Section("All numbers", [f"Note: {note}" for note in found.notes], (), (), [Folded("As text", str(found))]),
    ]
    return render_page(title, text, sections)


def _quantiles(found: Diagnosis) -> list[Table]:
    levels = (0.01, 0.25, 0.5, 0.75, 0.99)
    rows = []
    for name, one in found.list_spectra():
        if isinstance(one, Spectrum):
            cells = [_write(one.quantile(level), one.floor) for level in levels]
            rows.append([name, *cells, f"{one.largest:.3g}", f"{one.below():.1%}"])
        else:
            cells = [f"{one.quantile(level):.3g}" for level in levels]
            rows.append([name, *cells, "–", f"{one.collapsed():.1%}"])
    heading = ["singular values at", *(f"{level:.0%}" for level in levels), "largest", f"below {COLLAPSED:g}"]
    return [Table(heading, rows)]


def _write(value: float, floor: float) -> str:
    """Write a singular value; of one below the floor, which is rounding, that it is."""
    return f"{value:.3g}" if value > floor else f"< {floor:.0e}"


def _share_line(name: str, spectrum: Spectrum, colour: str, dash: str = "") -> Line:
    """Return which share of the singular values lies below each, as steps."""
    values, shares = spectrum.cumulative()
    x, y = np.maximum(values, spectrum.floor).tolist(), np.minimum(shares, 1.0).tolist()
    return Line(name, x, y, colour, dash, steps=True)


def _singular_axis(spectra: Sequence[Spectrum]) -> Axis:
    top = max(spectrum.largest for spectrum in spectra)
    bottom = max(min(spectrum.smallest for spectrum in spectra), top * 10.0**-_DECADES, 1e-30)
    return Axis("singular value", True, (bottom * 0.8, max(top * 1.25, bottom * 2)))


def _draw_map(found: Diagnosis) -> Picture:
    spectra = [found.whole, *found.tokens.values()]
    names = [f"whole map ({found.whole.method})", *(f"token {key}" for key in found.tokens)]
    lines = [_share_line(*pair, COMPARED[k % len(COMPARED)]) for k, pair in enumerate(zip(names, spectra))]
    marks = [(COLLAPSED, "collapsed"), (found.gain, "the signal's gain")]
    return draw_chart("the map", lines, _singular_axis(spectra), _BELOW, marks=marks)


def _draw_theory(item: TheoryComparison) -> Picture:
    lines = [_share_line("measured", item.measured, COMPARED[0])]
    if item.rotated is not None:
        lines.append(_share_line(f"sublayers rotated (aligned {item.aligned:.2f})", item.rotated, COMPARED[1]))
    if item.predicted is not None:
        s, shares = item.predicted.x.sqrt().tolist(), item.predicted.cumulative().tolist()
        lines.append(
            Line(f"theory (KS {item.kolmogorov:.2g}, W₁ {item.wasserstein:.2g})", s, shares, COMPARED[2], "6 3")
        )
    title = f"through all layers at token {item.position}"
    return draw_chart(title, lines, _singular_axis([item.measured]), _BELOW, marks=[(COLLAPSED, "collapsed")])


def _draw_layers(found: Diagnosis) -> list[Picture]:
    if not found.layers:
        return []
    numbers = list(range(1, len(found.layers) + 1))
    gains = [
        Line("gain of the sublayer", numbers, [layer.gain for layer in found.layers], COMPARED[1]),
        Line("squared gradient at its output", numbers, [layer.gradient for layer in found.layers], COMPARED[0]),
    ]
    predicted = [(number, layer.predicted) for number, layer in zip(numbers, found.layers) if layer.predicted > 0]
    if predicted:
        at, values = (list(part) for part in zip(*predicted))
        gains.append(Line("the same by the theory", at, values, COMPARED[2], "6 3"))
    pictures = [draw_chart("gains and gradients", gains, _LAYER, Axis("mean squared singular value", True))]
    if found.streams is not None:
        similarity, dominance = found.streams.similarity.tolist(), found.streams.dominance.tolist()
        places = list(range(1, len(similarity) + 1))
        lines = [
            Line("similarity: mean cosine of two streams", places, similarity, COMPARED[0]),
            Line("dominance: the longest stream's share", places, dominance, COMPARED[1]),
        ]
        pictures.append(draw_chart("streams", lines, _LAYER, Axis("after the layer")))
    return pictures
