"""The paper's spectra of many layers: what collapses, and what does not."""

import math
import time
import warnings

import numpy as np
import torch
from record import claim
from torch import Tensor

from jpmhc import paper, spectra
from jpmhc.manifolds import birkhoff

# The paper's panel: four streams, Lσ² = 0.05, one skip for all layers; points x + 0.05i across the spectrum.
STREAMS, BUDGET, ETA = 4, 0.05, 0.02
POINTS = torch.complex(
    torch.tensor([0.05, 0.2, 0.5, 1.0, 1.5], dtype=torch.float64), torch.full((5,), 0.05, dtype=torch.float64)
)
KINDS = ("identity", "bistochastic", "orthogonal", "gaussian")


def network(kind: str, depth: int, *, shared: bool = True, seed: int = 0, budget: float = BUDGET) -> spectra.Network:
    """Return the panel's network with skips of a kind."""
    return spectra.Network.from_mixer(kind, depth, budget / depth, STREAMS, seed, shared=shared)


def green(asked: spectra.Network, method: str | None = None, z: Tensor = POINTS, **options: float) -> Tensor:
    """Return the exact Cauchy transform or a paper's one, without the warning of methods that are not exact."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = spectra.cauchy(asked, z, **options) if method is None else paper.cauchy(asked, z, method, **options)
    if not bool(found.converged.all()):
        raise ValueError(
            f"{int((~found.converged).sum())} of {len(z)} points of {method or 'the exact equation'} did not converge"
        )
    return found.G


def errors(asked: spectra.Network, method: str, z: Tensor = POINTS) -> Tensor:
    """Return the relative errors of a method against the chain, which is exact."""
    truth = green(asked, z=z)
    return ((green(asked, method, z) - truth) / truth).abs()


def collapsed(asked: spectra.Network) -> float:
    """Return the share of singular values below 0.1."""
    return spectra.share_below(asked, 0.1, points=24)


def sampled_distance(kind: str, depth: int, method: str | None = None) -> float:
    """Return W₁ in singular values between a theory and 100 sampled networks of width 100."""
    asked = network(kind, depth)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        curve = spectra.density(asked, transform=paper.transform(method) if method else spectra.cauchy)
    return curve.wasserstein(spectra.simulate(asked, 25, 100, seed=0))


@claim(4, "fig. scalar-vs-mc-panel", "true", stored=(0.75, 0.1789), allowed=0.02)
def smoothing_hides_the_collapse() -> tuple[float, float]:
    """The regularisation η moves mass away from zero, to the mode at 1

    Shows: bistochastic, L = 10, below 0.1: {:.1%}; at η = 0.02 {:.1%}
    """
    asked = network("bistochastic", 10)
    grid = torch.linspace(0, 1.5, 301, dtype=torch.float64)[1:].square()
    return collapsed(asked), spectra.density(asked, grid, eta=ETA).normalised().collapsed()


@claim(5, "section 7.1", "true if", stored=(0.09241, 0.4871, 0.75, 0.75), allowed=0.01)
def collapsed_share() -> tuple[float, ...]:
    """Bistochastic skips put over 75 % of the spectral mass near 0

    Why: the network is deep: the share tends to 1 − 1/n = 75 %. Differences between streams collapse, not weights
    (docs/derivations/real_networks.md).
    Shows: below 0.1 at L = 1, 2, 10, 50: {:.1%}, {:.1%}, {:.1%}, {:.1%}
    """
    return tuple(collapsed(network("bistochastic", depth)) for depth in (1, 2, 10, 50))


@claim(6, "section 7.1", "true if", stored=(5e-16, 1.267), allowed=[(0, 1e-8), 0.02])
def orthogonal_against_identity() -> tuple[float, float]:
    """Orthogonal skips cannot be told from identity skips

    Why: the noise is isotropic; in the trained block orthogonal skips spread all directions.
    Shows: largest difference of G at L = 10: isotropic {:.0e}; block {:.0%}
    """
    read, write = torch.full((STREAMS,), 1 / STREAMS, dtype=torch.float64), torch.ones(STREAMS, dtype=torch.float64)
    found = []
    for vectors in ((None, None), (read, write)):
        pair = [
            spectra.Network(network(kind, 10, shared=False).skips, 0.1, *vectors) for kind in ("identity", "orthogonal")
        ]
        one, other = (green(asked, tolerance=1e-12) for asked in pair)
        found.append(float(((other - one) / one).abs().max()))
    return found[0], found[1]


@claim(7, "fig. scalar-vs-mc-panel", "true if", stored=(1.0, 1.0, 35.25, 1.545e16), allowed=0.01)
def bounded_mode() -> tuple[float, ...]:
    """With Lσ² constant the main mode stays away from 0 and infinity

    Why: the skips keep norms; Gaussian skips have no such mode.
    Shows: orthogonal, between 0.5 and 2: {:.1%} at L = 10, {:.1%} at 1000; Gaussian, root mean square: {:.1f} at 10,
    {:.0e} at 100
    """
    deep = (network("orthogonal", depth) for depth in (10, 1000))
    inside = [spectra.share_below(asked, 2.0) - spectra.share_below(asked, 0.5) for asked in deep]
    return (*inside, *(network("gaussian", depth).mean_square() ** 0.5 for depth in (10, 100)))


@claim(8, "section 2.3", "false", stored=(0.9941, 0.93, 0.6225), allowed=0.005)
def mass_on_the_support() -> tuple[float, ...]:
    """∫ρ = 1 to 10⁻³ at ε = 0.01

    Why: That width puts mass outside the support; η proportional to x does not (docs/results/panel.md).
    Shows: integral over the support: identity L = 1 {:.3f}; bistochastic L = 1 {:.3f}, L = 10 {:.3f}
    """
    found = []
    for kind, depth in (("identity", 1), ("bistochastic", 1), ("bistochastic", 10)):
        asked = network(kind, depth)
        curve = spectra.density(asked)
        low, high = float(curve.x[0]), curve.quantile(1.0) ** 2
        x = torch.linspace(max(low, 1e-6), high, 4000, dtype=torch.float64)
        rho = -green(asked, z=torch.complex(x, torch.full_like(x, 0.01))).imag / math.pi
        found.append(float(torch.trapezoid(rho, x)))
    return tuple(found)


@claim(26, "section U", "true", stored=(0.08918, 0.02373), allowed=0.4)
def finite_width() -> tuple[float, ...]:
    """The empirical spectrum converges to the theory as N → ∞

    Shows: error of the mean G: N = 60 {:.1%}, 240 {:.1%}
    """
    asked = network("bistochastic", 2)
    z = torch.tensor([0.75 + 0.05j], dtype=torch.complex128)
    truth = green(asked, z=z)
    found = []
    for width, samples in ((15, 1000), (60, 100)):
        values = spectra.simulate(asked, width, samples, seed=1)
        mean = (1 / (z - values.flatten().double())).mean()
        found.append(float(((mean - truth) / truth).abs()))
    return tuple(found)


@claim(27, "section 7.5", "true if", stored=(0.01845, 0.036), allowed=[(0, 0.03), (0, 1)])
def many_streams() -> tuple[float, float]:
    """The operator-valued pipeline may need approximations for n ≥ 8

    Why: the nested O(L n¹⁰) pipeline is meant; the chain is exact at O(L n³).
    Shows: chain, n = 16, L = 10: within {:.1%} of sampled networks, {:.3f} s per point
    """
    asked = spectra.Network.from_mixer("bistochastic", 10, BUDGET / 10, 16, seed=0)
    start = time.perf_counter()
    truth = green(asked)
    seconds = (time.perf_counter() - start) / len(POINTS)
    values = spectra.simulate(asked, 12, 40, seed=0).flatten().double()
    mean = (1 / (POINTS.unsqueeze(-1) - values)).mean(-1)
    return float(((mean - truth) / truth).abs().max()), seconds


@claim(28, "section 1", "true", stored=(-0.7085, -1.022, -1.076, 0.666, 0.707), allowed=0.01)
def misalignment() -> tuple[float, ...]:
    """Misaligned eigenspaces accelerate the collapse

    Why: The second singular value falls faster; the mean logarithm of all does not.
    Shows: log of the second singular value per layer: alone {:.2f}, repeated {:.2f}, independent {:.2f}; below 0.1
    after three layers: repeated {:.3f}, independent {:.3f}
    """
    matrices = {
        depth: birkhoff.sample(STREAMS, (2000, depth), generator=torch.Generator().manual_seed(0)) for depth in (3, 10)
    }

    def values(stack: torch.Tensor) -> torch.Tensor:
        product = torch.eye(STREAMS, dtype=torch.float64)
        for layer in stack.unbind(1):
            product = layer @ product
        return torch.linalg.svdvals(product)

    short, long = ((m[:, :1].expand_as(m), m) for m in matrices.values())
    rates = [float(values(stack)[:, 1].log().mean()) / 10 for stack in long]
    shares = [float((values(stack) < 0.1).double().mean()) for stack in short]
    return float(torch.linalg.svdvals(matrices[10])[..., 1].log().mean()), *rates, *shares


@claim(29, "section 7.2", "true if", stored=(0.5, 0.9688, 0.75), allowed=0.02)
def projectors() -> tuple[float, ...]:
    """Rank-p projections preserve more of the spectrum than bistochastic matrices

    Why: all layers have the same projector.
    Shows: below 0.1 at L = 10: one projector {:.0%}, different ones {:.0%}, different bistochastic {:.0%}
    """
    found = []
    for kind, shared in (("grassmann", True), ("grassmann", False), ("bistochastic", False)):
        found.append(sum(collapsed(network(kind, 10, shared=shared, seed=seed)) for seed in range(8)) / 8)
    return tuple(found)


@claim(30, "section 1", "true if", stored=(1e-08, 0.0, 0.75), allowed=[(0, 0.001), (0, 0.001), 0.01])
def permutations_do_not_collapse() -> tuple[float, float, float]:
    """No reparametrisation of the Birkhoff polytope escapes the collapse

    Why: the skips are interior points and the network is deep; permutations, the vertices, never collapse.
    Shows: below 0.1: permutations {:.0%}; 1 % off-diagonal mass, L = 48 {:.0%}, L = 300 {:.0%}
    """
    rng = np.random.default_rng(0)
    skips = torch.stack([torch.eye(STREAMS, dtype=torch.float64)[rng.permutation(STREAMS)] for _ in range(10)])
    near = torch.full((STREAMS, STREAMS), 0.01 / 3, dtype=torch.float64).fill_diagonal_(0.99)
    shares = [collapsed(spectra.Network.repeated(near, BUDGET / depth, depth)) for depth in (48, 300)]
    return collapsed(spectra.Network(skips, BUDGET / 10)), shares[0], shares[1]


@claim(70, "sections 1 and 7.1", "in part", stored=(0.9522, 0.001565), allowed=0.02)
def gradients_reach_every_sublayer() -> tuple[float, ...]:
    """The collapse becomes a loss of capacity, spectral stalling

    Why: Differences between streams die out, but sublayers write into the mean of the streams, which bistochastic skips
    keep, and a language model trains better with them (docs/results/which_mixer.md).
    Shows: squared derivative of the output by sublayers' outputs, least over largest, L = 48: bistochastic {:.2f},
    orthogonal {:.4f}
    """
    read, write = torch.full((STREAMS,), 1 / STREAMS, dtype=torch.float64), torch.ones(STREAMS, dtype=torch.float64)
    ratios = []
    for kind in ("bistochastic", "orthogonal"):
        skips = network(kind, 48, shared=False).skips
        gains = spectra.gradient_gains(spectra.Network(skips, BUDGET / 48, read=read, write=write))
        ratios.append(float(gains.min() / gains.max()))
    return tuple(ratios)
