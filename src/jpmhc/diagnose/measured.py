"""Losses that were measured when mixers trained side by side on text, for `recommend` to show beside its theory.

`measured.json` is written by `python benchmarks/draw_mixers.py` from the stored comparison.
"""

import functools
import json
from importlib.resources import files
from typing import TypedDict


class MeasuredLosses(TypedDict):
    """The losses of one comparison."""

    model: str  # what was trained, in words
    command: str  # repeats the comparison
    minus_plain: dict[str, float]  # validation loss minus the plain model's, each at its best learning rate, by mixer


@functools.cache
def read_losses() -> MeasuredLosses:
    """Read the losses that the package ships.

    >>> sorted(read_losses())
    ['command', 'minus_plain', 'model']
    """
    return json.loads(files("jpmhc.diagnose").joinpath("measured.json").read_text())
