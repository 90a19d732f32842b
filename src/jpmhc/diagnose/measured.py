"""Measured losses of models with each mixer, trained on text; `recommend` prints them beside the theory.

`python benchmarks/draw_mixers.py` writes `measured.json` from the stored comparison.
"""

import functools
import json
from importlib.resources import files
from typing import TypedDict


class MeasuredLosses(TypedDict):
    """The losses of one comparison of mixers."""

    model: str  # the trained model, in words
    command: str  # the command that repeats the comparison
    # For each mixer, the validation loss minus the plain model's, both at their best learning rate.
    minus_plain: dict[str, float]


@functools.cache
def read_losses() -> MeasuredLosses:
    """Return the losses in the package's file `measured.json`.

    >>> sorted(read_losses())
    ['command', 'minus_plain', 'model']
    """
    return json.loads(files("jpmhc.diagnose").joinpath("measured.json").read_text())
