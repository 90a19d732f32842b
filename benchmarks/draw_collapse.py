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

STREAMS, DEPTH, NOISE, WIDTH, SAMPLES = 4, 48, 0.2, 64, 12
LOW, HIGH = 1e-4, 30.0
OUT = Path(__file__).parent.parent / "docs" / "results" / "collapse.png"


def make_skips() -> dict[str, Tensor]:
    """Return the skips of the three networks, by title. [DEPTH, STREAMS, STREAMS] each"""
    logits = torch.randn(DEPTH, STREAMS, STREAMS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    identity = torch.eye(STREAMS, dtype=torch.float64)
    return {
        "unconstrained (HC)": identity + 0.15 * logits,
        "doubly stochastic (mHC)": birkhoff.project(logits + 4 * identity, iterations=200),
        "orthogonal (JPmHC)": orthogonal.project(logits),
    }


def main() -> None:
    """Predict, sample and draw the three networks."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    edges = np.geomspace(LOW, HIGH, 120)
    for axes, (title, skips) in zip(figure.subplots(1, 3), make_skips().items()):
        network = spectra.Network(skips, NOISE / DEPTH)
        density = spectra.density(network)
        sampled = spectra.simulate(network, WIDTH, SAMPLES, 0).sqrt().flatten().numpy()
        share = np.histogram(sampled, edges)[0] / len(sampled) / np.diff(np.log10(edges))
        axes.axvspan(LOW, 0.1, color="#fbeeea", lw=0)
        axes.stairs(share, edges, fill=True, color="#b9c0ca", label="sampled networks")
        s, values = (part.numpy() for part in density.singular_values())
        axes.plot(s, values * s * np.log(10), color="#0b4f9c", lw=1.5, label="predicted")
        axes.set(xscale="log", xlim=(LOW, HIGH), ylim=(0, None), xlabel="singular value", yticks=[])
        axes.set_title(f"{title}: {density.collapsed():.0%} collapsed", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        print(f"{title}: {density.collapsed():.3f} below 0.1, sampled {(sampled < 0.1).mean():.3f}")
    figure.axes[2].legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(OUT, dpi=100)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
