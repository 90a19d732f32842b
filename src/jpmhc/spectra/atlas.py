r"""Spectra of many networks computed beforehand: every choice of mixer, streams, depth, noise, activation and norm.

A spectrum is kept as quantiles of $\log_{10} s$ at fixed levels and the share that has collapsed, of the theory and of
sampled networks side by side.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpmhc import mixers
from jpmhc.spectra.density import COLLAPSED, density
from jpmhc.spectra.network import Network
from jpmhc.spectra.normalised import MLP
from jpmhc.spectra.simulate import simulate

# The levels of the quantiles; the first and the last stand for the ends of the spectrum.
LEVELS = (0.01, *(k / 40 for k in range(1, 40)), 0.99)
# Quantiles are kept as 16-bit numbers over these powers of ten: 0 is that or less.
LOWEST, HIGHEST = -8.0, 8.0
# A spectrum that was not computed.
MISSING = 65535
AXES: Mapping[str, tuple] = {
    "mixer": tuple(mixers.MIXERS),
    "streams": (2, 4),
    "depth": (4, 12, 24, 48),
    "noise": (0.05, 0.25, 1.0),
    "activation": ("linear", "gelu"),
    "norm": ("none", "before", "after"),
}
# Singular values at which the theory is evaluated, as stretches with so many points, the densest around one; their
# smoothing, and the residual asked: enough for a picture.
_GRID = ((1e-4, 0.2, 36), (0.2, 5.0, 130), (5.0, 100.0, 25))
_RELATIVE_ETA = 0.006
_TOLERANCE = 1e-4
_LOST = 0.01  # mass that such a grid may miss
FEATURES = 128  # of all streams of a sampled network together
SAMPLES = 5

Choice = tuple[str, int, int, float, str, str]


@dataclass(frozen=True, eq=False)
class Atlas:
    """The spectra under every choice.

    Attributes:
        axes: The values of each axis, by name.
        theory: Quantiles at `LEVELS`, as `pack` wrote them, then the collapsed share of `MISSING - 1`.
            [*axes, len(LEVELS) + 1]
        sampled: The same of sampled networks.
    """

    axes: Mapping[str, tuple]
    theory: np.ndarray
    sampled: np.ndarray


def list_choices() -> Iterator[Choice]:
    """Yield every combination that the mixers allow."""
    for choice in itertools.product(*AXES.values()):
        if mixers.MIXERS[choice[0]].why_not(choice[1]) is None:
            yield choice


def build_network(choice: Choice) -> Network:
    r"""Build the network of a choice.

    Without a norm its noise is the same in every direction, as in the paper, and comes from the activation with
    $L \sigma_w^2$ = noise. With a norm before or after the sublayer it is the hyper-connection block, which reads the
    mean of the streams and writes to all of them, around $W_2 \phi(W_1 u)$, whose last scale is noise over L.
    """
    mixer, streams, depth, noise, activation, norm = choice
    skips = Network.from_mixer(mixer, depth, 0.0, streams).skips
    if norm == "none":
        return Network.from_activation(skips, activation, math.sqrt(noise / depth), paths=1)
    read, write = skips.new_full((streams,), 1 / streams), skips.new_ones(streams)
    make = Network.prenorm if norm == "before" else Network.postnorm
    return make(skips, read, write, MLP(activation, (1.0, noise / depth)))


def compute_choice(choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Compute what an atlas holds of one choice, of theory and samples; MISSING where the theory refuses."""
    network = build_network(choice)
    values = simulate(network, FEATURES // network.streams, SAMPLES, 0).double().sqrt().flatten().numpy()
    # a quantile between two bands is the end of the lower one
    quantiles = np.quantile(values, LEVELS, method="inverted_cdf")
    sampled = _describe(quantiles, float(np.mean(values < COLLAPSED)))
    grid = torch.from_numpy(np.unique(np.concatenate([np.geomspace(*stretch) for stretch in _GRID]))).square()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = density(network, grid, relative_eta=_RELATIVE_ETA, tolerance=_TOLERANCE)
            if abs(found.mass + found.below - 1) > _LOST:  # a band that is narrower than the grid's steps
                found = density(network, relative_eta=_RELATIVE_ETA, tolerance=_TOLERANCE)
    except ValueError:
        return np.full_like(sampled, MISSING), sampled
    return _describe(np.array([found.quantile(level) for level in LEVELS]), found.collapsed()), sampled


def _describe(quantiles: np.ndarray, collapsed: float) -> np.ndarray:
    return np.append(pack(quantiles), np.uint16(round(collapsed * (MISSING - 1))))


def pack(values: np.ndarray) -> np.ndarray:
    """Write singular values as 16-bit numbers, equally spaced in their logarithm."""
    logs = np.log10(np.maximum(values, 10.0**LOWEST)).clip(LOWEST, HIGHEST)
    return np.round((logs - LOWEST) / (HIGHEST - LOWEST) * (MISSING - 1)).astype(np.uint16)


def unpack(values: np.ndarray) -> np.ndarray:
    """Read singular values that `pack` wrote; NaN where they are missing."""
    logs = LOWEST + values.astype(np.float64) / (MISSING - 1) * (HIGHEST - LOWEST)
    return np.where(values == MISSING, np.nan, 10.0**logs)


def assemble_atlas(found: Mapping[Choice, tuple[np.ndarray, np.ndarray]]) -> Atlas:
    """Put computed spectra at their places; all others are missing."""
    shape = tuple(map(len, AXES.values()))
    theory = np.full((*shape, len(LEVELS) + 1), MISSING, np.uint16)
    sampled = theory.copy()
    for choice, (mine, drawn) in found.items():
        place = tuple(values.index(value) for values, value in zip(AXES.values(), choice))
        theory[place], sampled[place] = mine, drawn
    return Atlas(AXES, theory, sampled)


def write_atlas(atlas: Atlas, path: Path) -> Path:
    """Write an atlas as a compressed file and return its path."""
    arrays: dict[str, Any] = {name: np.array(values) for name, values in atlas.axes.items()}
    np.savez_compressed(path, theory=atlas.theory, sampled=atlas.sampled, **arrays)
    return path


def read_atlas(path: Path) -> Atlas:
    """Read an atlas from its file."""
    with np.load(path, allow_pickle=False) as held:
        axes = {name: tuple(held[name].tolist()) for name in AXES}
        return Atlas(axes, held["theory"], held["sampled"])
