"""Compute the spectra that `jpmhc explore` shows, with one process a core, and write them as one file.

    python benchmarks/compute_atlas.py --out src/jpmhc/report/atlas.npz

About 1600 networks of two and four streams, a second or two each on one core; those of eight streams, which `AXES`
leaves out, would be 720 more of three seconds each. Choices whose theory a former file has are kept.
"""

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpmhc import mixers
from jpmhc.report.explorer import FEATURES, HIGHEST, LEVELS, LOWEST, MISSING, SAMPLES, Atlas, read_atlas
from jpmhc.spectra import MLP
from jpmhc.spectra.density import COLLAPSED, density
from jpmhc.spectra.network import Network
from jpmhc.spectra.simulate import simulate

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

Choice = tuple[str, int, int, float, str, str]


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


def compute(choice: Choice) -> tuple[Choice, tuple[np.ndarray, np.ndarray]]:
    torch.set_num_threads(1)
    return choice, compute_choice(choice)


def known(path: Path) -> dict[Choice, tuple[np.ndarray, np.ndarray]]:
    """Return the spectra that a former file has."""
    if not path.exists():
        return {}
    atlas, found = read_atlas(path), {}
    for choice in list_choices():
        if any(value not in values for values, value in zip(atlas.axes.values(), choice)):
            continue  # an axis has grown since
        place = tuple(values.index(value) for values, value in zip(atlas.axes.values(), choice))
        if atlas.theory[place][0] != MISSING:  # what the theory refused is tried again
            found[choice] = (atlas.theory[place], atlas.sampled[place])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("src/jpmhc/report/atlas.npz"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begun, found = time.monotonic(), known(options.out)
    left = [choice for choice in list_choices() if choice not in found]
    left.sort(key=lambda choice: choice[1] * choice[2])  # the dear ones last: many streams and layers
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for count, (choice, spectra) in enumerate(pool.map(compute, left), 1):
            found[choice] = spectra
            if count % 100 == 0:  # an interrupted command goes on from this file
                write_atlas(assemble_atlas(found), options.out)
                print(f"{count} of {len(left)}, {time.monotonic() - begun:.0f} s", flush=True)
    missing = [choice for choice, (theory, _) in found.items() if theory[0] == MISSING]
    print(f"{len(found)} spectra, {len(missing)} without theory: {missing[:10]}")
    print("wrote", write_atlas(assemble_atlas(found), options.out))


if __name__ == "__main__":
    main()
