"""The style of all figures and pages: colours and ticks, and a function that saves a figure."""

from __future__ import annotations

import colorsys
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jpmhc.files import replacing
from jpmhc.mixers import ENSEMBLES, MIXERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = dict[str, Any]  # options of matplotlib

# The mixers' colours, in the order of `MIXERS`, each with a contrast of at least 3 on white and on dark pages.
_PALETTE = (
    "#7d8797",
    "#d5403b",
    "#dd7a16",
    "#2f7de1",
    "#0e99ae",
    "#2c9a4b",
    "#9c6b3a",
    "#9a5fd0",
    "#a98600",
    "#de4f9b",
    "#76862a",
)
# Colours 0 to 9 of ARC grids, as the public viewer shows them.
ARC_COLOURS = (
    "#000000",
    "#0074D9",
    "#FF4136",
    "#2ECC40",
    "#FFDC00",
    "#AAAAAA",
    "#F012BE",
    "#FF851B",
    "#7FDBFF",
    "#870C25",
)
# The colours of lines that do not stand for mixers, such as measured, changed and predicted values.
COMPARED = ("#2f7de1", "#dd7a16", "#2c9a4b", "#9a5fd0", "#7d8797")
PLAIN = "#8a8a8a"  # a model without hyper-connections
SAMPLED = "#c9ced6"  # sampled or measured values behind a curve
EXACT = "#0b4f9c"  # the exact theory
# The colours of text, axes, grid lines and background. A page replaces these colours by its style sheet's.
INK, SOFT, RULE, PAPER = "#1d1d1f", "#5b6470", "#e3e6ea", "#ffffff"
_MOST_TICKS = 6  # of an axis
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def colour_of(mixer: str | None) -> str:
    """Return the colour of a mixer, given its name or a name in `ENSEMBLES`; grey for a plain model or None."""
    names = list(MIXERS)
    name = ENSEMBLES[mixer].name if mixer in ENSEMBLES else mixer
    if name is None or name.split("-")[0] == "plain":
        return PLAIN
    # A mixer of the user's own has a colour that depends on its name alone.
    number = names.index(name) if name in names else len(names) + zlib.crc32(name.encode()) % 1000
    return _PALETTE[number] if number < len(_PALETTE) else _make_colour(number)


def _make_colour(number: int) -> str:
    """Return a colour that is readable on light and dark pages, with luminance 0.2 and a different hue per number."""
    pure = colorsys.hsv_to_rgb(number * (math.sqrt(5) - 1) / 2 % 1, 1, 1)
    luminance = 0.2126 * pure[0] + 0.7152 * pure[1] + 0.0722 * pure[2]
    white = max(0.0, (0.2 - luminance) / (1 - luminance))  # white is mixed into a dark hue, black into a bright hue
    light = [0.2 / max(0.2, luminance) * (c + white * (1 - c)) for c in pure]
    encoded = (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in light)
    return "#" + "".join(f"{round(255 * c):02x}" for c in encoded)


def linear_ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers inside an interval, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / _MOST_TICKS))
    for factor in (1, 2, 5, 10, 20):
        first, last = math.ceil(low / (factor * step) - 1e-9), math.floor(high / (factor * step) + 1e-9)
        if last - first < _MOST_TICKS:
            break
    return [float(f"{k * factor * step:.12g}") for k in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return round numbers inside an interval of a logarithmic axis: powers of ten, and multiples if these are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        stride = -(-(last - first + 1) // _MOST_TICKS)
        return [10.0**k for k in range(first, last + 1) if k % stride == 0]
    for digits in ((1, 2, 5), (1, 3), (1, 1.5, 2, 3, 5, 7)):
        ticks = [d * 10.0**k for k in range(first - 1, last + 1) for d in digits if low <= d * 10.0**k <= high]
        if 3 <= len(ticks) <= _MOST_TICKS:
            return ticks
    return linear_ticks(low, high)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return labels for the ticks of an axis: all plain (0.05), or all with powers of ten if some are very small."""
    largest = max(map(abs, ticks), default=0.0)
    smallest = min((abs(tick) for tick in ticks if tick), default=1.0)
    if largest >= 1e-4 and smallest >= max(1e-5, 1e-4 * min(1.0, largest)) and largest < 1e6:
        return [_write_plain(tick) for tick in ticks]
    return ["0" if abs(tick) < 1e-12 * largest else _write_power(tick) for tick in ticks]


def _write_plain(value: float) -> str:
    text = f"{value:.6g}"
    return (f"{value:.10f}".rstrip("0") if "e" in text else text).replace("-", "−")


def _write_power(value: float) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if -3 < exponent < 4:
        return f"{value:.6g}"
    power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    mantissa = value / 10.0**exponent
    return power if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}·{power}"


def finish_axes(ax: Axes, whole: tuple[bool, bool] = (False, False)) -> None:
    """Give matplotlib axes two spines and the colours of this style, and numeric axes the ticks of this style.

    The axes must have their limits and scales already. `whole` says whether x and y are counts, whose ticks are whole
    numbers.
    """
    from matplotlib.ticker import FixedLocator

    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(SOFT)
    ax.tick_params(color=SOFT, labelcolor=SOFT)
    limits = ax.get_xlim(), ax.get_ylim()
    for axis, ends, counts in zip((ax.xaxis, ax.yaxis), limits, whole):
        axis.label.set_color(INK)
        if not isinstance(axis.get_major_locator(), FixedLocator):  # ticks that were set before stay
            ticks = (logarithmic_ticks if axis.get_scale() == "log" else linear_ticks)(min(ends), max(ends))
            ticks = [tick for tick in ticks if not counts or tick == round(tick)]
            axis.set_ticks(ticks, tick_labels(ticks))
        axis.set_ticks([], minor=True)
    ax.set(xlim=limits[0], ylim=limits[1])


def save_figure(figure: Figure, path: Path, dpi: int = 170) -> Path:
    """Write a matplotlib figure to a PNG, SVG or PDF file and return the file's path; make a missing folder."""
    import matplotlib

    kind = path.suffix.removeprefix(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"a figure's name must end in .png, .svg or .pdf, got {path}")
    stamp = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]  # no date in the file
    with matplotlib.rc_context({"svg.hashsalt": "jpmhc"}), replacing(path) as file:
        figure.savefig(file, dpi=dpi, format=kind, metadata=stamp)
    return path


def save_and_return(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure to a file if a path is given, and return the figure."""
    if path is not None:
        save_figure(figure, Path(path))
    return figure
