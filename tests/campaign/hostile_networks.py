"""Networks that are hard for the solver: an answer that moments and simulation confirm, or a layer that is named."""

import warnings

import numpy as np
import torch
from torch import Tensor

from jpmhc.spectra import Density, Network, density, simulate
from tests.campaign.tally import Tally

ROUND = 1
SKIPS = ("singular", "nilpotent", "ill-conditioned", "defective", "orthogonal", "gaussian")
# Rows of a simulated Jacobian, and how many are simulated.
SIZE, SAMPLES = 120, 4
# How far a singular value may move, as a share of itself, and how much of the distribution may then still differ.
MOVED, DIFFERENT = 0.1, 0.05
# Squared singular values below this fraction of the largest are rounding.
ROUNDING = 1e-24


def run(rng: np.random.Generator, size: int) -> Tally:
    """Solve `size` hostile networks."""
    tally = Tally()
    for _ in range(size):
        seed = int(rng.integers(2**31))
        fault = find_fault(*draw_network(np.random.default_rng(seed)), seed)
        if fault is None:
            tally.hold()
        else:
            tally.fail(fault)
    return tally


def find_fault(network: Network, label: str, seed: int) -> str | None:
    """Say what is wrong with the density of a network, or return None."""
    label = f"draw_network({seed}), {label}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = density(network)
    except (ValueError, UserWarning) as refusal:
        return f"{label}: refused: {refusal}"
    if abs(found.mass + found.below - 1) > 0.01:
        return f"{label}: a mass of {found.mass + found.below:.4f}"
    if abs(found.first_moment - found.exact_moment) > 0.03 * found.exact_moment:
        return f"{label}: a mean square of {found.first_moment:.4g} instead of {found.exact_moment:.4g}"
    samples = simulate(network, max(1, SIZE // network.streams), SAMPLES, seed)
    distance = find_distance(found, samples)
    return None if distance <= DIFFERENT else f"{label}: {distance:.3f} of the distribution differs from simulation"


def find_distance(found: Density, samples: Tensor) -> float:
    """Return the share by which distributions differ where every singular value may move by a share of itself.

    Of what lies below its grid the density says how much it is, and not where.
    """
    samples = samples.flatten().sort().values
    at = samples[samples > max(ROUNDING * float(samples[-1]), float(found.x[0]))]
    if len(at) == 0:
        return float(1 - found.below)
    grid, cumulative = found.x.log().numpy(), found.cumulative().numpy()

    def theory(x: Tensor) -> np.ndarray:
        return np.interp(x.log().numpy(), grid, cumulative, left=cumulative[0], right=1.0)

    above = torch.searchsorted(samples, at, right=True).numpy() / len(samples)
    below = torch.searchsorted(samples, at).numpy() / len(samples)
    factor = (1 + MOVED) ** 2
    return float(max((above - theory(at * factor)).max(), (theory(at / factor) - below).max(), 0.0))


def draw_network(rng: np.random.Generator) -> tuple[Network, str]:
    """Draw a network, and say in a few words what it is."""
    n, depth = int(rng.integers(1, 7)), int(rng.integers(1, 31))
    kind = str(rng.choice([*SKIPS[:4], "mixed"]))
    noise = str(rng.choice(["isotropic", "read and write", "general"]))
    kinds = [str(rng.choice(SKIPS)) if kind == "mixed" else kind for _ in range(depth)]
    skips = torch.stack([draw_skip(rng, name, n) for name in kinds])
    shared = rng.random() < 0.3
    if shared:
        skips = skips[:1].repeat(depth, 1, 1)
    # Sizes of skips and noises: one for all layers, one for each, or for each layer two that do not belong together.
    sizes = str(rng.choice(["one", "layers", "apart"]))
    size = torch.tensor(10.0 ** rng.uniform(-3, 3, 1 if sizes == "one" else depth)).expand(depth)
    if sizes == "apart":
        deviation = torch.tensor(10.0 ** rng.uniform(-3, 3, depth))
    else:
        deviation = size * torch.tensor(10.0 ** rng.uniform(-3, 1, 1 if sizes == "one" else depth))
    structure: dict[str, Tensor] = {}
    if noise == "read and write":
        structure = {name: normal(rng, depth, n) for name in ("read", "write")}
    elif noise == "general":
        structure = {"covariance": normal(rng, depth, int(rng.integers(1, 4)), n, n) / n}
    network = Network(skips * size.view(-1, 1, 1), deviation.square(), **structure)
    return network, f"{depth} {'equal ' if shared else ''}{kind} layers of {n} streams, {noise} noise, sizes {sizes}"


def draw_skip(rng: np.random.Generator, kind: str, n: int) -> Tensor:
    """Draw a skip matrix [n, n] of a kind."""
    turn = torch.linalg.qr(normal(rng, n, n))[0] if rng.random() < 0.5 else torch.eye(n, dtype=torch.float64)
    if kind == "orthogonal":
        return torch.linalg.qr(normal(rng, n, n))[0]
    if kind == "gaussian":
        return normal(rng, n, n) / n**0.5
    if kind == "singular":
        rank = int(rng.integers(n))
        return normal(rng, n, rank) @ normal(rng, rank, n) / n
    if kind == "nilpotent":
        return turn @ normal(rng, n, n).triu(1) @ turn.mT
    if kind == "defective":
        chain = torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
        return turn @ (rng.uniform(-1, 1) * torch.eye(n, dtype=torch.float64) + chain) @ turn.mT
    values = torch.tensor(10.0 ** rng.uniform(-12, 0, n))
    return turn @ torch.diag(values) @ torch.linalg.qr(normal(rng, n, n))[0]


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers."""
    return torch.from_numpy(rng.standard_normal(shape))
