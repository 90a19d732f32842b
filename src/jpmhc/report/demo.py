"""The demonstration's table and figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich import box
from rich.table import Table

from jpmhc.demo import Outcome

# Several mixers stay close to the identity for the first steps: dashes keep every curve visible where they coincide.
STYLES: dict[str, dict[str, Any]] = {
    "identity": {"color": "#8c8c8c", "lw": 4, "alpha": 0.6},
    "unconstrained": {"color": "#c44e52"},
    "sinkhorn": {"color": "#dd8452", "lw": 2.4, "ls": (0, (5, 5))},
    "cayley": {"color": "#1f5fa8", "lw": 2.4},
    "grassmann": {"color": "#55a868"},
    "permutation": {"color": "#6b4a2b", "ls": (0, (2, 4))},
    "kronecker": {"color": "#b47cc7", "ls": (3, (2, 4))},
}


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row a mixer."""
    found = Table(
        title="One deep stack, every mixer",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="first, middle, last: gradient norm at that layer; alike: mean cosine of streams\n"
        "violation: worst skip's distance from its set; σ: of the product of all skips",
    )
    for heading in ("mixer", "loss", "first", "middle", "last", "alike", "violation", "σ min", "σ max"):
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


def figure(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Loss over steps, gradient norm over depth, and the singular values of the product of all skips."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chart, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for o in outcomes:
        style = {"label": o.mixer, **STYLES.get(o.mixer, {})}
        width = min(10, len(o.losses))
        smooth = np.convolve(o.losses, np.ones(width) / width, mode="valid")
        left.plot(np.arange(width, len(o.losses) + 1), smooth, **style)
        middle.plot(np.arange(1, len(o.gradients) + 1), o.gradients, **style)
        floor = np.maximum(o.product, 1e-6)  # a projector's zeros would leave a logarithmic axis
        right.plot(np.arange(1, len(floor) + 1), floor, marker="o", ms=4, **style)
    left.set(title="training loss", xlabel="step", yscale="log")
    middle.set(title="gradient norm that reaches each layer", xlabel="layer", yscale="log")
    right.set(
        title="product of all skips",
        xlabel="singular value, by size",
        ylabel="size (below 1e-6 drawn there)",
        yscale="log",
    )
    right.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    for axes in (left, middle, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    chart.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(outcomes), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, dpi=140)
    plt.close(chart)
    return path
