"""Draw the README's picture: singular values of a Jacobian 48 layers deep, predicted and sampled, for three mixers.

Run `python benchmarks/draw_collapse.py`; half a minute. It writes docs/results/collapse.png. The skips differ from
layer to layer and are near the identity, as they are early in training: random logits with 4 added on the diagonal for
the doubly stochastic ones, the Cayley transform of random logits, and the identity with N(0, 0.15²) added to it.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from jpmhc import spectra
from jpmhc.manifolds import birkhoff, orthogonal
from jpmhc.report.style import INK, SAMPLED, colour_of, finish_axes

STREAMS, DEPTH, NOISE, WIDTH, SAMPLES = 4, 48, 0.2, 64, 12
LOW, HIGH = 1e-4, 30.0
OUT = Path(__file__).parent.parent / "docs" / "results" / "collapse.png"


def make_skips() -> dict[str, tuple[str, Tensor]]:
    """Return title and skips of the three networks, by mixer. [DEPTH, STREAMS, STREAMS] each"""
    logits = torch.randn(DEPTH, STREAMS, STREAMS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    identity = torch.eye(STREAMS, dtype=torch.float64)
    return {
        "unconstrained": ("unconstrained (HC)", identity + 0.15 * logits),
        "sinkhorn": ("doubly stochastic (mHC)", birkhoff.project(logits + 4 * identity, iterations=200)),
        "cayley": ("orthogonal (JPmHC)", orthogonal.project(logits)),
    }


def main() -> None:
    """Predict, sample and draw the three networks."""
    figure = Figure(figsize=(10, 3.1), layout="constrained")
    edges = np.geomspace(LOW, HIGH, 120)
    for axes, (mixer, (title, skips)) in zip(figure.subplots(1, 3, sharey=True), make_skips().items()):
        network = spectra.Network(skips, NOISE / DEPTH)
        density = spectra.density(network)
        sampled = spectra.simulate(network, WIDTH, SAMPLES, 0).sqrt().flatten().numpy()
        share = np.histogram(sampled, edges)[0] / len(sampled) / np.diff(np.log10(edges))
        outside = np.mean((sampled < LOW) | (sampled > HIGH))
        axes.axvspan(LOW, 0.1, color="#f3f4f6", lw=0, label="lost: below 0.1")
        axes.stairs(share, edges, fill=True, color=SAMPLED, label="sampled networks")
        s, values = (part.numpy() for part in density.singular_values())
        axes.plot(s, values * s * np.log(10), color=colour_of(mixer), lw=1.8, label="predicted")
        axes.set(xscale="log", xlim=(LOW, HIGH), ylim=(0, 2.5), xlabel="singular value")
        axes.set_title(f"{title}: {density.collapsed():.0%} lost", fontsize=11, color=INK)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
        finish_axes(axes)
        axes.set_xticks([1e-4, 1e-3, 1e-2, 0.1, 1, 10], ["10⁻⁴", "0.001", "0.01", "0.1", "1", "10"])
        print(
            f"{title}: {density.collapsed():.3f} below 0.1, sampled {(sampled < 0.1).mean():.3f}; "
            f"{outside:.3f} outside the axis; highest {max(share.max(), (values * s * np.log(10)).max()):.2f}"
        )
    figure.axes[0].set_ylabel("density per decade")
    figure.savefig(OUT, dpi=130)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
