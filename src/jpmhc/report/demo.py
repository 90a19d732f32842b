"""The table and the figure of the demonstration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from jpmhc.demo import Outcome

# Some curves coincide: each is drawn thinner than the one below it, so that all of them stay visible.
COLOURS = [
    "#8c8c8c",
    "#c44e52",
    "#dd8452",
    "#1f5fa8",
    "#0f9bb0",
    "#55a868",
    "#6b4a2b",
    "#b47cc7",
    "#d4a017",
    "#e377c2",
    "#2f2f2f",
]


def tabulate_outcomes(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row for each mixer."""
    found = Table(
        title="One deep stack, every mixer",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="first, middle, last: gradient norm at that layer; alike: mean cosine of streams\n"
        "off: worst skip's distance from its set; σ: of the product of all skips",
    )
    for heading in ("mixer", "loss", "first", "middle", "last", "alike", "off", "σ min", "σ max"):
        found.add_column(heading, justify="left" if heading == "mixer" else "right", no_wrap=True)
    for o in outcomes:
        found.add_row(
            o.mixer,
            f"{np.mean(o.losses[-20:]):.3f}",
            *(f"{g:.3f}" for g in (o.gradients[0], o.gradients[len(o.gradients) // 2], o.gradients[-1])),
            f"{o.similarity:+.3f}",
            f"{o.violation:.0e}",
            f"{o.product[-1]:.2g}",
            f"{o.product[0]:.3g}",
        )
    return found


def draw_outcomes(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Draw loss over steps, gradient norm over depth, and the singular values of the product of all skips.

    Returns the path of the file.
    """
    chart = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = chart.subplots(1, 3)
    for k, o in enumerate(outcomes):
        width = 6 - 5 * k / len(outcomes)
        style: dict[str, Any] = {"label": o.mixer, "color": COLOURS[k % len(COLOURS)], "lw": width}
        window = min(10, len(o.losses))
        smooth = np.convolve(o.losses, np.ones(window) / window, mode="valid")
        left.plot(np.arange(window, len(o.losses) + 1), smooth, **style)
        middle.plot(np.arange(1, len(o.gradients) + 1), o.gradients, **style)
        floor = np.maximum(o.product, 1e-6)  # a projector's zeros would leave a logarithmic axis
        right.plot(np.arange(1, len(floor) + 1), floor, marker="o", ms=1.5 * width, **style)
    left.set(title="training loss", xlabel="step", yscale="log")
    middle.set(title="gradient norm that reaches each layer", xlabel="layer", yscale="log")
    right.set(
        title="product of all skips",
        xlabel="singular value, by size",
        ylabel="size (below 1e-6 drawn there)",
        yscale="log",
    )
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, middle, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    chart.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=(len(outcomes) + 1) // 2, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, dpi=140)
    return path
