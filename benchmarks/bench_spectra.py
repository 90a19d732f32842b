"""How fast the exact chain is: fixed problems, and how the cost grows with depth, points and streams.

Examples:
    python benchmarks/bench_spectra.py
    python benchmarks/bench_spectra.py --device cuda
    python benchmarks/bench_spectra.py --only scaling --figure docs/results/spectra_scaling.png
    python benchmarks/bench_spectra.py --redraw --figure docs/results/spectra_scaling.png
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from harness import milliseconds, read_csv, write_csv
from jpmhc import spectra

ETA = 0.02
RESIDUAL = 1e-9
# What the paper says of its own pipeline, for n <= 4 and L <= 100.
PAPER_SECONDS_PER_POINT = 1.0


@dataclass(frozen=True)
class Case:
    mixer: str
    streams: int
    depth: int
    points: int


SPEED = [
    *(Case(mixer, 4, depth, 400) for mixer in ("bistochastic", "orthogonal", "gaussian") for depth in (10, 100)),
    *(Case(mixer, 4, 1000, 400) for mixer in ("bistochastic", "orthogonal")),
    Case("bistochastic", 16, 100, 100),
    Case("bistochastic", 64, 24, 20),
    Case("bistochastic", 4, 100, 4000),
    Case("orthogonal", 4, 100, 4000),
]
SCALING = {
    "depth": [Case("bistochastic", 4, depth, 400) for depth in (5, 10, 20, 50, 100, 200)],
    "points": [Case("bistochastic", 4, 50, points) for points in (50, 100, 200, 400, 800, 1600)],
    "streams": [Case("bistochastic", streams, 10, 40) for streams in (2, 4, 8, 16, 32, 64, 96)],
}


def setup(case: Case, device: str) -> tuple[Callable[[], spectra.Solution], spectra.Solution]:
    """The call to time, and its answer; what has not converged is not timed."""
    network = spectra.Network.from_mixer(case.mixer, case.depth, 0.05 / case.depth, case.streams, seed=0).to(device)
    z = torch.linspace(0.01, 4, case.points, dtype=torch.float64, device=device) + 1j * ETA

    def call() -> spectra.Solution:
        return spectra.cauchy(network, z, tolerance=RESIDUAL)

    found = call()
    if not bool(found.converged.all()):
        raise RuntimeError(f"{case}: {int((~found.converged).sum())} points did not converge; nothing to time")
    return call, found


def measure(case: Case, device: str) -> dict[str, object]:
    """One row of results, printed beside the paper's figure."""
    call, found = setup(case, device)
    seconds = milliseconds(call, repeats=3, warm_up=1, device=device) / 1e3
    per_point = seconds / case.points
    iterations = int(found.iterations.double().median()), int(found.iterations.max())
    print(
        f"{case.mixer:>13} n={case.streams:<3} L={case.depth:<5} {case.points:5} points  {seconds:8.3f} s  "
        f"{per_point * 1e3:8.3f} ms a point (paper: under {PAPER_SECONDS_PER_POINT:g} s)  iterations {iterations[0]}, "
        f"at most {iterations[1]}, residual {float(found.residual.max()):.0e}",
        flush=True,
    )
    return {
        **case.__dict__,
        "seconds": round(seconds, 5),
        "seconds_per_point": per_point,
        "iterations_median": iterations[0],
        "iterations_max": iterations[1],
        "residual_max": float(found.residual.max()),
    }


def main(
    device: Literal["cpu", "cuda"] = "cpu",
    only: Literal["speed", "scaling", "all"] = "all",
    figure: Path = Path("out/spectra_scaling.png"),
    redraw: bool = False,
) -> None:
    """Time the chain and write benchmarks/results/spectra_<what>_<device>.csv.

    Args:
        only: The fixed problems, how the cost grows, or both.
        figure: Where the plot of the scaling goes.
        redraw: Draw that plot from the file of a former run, and time nothing.
    """
    if redraw:
        held = read_csv(f"spectra_scaling_{device}")
        draw({axis: [row for row in held if row["axis"] == axis] for axis in SCALING}, figure)
        return
    if only != "scaling":
        rows = [measure(case, device) for case in SPEED]
        write_csv(f"spectra_speed_{device}", rows, device)
    if only != "speed":
        grown = {axis: [measure(case, device) for case in cases] for axis, cases in SCALING.items()}
        write_csv(
            f"spectra_scaling_{device}", [{"axis": axis, **row} for axis, rows in grown.items() for row in rows], device
        )
        draw(grown, figure)


def draw(grown: dict[str, list[dict]], path: Path) -> None:
    """Time per iteration against depth, points and streams, with the slopes that the derivation predicts."""
    from matplotlib.figure import Figure

    from jpmhc.report.style import EXACT, finish_axes, save_figure

    predicted = {"depth": 1, "points": 1, "streams": 3}
    titles = {"depth": "layers L", "points": "points", "streams": "streams n"}
    fixed = {"depth": "n = 4, 400 points", "points": "n = 4, L = 50", "streams": "L = 10, 40 points"}
    plot = Figure(figsize=(10, 3.2), layout="constrained")
    axes = plot.subplots(1, 3)
    for ax, (axis, rows) in zip(axes, grown.items()):
        x = [float(row[axis]) for row in rows]
        y = [1e3 * float(row["seconds"]) / float(row["iterations_median"]) for row in rows]
        ax.loglog(x, y, "o-", color=EXACT, label="measured")
        slope = predicted[axis]
        ax.loglog(x, [y[-1] * (v / x[-1]) ** slope for v in x], "--", color="#7d8590", label=f"slope {slope}")
        ax.set(xlabel=titles[axis], ylabel="ms per iteration")
        ax.set_title(fixed[axis], fontsize=11)
        ax.set_xticks(x, [f"{v:g}" for v in x], minor=False)
        ax.legend(frameon=False)
        finish_axes(ax)
    print(f"wrote {save_figure(plot, path)}")


if __name__ == "__main__":
    tyro.cli(main)
