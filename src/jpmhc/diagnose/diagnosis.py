"""What a diagnosis holds, and how it reads as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jpmhc.diagnose.coefficients import StreamStatistics
from jpmhc.diagnose.plan import Part, describe_time
from jpmhc.diagnose.spectrum import Spectrum
from jpmhc.diagnose.sublayers import LayerMeasurement
from jpmhc.diagnose.theory import TheoryComparison
from jpmhc.diagnose.verdict import find_verdict
from jpmhc.spectra.density import COLLAPSED, Density

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MOST_LAYERS = 16


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The singular spectrum of a real model's Jacobian, where it comes from, and what the theory says.

    Attributes:
        model: The model's class, and the mode it was in.
        start: Where the map begins.
        stop: Where it ends.
        gain: The signal's own gain, the ratio of the root mean squares of output and input: the unit in which singular
            values of the map are called collapsed or exploded.
        whole: The spectrum of the whole map.
        tokens: The spectra of single tokens, output by own input, under the tokens' numbers.
        layers: What was measured of each layer, in the order of the calls.
        streams: What the coefficients do to the streams; None without hyper-connections.
        comparisons: The map through all layers at single tokens, beside the theory.
        parts: What was planned.
        positions: How many tokens (or examples) the map has.
        notes: What a reader should know of how it was measured.
        seconds: What it took.
    """

    model: str
    start: str
    stop: str
    gain: float
    whole: Spectrum
    tokens: dict[int, Spectrum]
    layers: Sequence[LayerMeasurement]
    streams: StreamStatistics | None
    comparisons: Sequence[TheoryComparison]
    parts: Sequence[Part]
    positions: int
    notes: Sequence[str]
    seconds: float

    @property
    def verdict(self) -> list[str]:
        """Five plain sentences: the map, what collapses, what explodes, which layers, and the theory."""
        return find_verdict(self)

    def list_spectra(self) -> Iterator[tuple[str, Spectrum | Density]]:
        """Yield the name of each spectrum and the spectrum; a name that begins with … belongs to the one before it."""
        yield "whole map", self.whole
        for position, found in self.tokens.items():
            yield f"token {position}", found
        for item in self.comparisons:
            parts = (
                (f"layers, token {item.position}", item.measured),
                ("… theory", item.predicted),
                ("… sublayers rotated", item.rotated),
                (f"mean stream, token {item.position}", item.mean_stream),
                ("… theory", item.mean_predicted),
            )
            yield from ((name, part) for name, part in parts if part is not None)

    def __repr__(self) -> str:
        return f"Diagnosis({self.model}, from {self.start} to {self.stop}: {self.whole!r})"

    def __str__(self) -> str:
        head = f"{self.model}, from {self.start} to {self.stop} ({describe_time(self.seconds)})"
        parts = [head, "", *(f"{number}. {line}" for number, line in enumerate(self.verdict, 1)), "", *self._spectra()]
        if self.layers:
            parts += ["", *self._layer_table()]
        if self.streams is not None:
            parts += ["", *self._stream_lines(self.streams)]
        if self.notes:
            parts += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(parts)

    def _spectra(self) -> list[str]:
        heads = "".join(f"{f'{p:.0%}':>9}" for p in _QUANTILES)
        lines = [f"{'singular values at':24}{heads}  largest  below {COLLAPSED:g}"]
        for name, found in self.list_spectra():
            lines.append(f"{name:24}{_describe_spectrum(found)}")
        return lines

    def _layer_table(self) -> list[str]:
        many = self.streams is not None
        theory = any(math.isfinite(layer.predicted) for layer in self.layers)
        heads = f"{'layer':40}{'gain':>9}{'gradient':>10}" + (f"{'theory':>9}" if theory else "")
        lines = [heads + (f"{'similarity':>12}{'dominance':>11}" if many else "")]
        shown = list(self.layers)
        if len(shown) > _MOST_LAYERS:
            shown = shown[: _MOST_LAYERS // 2] + shown[-_MOST_LAYERS // 2 :]
        for number, layer in enumerate(shown):
            if len(shown) < len(self.layers) and number == _MOST_LAYERS // 2:
                lines.append(f"… {len(self.layers) - len(shown)} more")
            row = f"{layer.name[-39:]:40}{layer.gain:9.3g}{layer.gradient:10.3g}"
            row += (f"{layer.predicted:9.3g}" if math.isfinite(layer.predicted) else f"{'–':>9}") if theory else ""
            lines.append(row + (f"{layer.similarity:12.3f}{layer.dominance:11.3f}" if many else ""))
        return lines

    def _stream_lines(self, streams: StreamStatistics) -> list[str]:
        values = "  ".join(f"{value:.3g}" for value in streams.product.tolist())
        lines = [
            f"product of all skips: singular values {values}; geometric mean {streams.geometric_mean:.3g}; "
            f"direct path {streams.direct:.3g}"
        ]
        for item in self.comparisons:
            lines.append(f"from stream (column) to stream (row) at token {item.position}, mean squared singular value:")
            lines += ["  " + "".join(f"{value:9.3g}" for value in row) for row in item.blocks.tolist()]
        return lines


def _describe_spectrum(found: Spectrum | Density) -> str:
    """Return quantiles, largest singular value and collapsed share; a density has no largest one."""
    if isinstance(found, Density):
        row = "".join(f"{found.quantile(p):9.3g}" for p in _QUANTILES)
        return f"{row}{'–':>9}  {found.collapsed():.1%}"
    row = "".join(_describe_value(found.quantile(p), found.floor) for p in _QUANTILES)
    error = found.error(Spectrum.below)
    share = f"{found.below():.1%}" + (f" ± {error:.1%}" if error > 0 else "")
    return f"{row}{found.largest:9.3g}  {share}"


def _describe_value(value: float, floor: float) -> str:
    """Return a singular value in nine columns, or that it is below what the precision can tell from zero."""
    return f"{value:9.3g}" if value > floor else f"{f'<{floor:.0e}':>9}"
