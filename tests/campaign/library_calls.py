"""Calls of the library in float32 with hostile numbers: as the same formula in float64, or NaN outside of its range."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from jpmhc.connections import eager, reference
from jpmhc.manifolds import birkhoff, grassmann, orthogonal, permutation
from jpmhc.mixers import MIXERS, make_mixer
from tests.campaign.tally import Tally

ROUND = 500
# The largest difference from float64, relative to the largest entry.
TOLERANCE = 2e-5


def run(rng: np.random.Generator, size: int) -> Tally:
    """Make `size` calls, each of a random function with random numbers."""
    tally = Tally()
    names = list(CALLS)
    for _ in range(size):
        name, seed = names[rng.integers(len(names))], int(rng.integers(2**31))
        fault = find_fault(name, seed)
        if fault is None:
            tally.hold()
        else:
            tally.fail(f"find_fault({name!r}, {seed}): {fault}")
    return tally


def find_fault(name: str, seed: int) -> str | None:
    """Make one call in float32 and in float64; say how they differ, or return None."""
    function, arguments, allowed = CALLS[name](np.random.default_rng(seed))
    with torch.no_grad():
        found = function(*arguments).double()
        truth = function(*(argument.double() for argument in arguments))
    right = (found - truth).abs() <= allowed * truth.abs().amax().clamp(min=1.0)
    wrong = ~(right | found.isnan())
    if bool(wrong.any()):
        worst = float((found - truth).abs()[wrong].max())
        return f"{int(wrong.sum())} of {wrong.numel()} numbers differ from float64 by up to {worst:.1e}"
    if bool(found.isnan().any()) and all(float(argument.abs().max()) < 1e4 for argument in arguments):
        return "NaN for numbers below 1e4"
    return None


Call = tuple[Callable[..., Tensor], tuple[Tensor, ...], float]


def call_projection(rng: np.random.Generator) -> Call:
    """A connection's logits, by the reference or the eager form, of streams with an offset and of any size."""
    streams, width = int(rng.integers(1, 9)), int(rng.integers(8, 65))
    norm = str(rng.choice(["layer", "rms"]))
    x = draw(rng, 4, streams, width) * size(rng, -2, 19) + (size(rng, 0, 4) if rng.random() < 0.5 else 0.0)
    weight = draw(rng, 6, streams * width) / (streams * width) ** 0.5
    if rng.random() < 0.5:
        return (lambda x, weight: reference.compute_logits(x, weight, norm)), (x, weight), TOLERANCE
    return (lambda x, weight: eager.compute_logits(x, weight, norm)[0]), (x, weight), TOLERANCE


def call_streams(rng: np.random.Generator) -> Call:
    """The sublayer's input, the write, and the norm after it."""
    n, d = int(rng.integers(1, 9)), int(rng.integers(1, 65))
    x = draw(rng, 3, n, d) * size(rng, -6, 6)
    kind = rng.integers(3)
    if kind == 0:
        return reference.gather, (x, draw(rng, 3, n).softmax(-1)), TOLERANCE
    if kind == 1:
        return reference.scatter, (x, draw(rng, 3, d), draw(rng, 3, n), draw(rng, 3, n, n)), TOLERANCE
    return reference.normalise_streams, (draw(rng, 3, n, d) * size(rng, -2, 19),), TOLERANCE


def call_mixer(rng: np.random.Generator) -> Call:
    """The matrices that a mixer makes of logits of any size."""
    name = str(rng.choice([name for name in MIXERS if name != "grassmann"]))
    most = 4 if name in ("kronecker", "mhc_lite") else 8  # two keep to few streams, or to some numbers of them
    mixer = make_mixer(name, 4 if most == 4 else int(rng.integers(2, 1 + most)))
    logits = draw(rng, 4, mixer.logits) * size(rng, -3, 3)
    # Sharp logits multiply the rounding of what they are: exp(100) of a number known to seven digits is known to five.
    return mixer, (logits,), TOLERANCE * max(1.0, float(logits.abs().max()) if mixer.logits else 1.0)


def call_cayley(rng: np.random.Generator) -> Call:
    """Orthogonal matrices of logits up to 1e7."""
    n = int(rng.integers(2, 9))
    matrix = draw(rng, 4, n, n) * size(rng, -3, 7)
    return orthogonal.project, (matrix,), TOLERANCE


def call_frame(rng: np.random.Generator) -> Call:
    """Projectors onto the span of frames of any size, whose condition multiplies the rounding."""
    n = int(rng.integers(2, 9))
    frame = draw(rng, 4, n, int(rng.integers(1, n + 1))) * size(rng, -30, 30)
    unit = frame / frame.abs().amax(-2, keepdim=True)
    return grassmann.project, (frame,), TOLERANCE * float(torch.linalg.cond(unit.double()).max())


def call_sinkhorn(rng: np.random.Generator) -> Call:
    """Doubly stochastic matrices of logits of any size."""
    n = int(rng.integers(2, 9))
    return birkhoff.project, (draw(rng, 4, n, n) * size(rng, -3, 3),), TOLERANCE


def call_permutations(rng: np.random.Generator) -> Call:
    """Mixtures of permutations."""
    basis = permutation.basis(4, 6)
    logits = draw(rng, 4, 6) * size(rng, -3, 3)
    allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
    return (lambda logits: permutation.mix(logits, basis)), (logits,), allowed


CALLS: dict[str, Callable[[np.random.Generator], Call]] = {
    "projection": call_projection,
    "streams": call_streams,
    "mixer": call_mixer,
    "cayley": call_cayley,
    "frame": call_frame,
    "sinkhorn": call_sinkhorn,
    "permutations": call_permutations,
}


def draw(rng: np.random.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in float32."""
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def size(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw a size between two powers of ten."""
    return float(10.0 ** rng.uniform(low, high))
