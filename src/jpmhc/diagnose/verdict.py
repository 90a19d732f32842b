"""The verdict: five plain sentences about a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jpmhc.diagnose.spectrum import EXPLODED, Spectrum
from jpmhc.spectra.density import COLLAPSED

if TYPE_CHECKING:
    from jpmhc.diagnose.diagnosis import Diagnosis
    from jpmhc.diagnose.theory import TheoryComparison

# A share of directions below this is not worth calling a collapse or an explosion.
_WORTH_SAYING = 0.02
# Gradients that differ by more than this factor between layers are called uneven.
_UNEVEN = 10.0
# A KS distance up to this counts as agreement: width and attention leave about as much.
_AGREES = 0.05
# A 99 % quantile that is off by more than this factor is worth a word, whatever KS says.
_FAR_OFF = 1.5
# Above this, sublayers are called aligned.
_ALIGNED = 1.25


def find_verdict(found: Diagnosis) -> list[str]:
    """Say in five sentences how the map fares, what collapses, what explodes, which layers, and what theory says."""
    return [_map(found), _collapse(found), _explosion(found), _layers(found), _theory(found)]


def _map(found: Diagnosis) -> str:
    low, middle, high = (found.whole.quantile(p) for p in (0.25, 0.5, 0.75))
    sick = (
        _relative_below(found) > _worth_saying(found)
        or _relative_above(found) > _WORTH_SAYING
        or _stream_loss(found) > 0.5
    )
    state = "Look closer" if sick or _unevenness(found) > _UNEVEN else "Healthy"
    rows, columns = found.whole.shape
    return (
        f"{state}: of {min(rows, columns)} directions half are multiplied by {low:.2g} to {high:.2g} "
        f"(median {middle:.2g}), where the signal itself is multiplied by {found.gain:.2g}."
    )


def _collapse(found: Diagnosis) -> str:
    share = _relative_below(found)
    end = f"{share:.1%} of the map's directions shrink to less than a tenth of the signal's gain"
    first = f"Collapse: {end}" if share > _worth_saying(found) else f"No collapse of the model's own map: {end}"
    lost = _stream_loss(found)
    if found.streams is None:
        return f"{first}."
    if lost < _WORTH_SAYING:
        what = "nothing" if lost < 5e-4 else "hardly anything"  # 0.0 % in print
        return f"{first}; between the streams {what} is lost ({lost:.1%} below {COLLAPSED:g})."
    smallest = float(found.streams.product[-1])
    what = (
        "differences between streams, which the skips forget (their product shrinks them to "
        f"{smallest:.2g}), while the mean stream passes with weight {found.streams.direct:.2g}"
        if smallest < COLLAPSED
        else "not the skips' doing (their product keeps every stream difference above "
        f"{smallest:.2g}): the sublayers cancel them"
    )
    return f"{first}; of the streams' directions {lost:.0%} are below {COLLAPSED:g}: {what}."


def _explosion(found: Diagnosis) -> str:
    share = _relative_above(found)
    largest = found.whole.largest / found.gain
    end = f"the largest singular value is {largest:.2g} times the signal's gain"
    if share <= _WORTH_SAYING and largest < EXPLODED:
        return f"Nothing explodes: {end}."
    spread = found.whole.largest / max(found.whole.quantile(0.99), 1e-300)
    kind = "a few outliers above the bulk" if spread > 3 else "the upper end of the bulk"
    word = "Explosion" if share > _WORTH_SAYING else "Some directions grow"
    return f"{word}: {share:.1%} grow more than tenfold, and {end} ({kind})."


def _layers(found: Diagnosis) -> str:
    if not found.layers:
        return (
            f"Layers: there are no layers between {found.start} and {found.stop} (hyper-connections, or a list of like "
            "modules), so none is measured apart."
        )
    gains = np.array([layer.gain for layer in found.layers])
    gradients = np.array([layer.gradient for layer in found.layers])
    strongest, weakest = found.layers[int(gains.argmax())], found.layers[int(gradients.argmin())]
    first = f"Layers: {strongest.name} has the largest gain ({strongest.gain:.2g}, median {np.median(gains):.2g})"
    ratio = _unevenness(found)
    if not gradients.max() > 0:
        return f"{first}; no gradient reaches any layer from the map's output."
    if ratio < 1.05:
        return f"{first}; gradients reach all layers alike: squared, they are the same to within {ratio - 1:.1%}."
    steady = "gradients reach all layers alike" if ratio < _UNEVEN else "gradients are uneven"
    return (
        f"{first}; {steady}: squared, they differ by a factor of {ratio:.2g}, the weakest at {weakest.name}, and the "
        f"first layer has {gradients[0] / max(gradients[-1], 1e-300):.2g} times the last one's."
    )


def _theory(found: Diagnosis) -> str:
    known = [item for item in found.comparisons if item.predicted is not None]
    if not known:
        why = "a token through all layers was too costly: raise seconds=" if found.layers else "there are no layers"
        return f"Theory: no prediction ({found.comparisons[0].note if found.comparisons else why})."
    line = f"Theory: {_describe_bulk(found, known)}{_describe_tail(known)}"
    aligned = [item.aligned for item in known if item.rotated is not None]
    if not aligned:
        return f"{line}; whether sublayers are aligned was too costly to find out."
    value = float(np.mean(aligned))
    if value > _ALIGNED:
        return (
            f"{line}; aligned {value:.2f}: sublayers amplify each other's largest directions, as training makes them."
        )
    return f"{line}; aligned {value:.2f}: the sublayers' directions are as good as random to each other."


def _describe_bulk(found: Diagnosis, known: Sequence[TheoryComparison]) -> str:
    """Say whether the bulk is as predicted, of all streams and of the model's own map.

    Most singular values of all streams may be those of the skips alone, which are easy to predict.
    """
    ks = float(np.mean([item.kolmogorov for item in known]))
    numbers = f"KS {ks:.2g}, W1 {np.mean([item.wasserstein for item in known]):.2g}"
    own = [item.mean_kolmogorov for item in known if item.mean_predicted is not None]
    which = "the bulk"
    if found.streams is not None and own:
        numbers = f"all streams: {numbers}; the model's own map: KS {np.mean(own):.2g}"
        ks = max(ks, float(np.mean(own)))
    elif found.streams is not None:
        numbers, which = f"{numbers}; the model's own map was not compared", "the bulk of all streams"
    compared = max(len(item.gains) for item in known)
    part = f" through {compared} of {len(found.layers)} layers" if compared < len(found.layers) else ""
    return f"{which}{part} is {'as' if ks < _AGREES else 'not as'} the theory predicts ({numbers})"


def _describe_tail(known: Sequence[TheoryComparison]) -> str:
    """Say of the 99 % quantile that is furthest from its prediction how far it is off, where that is far."""
    pairs = [
        (name, measured.quantile(0.99), predicted.quantile(0.99))
        for item in known
        for name, measured, predicted in (
            ("the layers' map", item.measured, item.predicted),
            ("the model's own map", item.mean_stream, item.mean_predicted),
        )
        if measured is not None and predicted is not None and measured.quantile(0.99) > measured.floor
    ]
    factors = [abs(np.log(measured / max(predicted, 1e-300))) for _, measured, predicted in pairs]
    if max(factors, default=0.0) < np.log(_FAR_OFF):
        return ""
    name, measured, predicted = pairs[int(np.argmax(factors))]
    return f"; the tail is far off (99 % quantile of {name}: {measured:.2g}, predicted {predicted:.2g})"


def _worth_saying(found: Diagnosis) -> float:
    """Return the share of collapsed directions that is worth a word: a norm removes up to two of every token."""
    return _WORTH_SAYING + 2 * found.positions / min(found.whole.shape)


def _relative_below(found: Diagnosis) -> float:
    return found.whole.below(COLLAPSED * found.gain)


def _relative_above(found: Diagnosis) -> float:
    return found.whole.above(EXPLODED * found.gain)


def _stream_loss(found: Diagnosis) -> float:
    if found.streams is None or not found.comparisons:
        return 0.0
    return float(np.mean([Spectrum.below(item.measured) for item in found.comparisons]))


def _unevenness(found: Diagnosis) -> float:
    gradients = [layer.gradient for layer in found.layers]
    if not gradients or max(gradients) <= 0:
        return 1.0
    return max(gradients) / max(min(gradients), 1e-300)
