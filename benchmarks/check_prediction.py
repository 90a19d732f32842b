"""Predict the Jacobian's spectrum of pre-norm networks that are run, for docs/results/prediction.md.

Run `python benchmarks/check_prediction.py`; some five minutes on two cores. Every network has 4 streams of 256
features, random weights, reads that favour stream l mod 4 and random writes; no number is fitted. Beside the page it
writes docs/results/prediction.png and benchmarks/results/prediction.csv.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from torch import Tensor

from harness import write_csv, write_table
from jpmhc import spectra
from jpmhc.manifolds import birkhoff, orthogonal
from jpmhc.report.style import INK, SAMPLED, colour_of, finish_axes, save_figure
from jpmhc.spectra.activations import get_activation

STREAMS, WIDTH, NETWORKS = 4, 256, 3
SUBLAYERS = {
    "GELU e=4": spectra.MLP("gelu"),
    "tanh e=1": spectra.MLP("tanh", ratio=1.0),
    "GELU e=4, PyTorch scale": spectra.MLP("gelu", scales=(1 / 3, 1 / 3)),
}
DEPTHS = (12, 48)
# The skips that are drawn, in the colours of the mixers whose they are.
DRAWN = {
    "identity": colour_of("identity"),
    "0.8 I + 0.2 bistochastic": colour_of("sinkhorn"),
    "Haar": colour_of("cayley"),
}
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def make_skips(depth: int) -> dict[str, Tensor]:
    """Return the five kinds of skips. [depth, 4, 4] each"""
    generator = torch.Generator().manual_seed(depth)
    eye = torch.eye(STREAMS, dtype=torch.float64)
    near = torch.full_like(eye, 0.01 / (STREAMS - 1)).fill_diagonal_(0.99)
    logits = torch.randn(depth, STREAMS, STREAMS, dtype=torch.float64, generator=generator)
    return {
        "identity": eye.expand(depth, -1, -1),
        "1 % off-diagonal": near.expand(depth, -1, -1),
        "0.8 I + 0.2 bistochastic": 0.8 * eye + 0.2 * birkhoff.sample(STREAMS, (depth,), generator=generator),
        "Cayley": orthogonal.project(logits, scale=0.1),
        "Haar": orthogonal.sample(STREAMS, (depth,), generator=generator),
    }


def make_gates(depth: int) -> tuple[Tensor, Tensor]:
    """Return reads that favour stream l mod 4, and writes 2 sigmoid of N(0, 0.25) logits. [depth, 4] each"""
    favoured = 2 * torch.nn.functional.one_hot(torch.arange(depth) % STREAMS, STREAMS).double()
    logits = 0.5 * torch.randn(depth, STREAMS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return favoured.softmax(-1), 2 * logits.sigmoid()


def run_network(skips: Tensor, read: Tensor, write: Tensor, mlp: spectra.MLP, width: int, seed: int) -> Tensor:
    """Run one network and return its Jacobian, which is carried along with the signal. [n, width, n * width]"""
    generator = torch.Generator().manual_seed(seed)
    streams = skips.shape[-1]
    hidden, phi = round(mlp.ratio * width), get_activation(mlp.activation)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = normal(width)
    x = (x / x.square().mean().sqrt()).expand(streams, -1)
    jacobian = torch.eye(streams * width, dtype=torch.float64).unflatten(0, (streams, width))
    for skip, r, w in zip(skips, read, write):
        first = normal(hidden, width) * math.sqrt(mlp.scales[0] / width)
        last = normal(width, hidden) * math.sqrt(mlp.scales[1] / hidden)
        u, du = r @ x, torch.einsum("j,jpc->pc", r, jacobian)
        rms = u.square().mean().sqrt()
        unit = u / rms
        du = (du - torch.outer(unit, unit @ du) / width) / rms
        before = first @ unit
        output, change = last @ phi.function(before), last @ (phi.derivative(before).unsqueeze(-1) * (first @ du))
        x = skip @ x + torch.outer(w, output)
        jacobian = torch.einsum("ij,jpc->ipc", skip, jacobian) + torch.einsum("i,pc->ipc", w, change)
    return jacobian


def check_case(skips: Tensor, mlp: spectra.MLP) -> tuple[dict[str, float], spectra.Density, Tensor]:
    """Predict and run one case; return its numbers, the predicted density and the measured squares."""
    read, write = make_gates(len(skips))
    network = spectra.Network.prenorm(skips, read, write, mlp)
    gaussian = spectra.Network(network.skips, network.variance, read, write)
    runs = [run_network(skips, read, write, mlp, WIDTH, seed) for seed in range(NETWORKS)]
    squares = torch.stack([torch.linalg.svdvals(jacobian.flatten(0, 1)).square() for jacobian in runs])
    predicted = spectra.density(network)
    numbers = {"noise": float(network.variance.sum())}
    mean = float(squares.sqrt().mean())
    for name, curve in (("gaussian", spectra.density(gaussian)), ("sublayers", predicted)):
        apart = spectra.distances(curve, squares)
        numbers |= {f"w1_{name}": apart.wasserstein / mean, f"ks_{name}": apart.kolmogorov}
    for probability in (0.01, 0.25, 0.5, 0.75, 0.99):
        numbers[f"measured_{probability:g}"] = float(squares.sqrt().flatten().quantile(probability))
        numbers[f"predicted_{probability:g}"] = predicted.quantile(probability)
    return numbers, predicted, squares


def draw_panel(axes, predicted: spectra.Density, squares: Tensor, title: str, colour: str) -> None:
    """Draw which share of singular values lies below each, measured and predicted."""
    measured = np.sort(squares.sqrt().flatten().numpy())
    low, high = max(predicted.quantile(0.002), 3e-6) / 1.5, predicted.quantile(0.998) * 1.5
    shares = np.arange(1, len(measured) + 1) / len(measured)
    axes.plot(measured, shares, color=SAMPLED, lw=5)
    axes.plot(predicted.x.sqrt().numpy(), predicted.cumulative().numpy(), color=colour, lw=1.5)
    axes.axvline(0.1, color=INK, lw=0.8, ls="--")
    axes.set(xscale="log", xlim=(low, high), ylim=(0, 1.04))
    axes.set_title(title, fontsize=10, color=INK)
    finish_axes(axes)


def list_worst(rows: list[dict]) -> list[str]:
    """Return the table of the largest deviations over the kinds of skips."""
    lines = [
        "| sublayer | L | Σσ² | KS | KS, Gaussian sublayers | W₁/mean | W₁/mean, Gaussian sublayers |",
        "|---|---|---|---|---|---|---|",
    ]
    for sublayer, depth in dict.fromkeys((row["sublayer"], int(row["depth"])) for row in rows):
        cases = [row for row in rows if (row["sublayer"], int(row["depth"])) == (sublayer, depth)]
        noise = [float(row["noise"]) for row in cases]
        keys = ("ks_sublayers", "ks_gaussian", "w1_sublayers", "w1_gaussian")
        cells = " | ".join(f"{max(float(row[key]) for row in cases):.3f}" for key in keys)
        lines.append(f"| {sublayer} | {depth} | {min(noise):.2f} to {max(noise):.2f} | {cells} |")
    return lines


def main() -> None:
    """Run all cases, print each, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", action="store_true", help="run the cases of the figure, and write it alone")
    figure_alone = parser.parse_args().figure
    figure = Figure(figsize=(11, 11), layout="constrained")
    panels = iter(figure.subplots(4, 3, sharey=True).flatten())
    rows = []
    for name, mlp in SUBLAYERS.items():
        for depth in DEPTHS:
            for kind, skips in make_skips(depth).items():
                drawn = kind in DRAWN and "PyTorch" not in name
                if figure_alone and not drawn:
                    continue
                start = time.perf_counter()
                numbers, predicted, squares = check_case(skips, mlp)
                rows.append({"sublayer": name, "depth": depth, "skip": kind, **numbers})
                if drawn:
                    draw_panel(next(panels), predicted, squares, f"{name}, L = {depth}, {kind}", DRAWN[kind])
                print(
                    f"{name}, L = {depth}, {kind}: KS {numbers['ks_sublayers']:.4f} (Gaussian "
                    f"{numbers['ks_gaussian']:.4f}), W1 {numbers['w1_sublayers']:.3f}, "
                    f"{time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    for axes in figure.axes[::3]:
        axes.set_ylabel("share of singular values below")
    for axes in figure.axes[-3:]:
        axes.set_xlabel("singular value")
    predictions = tuple(Line2D([], [], color=colour, lw=1.5) for colour in DRAWN.values())
    limit = Line2D([], [], color=INK, lw=0.8, ls="--")
    figure.legend(
        [Line2D([], [], color=SAMPLED, lw=5), predictions, limit],
        ["measured", "predicted", "collapsed: below 0.1"],
        loc="outside upper center",
        ncols=3,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
    )
    print(f"wrote {save_figure(figure, RESULTS / 'prediction.png')}")
    if not figure_alone:
        write_csv("prediction", rows)
        write_table(RESULTS / "prediction.md", "prediction", list_worst(rows))


if __name__ == "__main__":
    main()
