"""Write the page of `jpmhc explore`, whose sliders select spectra from a precomputed atlas."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jpmhc.files import JsonObject
from jpmhc.mixers import MIXERS
from jpmhc.report.page import render_template
from jpmhc.report.style import colour_of

# The levels of the stored quantiles; the first and the last represent the ends of the spectrum.
LEVELS = (0.01, *(k / 40 for k in range(1, 40)), 0.99)
# Quantiles are stored as 16-bit numbers, with equal steps of the logarithm between these powers of ten.
LOWEST, HIGHEST = -8.0, 8.0
# The 16-bit number that marks a spectrum that was not computed.
MISSING = 65535
FEATURES = 128  # the number of features of a sampled network, n d
SAMPLES = 5
# Powers of ten at the ends of the axes of singular values.
_VIEW = (-4, 2)
# Each slider's first position, as the index of a value on its axis.
_START = {"mixer": 2, "streams": 1, "depth": 3, "noise": 1, "activation": 1, "norm": 1}


@dataclass(frozen=True, eq=False)
class Atlas:
    """The spectra for every combination of mixer, streams, depth, noise, activation and norm."""

    axes: Mapping[str, tuple]  # {an axis's name: its values}
    # Predicted spectra. The last axis has the quantiles at `LEVELS` as 16-bit numbers, followed by the collapsed share
    # times `MISSING - 1`. [*axes, len(LEVELS) + 1]
    theory: np.ndarray
    sampled: np.ndarray  # spectra of sampled networks, in the same format


def read_atlas(path: Path) -> Atlas:
    """Read an atlas from an .npz file."""
    with np.load(path, allow_pickle=False) as arrays:
        axes = {name: tuple(arrays[name].tolist()) for name in arrays if name not in ("theory", "sampled")}
        return Atlas(axes, arrays["theory"], arrays["sampled"])


def render_explorer(atlas: Atlas) -> str:
    """Return the HTML page that shows the spectra of an atlas."""
    data: JsonObject = {
        "axes": [(name, list(values)) for name, values in atlas.axes.items()],  # in order, unlike an object
        "levels": LEVELS,
        "range": (LOWEST, HIGHEST),
        "view": _VIEW,
        "start": _START,
        "colours": {mixer: colour_of(mixer) for mixer in atlas.axes["mixer"]},
        "theory": _encode(atlas.theory),
        "sampled": _encode(atlas.sampled),
    }
    lowest = f"{10.0 ** _VIEW[0]:g}"
    absent = [name for name in MIXERS if name not in atlas.axes["mixer"]]
    return render_template("explorer.html", data=data, samples=SAMPLES, features=FEATURES, lowest=lowest, absent=absent)


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<u2").tobytes()).decode()
