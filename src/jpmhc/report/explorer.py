"""The page with which spectra are explored: sliders over an atlas of spectra that were computed beforehand."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from jpmhc.mixers import MIXERS
from jpmhc.report.page import render_template
from jpmhc.report.style import colour_of
from jpmhc.spectra.atlas import FEATURES, HIGHEST, LEVELS, LOWEST, SAMPLES, Atlas

# Powers of ten at the ends of the axes of singular values.
_VIEW = (-4, 2)
# Where the sliders stand at first, by the place of each value.
_START = {"mixer": 2, "streams": 1, "depth": 3, "noise": 1, "activation": 1, "norm": 1}


def render_explorer(atlas: Atlas) -> str:
    """Return the HTML page of an atlas."""
    data: dict[str, Any] = {
        "axes": [(name, list(values)) for name, values in atlas.axes.items()],  # in order, which JSON's objects lose
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
