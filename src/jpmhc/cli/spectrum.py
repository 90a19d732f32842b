"""The command `jpmhc spectrum`: make a network from the options, and compute its spectrum."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from tokenize import TokenError
from typing import Annotated, Literal, TypeVar
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch
import tyro
from torch import Tensor

from jpmhc import checks
from jpmhc.checks import Count, Positive
from jpmhc.cli.command import make_main, warnings_in_one_line
from jpmhc.experiments.training.progress import Display
from jpmhc.files import require_writable
from jpmhc.paper.methods import METHODS, WITHOUT_DENSITY, transform
from jpmhc.report.spectrum import Answer, draw_spectrum, print_answer, write_curve
from jpmhc.report.style import EXACT, colour_of
from jpmhc.spectra import cauchy
from jpmhc.spectra.arguments import to_skips
from jpmhc.spectra.density import RELATIVE_ETA, density
from jpmhc.spectra.distances import distances
from jpmhc.spectra.edges_and_moments import edges, moments
from jpmhc.spectra.network import Network
from jpmhc.spectra.simulate import refuse_size, simulate

T = TypeVar("T")

# The errors that reading a damaged file raises: NumPy tokenizes the header of .npy, torch's unpickler pops from lists.
_UNREADABLE = (
    *(ValueError, EOFError, RuntimeError, UnpicklingError, TokenError),
    *(LookupError, TypeError, AttributeError, OverflowError, OSError, BadZipFile),
)

# The defaults of the options.
EXACT_METHOD = "chain"
MIXER, DEPTH, STREAMS, NOISE, SAMPLES, WIDTH = "sinkhorn", 10, 4, 0.05, 100, 25
_METHOD_NAMES = ",".join([EXACT_METHOD, *(name for name in METHODS if name not in WITHOUT_DENSITY)])


def _unset(default: object) -> object:
    """Return tyro's settings for an option whose value is None if it is not given; the help shows `default` instead."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class Query:
    """The options that describe a network and the method for its spectrum; contradictory options raise an error."""

    # Random skips, by the name of their mixer or of an ensemble of random matrices.
    mixer: Annotated[str | None, _unset(MIXER)] = None
    # File with the skips, instead of random skips, [n, n] for all layers or [L, n, n]: .npy, .pt, or rows of text such
    # as .csv.
    matrix: Path | None = None
    # Number of layers L.
    depth: Annotated[Count | None, _unset(f"{DEPTH}, or the number of matrices in --matrix")] = None
    streams: Annotated[Count | None, _unset(STREAMS)] = None  # Number of streams n of random skips.
    noise: Annotated[float | None, _unset(NOISE)] = None  # Lσ², the noise variance of all layers together.
    activation: str | None = None  # Take the noise of each layer from this activation and --weight-scale instead.
    weight_scale: Annotated[float | None, _unset(1)] = None  # σ_w of the sublayers' weights, with --activation.
    input_variance: Annotated[float | None, _unset(1)] = None  # Mean square of the network's input, with --activation.
    # Number of random draws of the activation's slopes to average over, with --activation. 1 uses the slopes' mean
    # square instead, which takes seconds instead of minutes and is right if each layer's noise is small.
    paths: Annotated[Count | None, _unset(1)] = None
    # Noise of the true hyper-connection block, which reads the mean of the streams and writes to all streams, instead
    # of noise that is the same in every direction.
    block: bool = False
    shared: bool = False  # One skip for all layers instead of a new skip for each layer.
    seed: int = 0  # Seed of random skips and samples.
    # chain is exact. The other methods are the paper's, and each warns where it is not exact.
    method: Annotated[str, tyro.conf.arg(metavar=f"{{{_METHOD_NAMES}}}")] = EXACT_METHOD
    eta: Annotated[Positive | None, _unset("--relative-eta times x")] = None  # A fixed smoothing of the density.
    # The smoothing as a fraction of the squared singular value x.
    relative_eta: Annotated[Positive | None, _unset(RELATIVE_ETA)] = None
    refine: Literal["richardson", "richardson-paper", "aaa"] | None = None  # Extrapolation of the density to eta = 0.
    simulate: bool = False  # Also sample networks, and print their distances from the prediction.
    samples: Annotated[Count | None, _unset(SAMPLES)] = None  # Number of sampled networks, with --simulate.
    # Number of features per stream of sampled networks, with --simulate.
    width: Annotated[Count | None, _unset(WIDTH)] = None
    device: Literal["cpu", "cuda"] = "cpu"  # Device for the computation: cpu or cuda.

    def __post_init__(self) -> None:
        def refuse(reason: str, **options: object) -> None:
            for name, value in options.items():
                if value is not None and value is not False:
                    raise ValueError(f"--{name.replace('_', '-')} {reason}")

        if self.matrix is not None:
            reason = "describes random skips, and --matrix gives them; leave one of the two away"
            refuse(reason, mixer=self.mixer, streams=self.streams, shared=self.shared)
        if self.activation is None:
            reason = "describes a nonlinear network and needs --activation"
            refuse(reason, weight_scale=self.weight_scale, input_variance=self.input_variance, paths=self.paths)
        else:
            refuse("is what --activation decides; leave one of the two away", noise=self.noise)
        if self.eta is not None:
            refuse("and the fixed --eta exclude each other", relative_eta=self.relative_eta)
        if not self.simulate:
            refuse("describes sampled networks and needs --simulate", samples=self.samples, width=self.width)
        checks.fields(self)
        checks.choice(self.method, (EXACT_METHOD, *METHODS), "method")

    def network(self) -> Network:
        """Build the network that the options describe."""
        if self.matrix is None:
            mixer, streams = _or(self.mixer, MIXER), _or(self.streams, STREAMS)
            skips = Network.from_mixer(mixer, _or(self.depth, DEPTH), 0.0, streams, self.seed, shared=self.shared).skips
        else:
            skips = read_skips(self.matrix, self.depth)
        n = skips.shape[-1]
        read, write = (torch.full((n,), 1 / n, dtype=torch.float64), torch.ones(n, dtype=torch.float64))
        vectors = (read, write) if self.block else (None, None)
        if self.activation is None:
            noise = checks.non_negative_number(_or(self.noise, NOISE), "noise")
            return Network(skips, noise / len(skips), *vectors).to(self.device)
        scale, variance = _or(self.weight_scale, 1.0), _or(self.input_variance, 1.0)
        network = Network.from_activation(
            skips, self.activation, scale, variance, read=vectors[0], write=vectors[1], paths=_or(self.paths, 1)
        )
        return network.to(self.device)

    def title(self, network: Network) -> str:
        """Return one line that describes the network."""
        skips = str(self.matrix) if self.matrix is not None else f"{_or(self.mixer, MIXER)} skips"
        noise = f"Lσ² = {_or(self.noise, NOISE):g}"
        if self.activation is not None:
            noise = f"{self.activation}, σ_w = {_or(self.weight_scale, 1.0):g}"
        block = ", hyper-connection block" if self.block else ""
        skips = f"one of the {skips} for all layers" if self.shared else skips
        return f"{skips}, n = {network.streams}, L = {network.depth}, {noise}{block}"


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def answer_query(query: Query, progress: Callable[[str], None] = lambda stage: None) -> Answer:
    """Return the predicted spectrum of a query's network, with sampled networks to compare if `query.simulate`.

    `progress` is called with the name of each stage when it begins.
    """

    network = query.network()
    if query.simulate:
        refuse_size(network.streams, _or(query.width, WIDTH))
    start = time.perf_counter()
    progress("density")
    relative = _or(query.relative_eta, RELATIVE_ETA)
    compute = cauchy if query.method == EXACT_METHOD else transform(query.method)
    curve = density(network, None, query.eta, query.refine, transform=compute, relative_eta=relative)
    progress("edges and moments")
    with warnings.catch_warnings():
        # The density has already warned if the method is not exact for the network.
        warnings.filterwarnings("ignore", "method '", UserWarning)
        bands = edges(network, curve, compute).sqrt()
        exact = moments(network, 4, float(curve.x[-1]), compute)
    seconds = time.perf_counter() - start
    sampled, apart = None, None
    if query.simulate:
        samples = _or(query.samples, SAMPLES)
        progress(f"{samples} sampled networks")
        sampled = simulate(network, _or(query.width, WIDTH), samples, query.seed)
        apart = distances(curve, sampled)
    return Answer(network, curve, bands, exact.cpu(), sampled, apart, seconds)


def read_skips(path: Path, depth: int | None = None) -> Tensor:
    """Read the skips of L layers, [L, n, n], from a file; one matrix [n, n] is repeated `depth` times (None: 10)."""
    if not path.is_file():
        raise ValueError(f"there is no file {path} to read a matrix from")
    try:
        if path.suffix == ".pt" and not is_zipfile(path):
            raise ValueError("it is not a file that torch.save wrote")
        if path.suffix == ".pt":
            content = torch.load(path, map_location="cpu", weights_only=True)
        elif path.suffix == ".npy":
            content = np.load(path, allow_pickle=False)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about an empty file, which raises an error below
                content = np.loadtxt(path.read_text().replace(",", " ").splitlines(), ndmin=2)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; a matrix is read from .npy, .pt, or rows of numbers as text") from None
    except _UNREADABLE as error:
        # Only the first sentence names the reason; torch's further sentences give advice on its own options.
        said = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
        raise ValueError(f"{path} holds no matrix: {said[:200]}") from None
    if not isinstance(content, Tensor | np.ndarray):
        raise ValueError(f"{path} must hold one array of skips, not a {type(content).__name__}")
    if content.ndim == 2:
        depth = DEPTH if depth is None else depth
    return to_skips(content, f"the skips in {path}", depth)


def spectrum(query: Annotated[Query, tyro.conf.arg(name="")], out: Path = Path("out/spectrum")) -> None:
    """Predict the singular values of a deep network's Jacobian: a table, a figure and the curve.

    Example: jpmhc spectrum --mixer sinkhorn --depth 10 --noise 0.05 --simulate

    Args:
        out: Folder for spectrum.png and spectrum.csv.
    """
    require_writable(out / "spectrum.png")
    with warnings_in_one_line(), Display() as display:
        answer = answer_query(query, display.counting("stages", 2 + query.simulate))
    print_answer(answer)
    colour = EXACT if query.matrix is not None else colour_of(query.mixer or MIXER)
    print(f"wrote {draw_spectrum(answer, query.title(answer.network), out / 'spectrum.png', colour)}")
    print(f"wrote {write_curve(answer.density, out / 'spectrum.csv')}")


main = make_main(spectrum)
