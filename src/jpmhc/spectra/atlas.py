r"""Spectra of many networks computed beforehand: every choice of mixer, streams, depth, noise, activation and norm.

A spectrum is kept as quantiles of $\log_{10} s$ at fixed levels and the share that has collapsed, of the theory and of
sampled networks side by side. benchmarks/compute_atlas.py computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# The levels of the quantiles; the first and the last stand for the ends of the spectrum.
LEVELS = (0.01, *(k / 40 for k in range(1, 40)), 0.99)
# Quantiles are kept as 16-bit numbers, equally spaced in their logarithm between these powers of ten.
LOWEST, HIGHEST = -8.0, 8.0
# A spectrum that was not computed.
MISSING = 65535
FEATURES = 128  # of all streams of a sampled network together
SAMPLES = 5


@dataclass(frozen=True, eq=False)
class Atlas:
    """The spectra under every choice.

    Attributes:
        axes: The values of each axis, by name.
        theory: Quantiles at `LEVELS` as 16-bit numbers, then the collapsed share of `MISSING - 1`.
            [*axes, len(LEVELS) + 1]
        sampled: The same of sampled networks.
    """

    axes: Mapping[str, tuple]
    theory: np.ndarray
    sampled: np.ndarray


def read_atlas(path: Path) -> Atlas:
    """Read an atlas from its file."""
    with np.load(path, allow_pickle=False) as held:
        axes = {name: tuple(held[name].tolist()) for name in held if name not in ("theory", "sampled")}
        return Atlas(axes, held["theory"], held["sampled"])
