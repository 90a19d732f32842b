"""What tests of figures look at: the figures that were saved, and their lines."""

from types import ModuleType

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jpmhc.report.style import save_figure

PNG = b"\x89PNG\r\n\x1a\n"


def saved_figures(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Figure]:
    """Return a list that will hold every figure that a module saves from now on."""
    figures = []

    def save(figure, path):
        figures.append(figure)
        return save_figure(figure, path)

    monkeypatch.setattr(module, "save_figure", save)
    return figures


def line_of(axis: Axes, colour: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the data of the one line without markers in a colour."""
    (line,) = (line for line in axis.lines if line.get_color() == colour and line.get_marker() == "None")
    return line.get_xdata(), line.get_ydata()
