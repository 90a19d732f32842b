"""The picture of a diagnosis, and its singular values as a file."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jpmhc.diagnose import Diagnosis, Spectrum
from jpmhc.files import write_csv
from jpmhc.report.style import COMPARED, EXACT, INK, SAMPLED, finish_axes, save_figure
from jpmhc.spectra.density import COLLAPSED

# Decades below the largest singular value that a picture shows.
_DECADES = 6


def draw_diagnosis(found: Diagnosis, path: Path) -> Path:
    """Draw a diagnosis on one page: verdict, spectra beside the theory, layers and streams. Returns the file's path."""
    figure = Figure(figsize=(12, 9.5), layout="constrained")
    pages: Any = figure.subfigures(2, 1, height_ratios=(0.3, 1))
    head, body = pages
    lines = [f"{number}. {line}" for number, line in enumerate(found.verdict, 1)]
    wrapped = "\n".join(textwrap.fill(line, 150, subsequent_indent="    ") for line in lines)
    head.text(0.02, 0.97, f"{found.model}, from {found.start} to {found.stop}", fontsize=12, va="top", color=INK)
    head.text(0.02, 0.84, wrapped, fontsize=9.5, va="top", color=INK, linespacing=1.45)
    axes = body.subplots(2, 2)
    _draw_map(axes[0][0], found)
    _draw_theory(axes[0][1], found)
    _draw_layers(axes[1][0], found)
    _draw_streams(axes[1][1], found)
    for ax in axes.flat:
        finish_axes(ax)
        ax.tick_params(labelsize=8)
    return save_figure(figure, path)


def write_singular_values(found: Diagnosis, path: Path) -> Path:
    """Write every measured singular value with its weight as CSV, and return the file's path."""
    spectra = {"whole map": found.whole} | {f"token {key}": value for key, value in found.tokens.items()}
    for item in found.comparisons:
        spectra[f"layers, token {item.position}"] = item.measured
        if item.rotated is not None:
            spectra[f"sublayers rotated, token {item.position}"] = item.rotated
    rows = (
        (name, probe, f"{s:.7g}", f"{w:.7g}")
        for name, spectrum in spectra.items()
        for probe, (values, weights) in enumerate(zip(spectrum.values, spectrum.weights))
        for s, w in zip(values, weights)
    )
    return write_csv(path, ("map", "probe", "singular_value", "weight"), rows)


def _draw_shares(ax: Any, spectrum: Spectrum, **style: Any) -> None:
    """Draw which share of the singular values lies below each; unlike a density it shows equal ones as a step."""
    values, shares = spectrum.cumulative()
    ax.step(np.maximum(values, spectrum.floor), shares, where="post", **style)


def _finish_shares(ax: Any, *spectra: Spectrum) -> None:
    top = max(spectrum.largest for spectrum in spectra)
    bottom = max(min(spectrum.smallest for spectrum in spectra), top * 10.0**-_DECADES)
    ax.set(xscale="log", xlim=(bottom * 0.8, top * 1.25), ylim=(0, 1.02))
    ax.set(xlabel="singular value", ylabel="share of directions below")
    if bottom < COLLAPSED:
        ax.axvline(COLLAPSED, color=INK, linewidth=0.8, linestyle="--", label=f"collapsed: below {COLLAPSED:g}")
    ax.legend(frameon=False, fontsize=8)


def _draw_map(ax: Any, found: Diagnosis) -> None:
    _draw_shares(ax, found.whole, color=INK, linewidth=2, label=f"whole map ({found.whole.method})")
    for colour, (position, spectrum) in zip(itertools.cycle(COMPARED), found.tokens.items()):
        _draw_shares(ax, spectrum, color=colour, linewidth=1, label=f"token {position}")
    ax.axvline(found.gain, color=INK, linewidth=0.8, linestyle=":", label="the signal's gain")
    ax.set_title("the map", fontsize=10)
    _finish_shares(ax, found.whole, *found.tokens.values())


def _draw_theory(ax: Any, found: Diagnosis) -> None:
    ax.set_title("through all layers at one token, beside the theory", fontsize=10)
    if not found.comparisons:
        why = "too costly: raise seconds=" if found.layers else "there are no layers"
        ax.text(0.5, 0.5, why, ha="center", transform=ax.transAxes)
        return
    item = found.comparisons[-1]
    _draw_shares(ax, item.measured, color=SAMPLED, linewidth=5, label=f"measured, token {item.position}")
    if item.rotated is not None:
        label = f"sublayers rotated (aligned {item.aligned:.2f})"
        _draw_shares(ax, item.rotated, color=COMPARED[1], linewidth=1.2, label=label)
    if item.predicted is not None:
        s, share = item.predicted.x.sqrt().numpy(), item.predicted.cumulative().numpy()
        label = f"theory (KS {item.kolmogorov:.2g}, W₁ {item.wasserstein:.2g})"
        ax.plot(s, share, color=EXACT, linewidth=1.2, linestyle="--", label=label)
    _finish_shares(ax, item.measured)


def _draw_layers(ax: Any, found: Diagnosis) -> None:
    ax.set_title("layers", fontsize=10)
    if not found.layers:
        ax.text(0.5, 0.5, "no list of layers was found", ha="center", transform=ax.transAxes)
        return
    numbers = np.arange(1, len(found.layers) + 1)
    floor = 1e-30
    ax.plot(
        numbers,
        [max(layer.gain, floor) for layer in found.layers],
        "o-",
        color=COMPARED[1],
        label="gain of the sublayer",
    )
    gradients = [max(layer.gradient, floor) for layer in found.layers]
    ax.plot(numbers, gradients, "s-", color=EXACT, label="squared gradient at its output")
    predicted = [layer.predicted for layer in found.layers]
    if np.isfinite(predicted).any():
        ax.plot(numbers, predicted, color=INK, linewidth=1.2, linestyle="--", label="the same by the theory")
    ax.set(xlabel="layer", ylabel="mean squared singular value", yscale="log")
    ax.legend(frameon=False, fontsize=8)


def _draw_streams(ax: Any, found: Diagnosis) -> None:
    if found.streams is None or not found.comparisons:
        ax.set_axis_off()
        return
    streams, item = found.streams, found.comparisons[-1]
    n = len(item.blocks)
    ax.imshow(item.blocks.clamp_min(1e-30).log10().numpy(), cmap="Blues", vmin=-4, vmax=2)
    for row in range(n):
        for column in range(n):
            ax.text(
                column, row, f"{float(item.blocks[row, column]):.2g}", ha="center", va="center", fontsize=8, color=INK
            )
    values = " ".join(f"{value:.2g}" for value in streams.product.tolist())
    ax.set_title(
        f"mean squared singular value from stream to stream\nproduct of skips: {values}; similarity "
        f"{float(streams.similarity[-1]):.2f}, dominance {float(streams.dominance[-1]):.2f}",
        fontsize=10,
    )
    ax.set(xticks=range(n), yticks=range(n), xlabel="from stream", ylabel="to stream")
