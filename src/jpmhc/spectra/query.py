"""One question about one network, from the words of a command line to numbers: what `jpmhc spectrum` asks."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra.density import RELATIVE_ETA, Density, density
from jpmhc.spectra.distances import Distances, distances
from jpmhc.spectra.exactly import edges, moments
from jpmhc.spectra.network import Network
from jpmhc.spectra.simulate import simulate


@dataclass(frozen=True)
class Query:
    r"""A network and how to solve it.

    Attributes:
        mixer: Random skips: identity, bistochastic (sinkhorn), orthogonal (cayley), gaussian (unconstrained),
            grassmann or permutation.
        matrix: A file with the skips instead, [n, n] for all layers or [L, n, n]: .npy, .pt, .csv, or rows of text.
        depth: Layers L.
        streams: Streams n of random skips.
        noise: $L \sigma^2$, the noise variance of all layers together.
        activation: Take the noise of each layer from this activation and --weight-scale instead.
        weight_scale: $\sigma_w$ of the sublayers' weights, with --activation.
        input_variance: Mean square of the network's input, with --activation.
        block: Noise of the true hyper-connection block, which reads the mean of the streams and writes to all of them,
            instead of noise that is the same in every direction.
        shared: One skip for all layers instead of a new one in each.
        seed: Of random skips and samples.
        method: auto, or one of the paper's: dyson, z1, subordination, stransform, twisted; chain is exact for all.
        eta: A fixed smoothing; by default it is --relative-eta times x.
        relative_eta: The smoothing as a fraction of x.
        refine: richardson (extrapolates to eta = 0), richardson-paper, or aaa.
        simulate: Sample networks too, and say how far they are.
        samples: How many.
        width: Features per stream of sampled networks.
        device: Where to compute: cpu or cuda.
    """

    mixer: str = "bistochastic"
    matrix: Path | None = None
    depth: int = 10
    streams: int = 4
    noise: float = 0.05
    activation: str | None = None
    weight_scale: float = 1.0
    input_variance: float = 1.0
    block: bool = False
    shared: bool = False
    seed: int = 0
    method: str = "auto"
    eta: float | None = None
    relative_eta: float = RELATIVE_ETA
    refine: Literal["richardson", "richardson-paper", "aaa"] | None = None
    simulate: bool = False
    samples: int = 100
    width: int = 25
    device: Literal["cpu", "cuda"] = "cpu"

    def network(self) -> Network:
        """The network that is asked about."""
        if self.depth < 1:
            raise ValueError(f"a network needs at least one layer, not depth {self.depth}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device is available; use --device cpu")
        if self.matrix is None:
            skips = Network.from_mixer(self.mixer, self.depth, 0.0, self.streams, self.seed, shared=self.shared).skips
        else:
            skips = read_skips(self.matrix, self.depth)
        n = skips.shape[-1]
        read, write = (torch.full((n,), 1 / n, dtype=torch.float64), torch.ones(n, dtype=torch.float64))
        vectors = (read, write) if self.block else (None, None)
        if self.activation is None:
            return Network(skips, self.noise / len(skips), *vectors).to(self.device)
        network = Network.from_activation(
            skips, self.activation, self.weight_scale, self.input_variance, read=vectors[0], write=vectors[1]
        )
        return network.to(self.device)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a query gave.

    Attributes:
        edges: The bands' ends as singular values. [k, 2]
        moments: The first four moments of squared singular values, without smoothing. [4]
        sampled: Squared singular values of sampled networks, if asked.
        distances: Of the density to them.
        seconds: How long the theory took.
    """

    network: Network
    density: Density
    edges: Tensor
    moments: Tensor
    sampled: Tensor | None
    distances: Distances | None
    seconds: float


def ask(query: Query, progress: Callable[[str], None] | None = None) -> Answer:
    """Solve, and sample if asked; `progress` is told each stage's name."""

    def stage(name: str) -> None:
        if progress is not None:
            progress(name)

    network = query.network()
    start = time.perf_counter()
    stage("density")
    found = density(network, None, query.eta, query.method, query.refine, relative_eta=query.relative_eta)
    stage("edges and moments")
    bands = edges(network, found, query.method).sqrt()
    exact = moments(network, 4, float(found.x[-1]), query.method)
    seconds = time.perf_counter() - start
    sampled, apart = None, None
    if query.simulate:
        stage(f"{query.samples} sampled networks")
        sampled = simulate(network, query.width, query.samples, query.seed)
        apart = distances(found, sampled)
    return Answer(network, found, bands, exact.cpu(), sampled, apart, seconds)


def read_skips(path: Path, depth: int) -> Tensor:
    """Skips [L, n, n] from a file that holds them, or one matrix [n, n] for `depth` layers."""
    try:
        if path.suffix == ".npy":
            skips = torch.from_numpy(np.load(path, allow_pickle=False))
        elif path.suffix == ".pt":
            skips = torch.load(path, map_location="cpu", weights_only=True)
        else:
            skips = torch.from_numpy(np.loadtxt(path, delimiter="," if path.suffix == ".csv" else None, ndmin=2))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} holds no matrix: {str(error).splitlines()[0]}") from None
    if not isinstance(skips, Tensor) or skips.ndim not in (2, 3):
        raise ValueError(f"{path} must hold a matrix [n, n] or one per layer [L, n, n]")
    if skips.ndim == 3 and len(skips) != depth:
        raise ValueError(f"{path} holds {len(skips)} layers and the depth asked is {depth}; give --depth {len(skips)}")
    return skips.expand(depth, -1, -1) if skips.ndim == 2 else skips


def write_curve(found: Density, path: Path) -> Path:
    """The density as CSV: squared and plain singular values, their densities, and the distribution function."""
    path.parent.mkdir(parents=True, exist_ok=True)
    s, values = found.singular_values()
    columns = (found.x, found.values, found.eta, s, values, found.cumulative(), found.interpolated.long())
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "density_x", "eta", "singular_value", "density_s", "cumulative", "interpolated"])
        writer.writerows(zip(*(column.tolist() for column in columns)))
    return path
