"""The result of a diagnosis: measurements, a verdict in five sentences, and a printed table."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jpmhc.diagnose.compare import TheoryComparison
from jpmhc.diagnose.layers import LayerMeasurement, StreamStatistics
from jpmhc.diagnose.methods import Part, describe_time
from jpmhc.diagnose.shared_modes import SharedModes
from jpmhc.diagnose.spectrum import EXPLODED, Spectrum
from jpmhc.spectra.density import COLLAPSED, Density

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MOST_LAYERS = 16
# A share of directions up to the first number is negligible; a share above the second is a collapse or an explosion.
# Fresh deep residual networks lie between: in theory, 48 pre-norm layers shrink 10 % of the directions below a tenth.
_FEW, _MANY = 0.02, 0.15
# Squared gradients of the layers are called alike if they differ by less than the first factor, and uneven if they
# differ by more than the second.
_ALIKE, _UNEVEN = 2.0, 100.0
# A KS distance below this and half a singular value's share counts as agreement: a finite width and attention cause
# distances of about this size.
_AGREES = 0.05
# A 99 % quantile that is off by more than this factor is reported, even if KS is small.
_FAR_OFF = 1.5
# With `TheoryComparison.aligned` above this, sublayers amplify each other's largest directions; below the inverse, they
# weaken them.
_ALIGNED = 1.25
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The measured singular spectrum of a model's Jacobian, measurements of its layers, and the theory's predictions.

    Attributes:
        model: The model's class and mode.
        start: The beginning of the map, in words.
        stop: The end of the map, in words.
        gain: The signal's gain: the output's root mean square divided by the input's. Collapsed and exploded directions
            are counted relative to `whole.typical()` instead.
        whole: The spectrum of the whole map.
        tokens: For each measured token's number, the spectrum of the derivative of the token's output with
            respect to its input.
        layers: The measurements of each layer, in the order of the calls.
        streams: Statistics of the streams and of the connections' coefficients; None without hyper-connections.
        comparisons: For each measured token, the map through all layers and the theory's prediction.
        modes: The shared modes of the sublayers over all tokens, paths between tokens included, estimated from four
            random vectors; None if fewer than two layers follow each other.
        parts: The planned measurements.
        positions: The number of tokens (or examples) of the map.
        notes: Remarks on the measurement.
        seconds: The duration of the diagnosis.
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
    modes: SharedModes | None
    parts: Sequence[Part]
    positions: int
    notes: Sequence[str]
    seconds: float

    @property
    def verdict(self) -> list[str]:
        """Five sentences: on the map, on collapse, on explosion, on the layers, and on the theory."""
        return [_map(self), _collapse(self), _explosion(self), _layers(self), _theory(self)]

    def list_spectra(self) -> Iterator[tuple[str, Spectrum | Density, float]]:
        """Yield a name, a spectrum and the limit of collapse for each row of the table.

        A name with … means the same map as the row before. A singular value below the limit, a tenth of the map's
        typical singular value, counts as collapsed.
        """
        yield "whole map", self.whole, _limit(self.whole)
        for position, spectrum in self.tokens.items():
            yield f"token {position}", spectrum, _limit(spectrum)
        for item in self.comparisons:
            for kind, compared in (("layers", item), ("mean stream", item.own)):
                if compared is None:
                    continue
                limit = _limit(compared.measured)
                yield f"{kind}, token {item.position}", compared.measured, limit
                if compared.predicted is not None:
                    yield "… theory", compared.predicted, limit
                if compared.rotated is not None:
                    yield f"… {item.rotation}", compared.rotated, limit

    def plot(self, path: str | Path | None = None) -> Figure:
        """Return a matplotlib figure with the verdict, the measured and predicted spectra, and the layers.

        Args:
            path: A file to write the figure to as well: PNG, SVG or PDF by its ending.

        >>> import torch, jpmhc
        >>> diagnosis = jpmhc.diagnose(torch.nn.Linear(4, 4), torch.randn(2, 4), say=None)
        >>> len(diagnosis.plot().axes)  # without layers there is one chart
        1
        """
        from jpmhc.report.diagnosis import plot_diagnosis
        from jpmhc.report.style import save_and_return

        return save_and_return(plot_diagnosis(self), path)

    def save_page(self, path: str | Path) -> Path:
        """Write the diagnosis as a self-contained HTML page, which needs no network, and return the file's path."""
        from jpmhc.report.diagnosis import render_diagnosis
        from jpmhc.report.page import write_page

        return write_page(render_diagnosis(self), Path(path))

    def _repr_html_(self) -> str:
        head, _, table = str(self).partition("\n\n")
        _, _, table = table.partition("\n\n")
        verdict = "".join(f"<li>{html.escape(line)}</li>" for line in self.verdict)
        table = f"<pre style='font-family: monospace'>{html.escape(table)}</pre>"
        return f"<p><b>{html.escape(head)}</b></p><ol>{verdict}</ol>{table}"

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
        lines = [f"{'singular values at':26}{heads}  largest  collapsed"]
        for name, spectrum, limit in self.list_spectra():
            lines.append(f"{name:26}{_describe_spectrum(spectrum, limit)}")
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


def _limit(spectrum: Spectrum) -> float:
    """Return the singular value below which a direction of this map counts as collapsed."""
    return COLLAPSED * spectrum.typical()


def _describe_spectrum(spectrum: Spectrum | Density, limit: float) -> str:
    """Return a table row: quantiles, the largest singular value (– for a density) and the share below `limit`."""
    if isinstance(spectrum, Density):
        row = "".join(f"{spectrum.quantile(p):9.3g}" for p in _QUANTILES)
        return f"{row}{'–':>9}  {spectrum.collapsed(limit):.1%}"
    row = "".join(_describe_value(spectrum.quantile(p), spectrum.floor) for p in _QUANTILES)
    error = spectrum.error(lambda one: one.below(limit))
    share = f"{spectrum.below(limit):.1%}" + (f" ± {error:.1%}" if error > 0 else "")
    return f"{row}{spectrum.largest:9.3g}  {share}"


def _describe_value(value: float, floor: float) -> str:
    """Format a singular value in nine characters; write a value below the floor as "<" and the floor."""
    return f"{value:9.3g}" if value > floor else f"{f'<{floor:.0e}':>9}"


def _write(value: float) -> str:
    """Format a number with two significant digits, or from 100 to a million as a whole number."""
    return f"{value:.0f}" if 99.5 <= value < 1e6 else f"{value:.2g}"


def _map(diagnosis: Diagnosis) -> str:
    low, middle, high = (diagnosis.whole.quantile(p) for p in (0.25, 0.5, 0.75))
    sick = (
        _collapsed(diagnosis) > _MANY
        or _exploded(diagnosis) > _MANY
        or _stream_loss(diagnosis) > 0.5
        or _unevenness(diagnosis) > _UNEVEN
    )
    rows, columns = diagnosis.whole.shape
    return (
        f"{'Look closer' if sick else 'Healthy'}: of {min(rows, columns)} directions half are multiplied by "
        f"{_write(low)} to {_write(high)} (median {_write(middle)}), where the signal itself is multiplied by "
        f"{_write(diagnosis.gain)}."
    )


def _collapse(diagnosis: Diagnosis) -> str:
    whole, share = diagnosis.whole, _collapsed(diagnosis)
    word = "No collapse" if share <= _FEW else "Little collapses" if share <= _MANY else "Collapse"
    all_below = whole.below(_limit(whole))
    first = f"{word} of the model's own map: {all_below:.1%} of the map's directions shrink to less than a tenth of"
    if word != "No collapse":
        first = f"{word}: {all_below:.1%} of the map's directions shrink to less than a tenth of"
    first += f" the typical {_write(whole.typical())}"
    if all_below > _FEW and all_below - share > all_below / 2:
        first += f" (norms alone take up to {_taken_by_norms(diagnosis):.1%})"
    lost = _stream_loss(diagnosis)
    if diagnosis.streams is None:
        return f"{first}."
    if lost < _FEW:
        amount = "nothing" if lost < 5e-4 else "hardly anything"  # a smaller share prints as 0.0 %
        return f"{first}; between the streams {amount} is lost ({lost:.1%})."
    smallest, largest = (float(diagnosis.streams.product[index]) for index in (-1, 0))
    if smallest < COLLAPSED * largest:
        losses = (
            "differences between streams, which the skips forget (their product shrinks them to "
            f"{smallest:.2g}), while the mean stream passes with weight {diagnosis.streams.direct:.2g}"
        )
    elif largest < COLLAPSED:
        losses = (
            f"the skips' product shrinks every stream to at most {largest:.2g} of its size, and the sublayers' outputs "
            "outweigh what is left"
        )
    else:
        losses = (
            "not the skips' doing (their product keeps every stream difference above "
            f"{smallest:.2g}): sublayers or norms cancel them"
        )
    return f"{first}; of the streams' directions {lost:.0%} are lost: {losses}."


def _explosion(diagnosis: Diagnosis) -> str:
    whole, share = diagnosis.whole, _exploded(diagnosis)
    largest = whole.largest / whole.typical()
    end = f"the largest singular value is {_write(largest)} times the typical one"
    if share <= _FEW and largest < EXPLODED:
        return f"Nothing explodes: {end}."
    spread = whole.largest / max(whole.quantile(0.99), 1e-300)
    kind = "a few outliers above the bulk" if spread > 3 else "the upper end of the bulk"
    word = "Explosion" if share > _MANY else "Some directions grow"
    return f"{word}: {share:.1%} grow more than tenfold, and {end} ({kind})."


def _layers(diagnosis: Diagnosis) -> str:
    if not diagnosis.layers:
        return (
            f"Layers: there are no layers between {diagnosis.start} and {diagnosis.stop} (hyper-connections, or a list "
            "of like modules that keep the width), so none is measured apart."
        )
    gains = np.array([layer.gain for layer in diagnosis.layers])
    gradients = np.array([layer.gradient for layer in diagnosis.layers])
    strongest, weakest = diagnosis.layers[int(gains.argmax())], diagnosis.layers[int(gradients.argmin())]
    if len(gains) == 1:
        return f"Layers: {strongest.name} is the only one, with a gain of {_write(strongest.gain)}."
    largest, median = _write(strongest.gain), _write(float(np.median(gains)))
    first = f"Layers: {strongest.name} has the largest gain ({largest}, median {median})"
    ratio = _unevenness(diagnosis)
    if not gradients.max() > 0:
        return f"{first}; no gradient reaches any layer from the map's output."
    if ratio < 1.05:
        return f"{first}; gradients reach all layers alike: squared, they are the same to within {ratio - 1:.1%}."
    steady = "gradients reach all layers" + (" alike" if ratio < _ALIKE else "")
    steady = steady if ratio < _UNEVEN else "gradients are uneven"
    return (
        f"{first}; {steady}: squared, they differ by a factor of {_write(ratio)}, the weakest at {weakest.name}, and "
        f"the first layer has {_write(gradients[0] / max(gradients[-1], 1e-300))} times the last one's."
    )


def _theory(diagnosis: Diagnosis) -> str:
    known = [item for item in diagnosis.comparisons if item.predicted is not None]
    if not known:
        why = "a token through all layers was too costly: raise seconds=" if diagnosis.layers else "there are no layers"
        why = diagnosis.comparisons[0].note if diagnosis.comparisons else why
        return f"Theory: no prediction ({why}){_describe_modes(diagnosis.modes)}."
    if max(len(item.gains) for item in known) == 1:
        why = "no layer gets the output of another one unchanged" if len(diagnosis.layers) > 1 else "there is one layer"
        return f"Theory: nothing to predict: {why}, and the singular values of a single layer are measured."
    line = f"Theory: {_describe_bulk(diagnosis, known)}{_describe_tail(known)}{_describe_token_modes(known)}"
    aligned = [item.aligned for item in known if item.rotated is not None]
    if not aligned:
        return f"{line}; whether sublayers are aligned was too costly to find out."
    value = float(np.mean(aligned))
    growth = f"the largest directions grow {value:.2f} times as much as with sublayers rotated at random"
    if value > _ALIGNED:
        return f"{line}; {growth}: sublayers amplify each other's largest directions."
    if value < 1 / _ALIGNED:
        return f"{line}; {growth}: sublayers weaken each other's largest directions."
    return f"{line}; {growth}: sublayers neither amplify nor weaken each other's largest directions."


def _describe_modes(modes: SharedModes | None) -> str:
    """Return a clause on the number of shared modes and their share of the sublayers' squared size, or ""."""
    if modes is None or modes.count == 0:
        return ""
    number = _NUMBERS[modes.count] if modes.count < len(_NUMBERS) else str(modes.count)
    shared = "one matrix" if modes.count == 1 else f"{number} matrices"
    return (
        f"; the sublayers' Jacobians share {shared}, {modes.share:.0%} of their squared size: layers work together, "
        "and gains add up"
    )


def _describe_token_modes(known: Sequence[TheoryComparison]) -> str:
    """Return a clause on the token with the most shared modes, and on the mean KS distance to `rotated`.

    KS is the Kolmogorov–Smirnov distance.
    """
    modes = [item.modes for item in known if item.modes is not None]
    line = _describe_modes(max(modes, key=lambda one: (one.count, one.share), default=None))
    worst = [
        max(each.rotated_kolmogorov for each in (item, item.own) if each is not None)
        for item in known
        if item.rotated is not None
    ]
    return f"{line} (with these modes KS {np.mean(worst):.2g})" if line and worst else line


def _describe_bulk(diagnosis: Diagnosis, known: Sequence[TheoryComparison]) -> str:
    """Return a clause on the distance from measurement to theory, for all streams and for the model's own map.

    The map of all streams alone could mislead: the skips, which are easy to predict, may give most of its singular
    values.
    """
    ks = float(np.mean([item.kolmogorov for item in known]))
    numbers = f"KS {ks:.2g}, W1 {np.mean([item.wasserstein for item in known]):.2g}"
    own = [item.own.kolmogorov for item in known if item.own is not None and item.own.predicted is not None]
    which = "the bulk"
    if diagnosis.streams is not None and own:
        numbers = f"all streams: {numbers}; the model's own map: KS {np.mean(own):.2g}"
        ks = max(ks, float(np.mean(own)))
    elif diagnosis.streams is not None:
        numbers, which = f"{numbers}; the model's own map was not compared", "the bulk of all streams"
    agrees = _AGREES + max(0.5 * len(item.blocks) / min(item.measured.shape) for item in known)  # half of 1 / d
    compared = max(len(item.gains) for item in known)
    part = f" through {compared} of {len(diagnosis.layers)} layers" if compared < len(diagnosis.layers) else ""
    return f"{which}{part} is {'as' if ks < agrees else 'not as'} the theory predicts ({numbers})"


def _describe_tail(known: Sequence[TheoryComparison]) -> str:
    """Return a clause on the 99 % quantile with the worst prediction; empty if all predictions are close."""
    pairs = [
        (name, each.measured.quantile(0.99), each.predicted.quantile(0.99))
        for item in known
        for name, each in (("the layers' map", item), ("the model's own map", item.own))
        if each is not None and each.predicted is not None and each.measured.quantile(0.99) > each.measured.floor
    ]
    factors = [abs(np.log(measured / max(predicted, 1e-300))) for _, measured, predicted in pairs]
    if max(factors, default=0.0) < np.log(_FAR_OFF):
        return ""
    name, measured, predicted = pairs[int(np.argmax(factors))]
    return f"; the tail is far off (99 % quantile of {name}: {_write(measured)}, predicted {_write(predicted)})"


def _taken_by_norms(diagnosis: Diagnosis) -> float:
    """Return an upper bound on the share of directions that norms remove: two directions per token."""
    return 2 * diagnosis.positions / min(diagnosis.whole.shape)


def _collapsed(diagnosis: Diagnosis) -> float:
    """Return the share of singular values below a tenth of the typical one, minus the share that norms remove."""
    whole = diagnosis.whole
    return max(whole.below(_limit(whole)) - _taken_by_norms(diagnosis), 0.0)


def _exploded(diagnosis: Diagnosis) -> float:
    return diagnosis.whole.above(EXPLODED * diagnosis.whole.typical())


def _stream_loss(diagnosis: Diagnosis) -> float:
    """Return the collapsed share of the map of all streams through all layers, averaged over measured tokens."""
    if diagnosis.streams is None or not diagnosis.comparisons:
        return 0.0
    return float(np.mean([item.measured.below(_limit(item.measured)) for item in diagnosis.comparisons]))


def _unevenness(diagnosis: Diagnosis) -> float:
    gradients = [layer.gradient for layer in diagnosis.layers]
    if not gradients or max(gradients) <= 0:
        return 1.0
    return max(gradients) / max(min(gradients), 1e-300)
