"""The paper's ways to compute the spectra of many layers: which are right, and how long they take."""

import time

import torch
from record import claim

from jpmhc import spectra
from jpmhc.manifolds import birkhoff
from spectra import BUDGET, ETA, KINDS, POINTS, STREAMS, errors, green, network, sampled_distance


@claim(1, "section 2.3", "true if", stored=0.001361, allowed=(0, 0.005))
def scalar_theory_of_one_layer() -> float:
    """The scalar theory matches Monte Carlo at L = 1 for all mixers

    Why: eq. dyson_subordination is meant; eq. dyson-fp is another law.
    Shows: largest W₁ to 100 networks, four kinds: {:.4f}
    """
    return max(sampled_distance(kind, 1, "dyson") for kind in KINDS)


@claim(2, "sections 2.1 and 2.3", "true", stored=(0.3548, 0.5548, 2e-10), allowed=[0.02, 0.02, (0, 1e-7)])
def scalar_theory_of_two_layers() -> tuple[float, ...]:
    """The scalar theory fails for bistochastic and Gaussian mixers at L ≥ 2

    Shows: median error of G at L = 2: bistochastic {:.0%}, Gaussian {:.0%}; orthogonal {:.0e}
    """
    return tuple(float(errors(network(kind, 2), "z1").median()) for kind in ("bistochastic", "gaussian", "orthogonal"))


@claim(3, "alg. ov_panel", "false", stored=(1.35, 6.637, 5052000000.0), allowed=0.02)
def matrix_power() -> tuple[float, float, float]:
    """The operator-valued theory fully catches the spectrum

    Why: As printed it is worse than the scalar theory; the chain is exact (docs/derivations/chain.md).
    Shows: error of G, bistochastic: {:.0%} to {:.0%} at L = 2, {:.0e} times G at L = 10
    """
    two = errors(network("bistochastic", 2), "z1-matrix")
    return float(two.min()), float(two.max()), float(errors(network("bistochastic", 10), "z1-matrix").max())


@claim(14, "section 2.3", "true", stored=(0.0068, 0.6), allowed=[(0, 1), (0, 2)])
def time_of_a_point() -> tuple[float, ...]:
    """Less than 1 s per point on a CPU for n ≤ 4, L ≤ 100

    Shows: n = 4, L = 100: chain {:.4f} s, twisted fold {:.1f} s
    """
    asked, seconds = network("bistochastic", 100, shared=False), []
    for method, count in ((None, 100), ("twisted", 5)):
        x = torch.linspace(0.05, 3, count, dtype=torch.float64)
        start = time.perf_counter()
        green(asked, method, torch.complex(x, torch.full_like(x, ETA)))
        seconds.append((time.perf_counter() - start) / count)
    return tuple(seconds)


@claim(16, "eq. twisted_fold", "true if", stored=(1e-10, 0.1552, 0.03353), allowed=[(0, 1e-7), 0.02, 0.02])
def twisted_product() -> tuple[float, float, float]:
    """The twisted S-transform product gives the law of JᵀJ

    Why: L ≤ 2 and the first factor is Y₁Y₁ᵀ instead of the printed Y₁ᵀY₁ (docs/derivations/paper_methods.md).
    Shows: error of G, bistochastic: L = 2 {:.0e}, as printed {:.0%}; L = 3 {:.0%}
    """
    two, three = (network("bistochastic", depth, shared=False) for depth in (2, 3))
    return (
        float(errors(two, "twisted").max()),
        float(errors(two, "twisted-paper").max()),
        float(errors(three, "twisted").max()),
    )


@claim(17, "section O.2", "false", stored=(1e-10, 0.9429), allowed=[(0, 1e-7), 0.02])
def commuting_skips() -> tuple[float, float]:
    """For commuting A the twisted fold reduces to the scalar product

    Why: It reduces to the untwisted matrix-valued product; the scalar one averages over directions.
    Shows: symmetric bistochastic skips: the fold is {:.0e} off the chain, the scalar product {:.0%}
    """
    matrix = birkhoff.sample(STREAMS, generator=torch.Generator().manual_seed(0))
    asked = spectra.Network.repeated((matrix + matrix.T) / 2, BUDGET / 2, 2)
    return float(errors(asked, "twisted").max()), float(errors(asked, "z1").max())


@claim(18, "section V.1", "false", stored=0.884, allowed=0.02)
def subordination_matrix() -> float:
    """For identical layers b₁ stays on the scalar manifold z₁ · I

    Why: Only where every AᵀA is a multiple of I.
    Shows: two bistochastic layers: distance of b₁ from multiples of I over b₁ {:.0%}
    """
    # Find b with $G_1(b)\,b - 1 = z G_L - 1$ from the chain's matrix-valued G_L and eq. matrix_dyson_schur.
    asked = network("bistochastic", 2)
    z, skip, variance = POINTS[2], asked.skips[0].to(torch.complex128), float(asked.variance[0])
    found = spectra.cauchy(asked, z.unsqueeze(0), matrix=True, tolerance=1e-12)
    assert found.matrix is not None
    eye, moment = torch.eye(STREAMS, dtype=torch.complex128), z * found.matrix[0]
    ratio = moment @ torch.linalg.inv(moment - eye)
    g, h = found.G[0], torch.tensor(1 - 1e-3j, dtype=torch.complex128)
    for _ in range(2000):
        u = 1 - variance * g
        rest = variance * h * eye + skip.T @ skip / u
        b = rest @ ratio
        inner = torch.linalg.inv(b - rest)
        new = inner.trace() / STREAMS, 1 / u + (skip @ inner @ skip.T).trace() / STREAMS / u**2
        change = max(abs(complex(new[0] - g)), abs(complex(new[1] - h)))
        g, h = (g + new[0]) / 2, (h + new[1]) / 2
    if change > 1e-10:
        raise ValueError(f"the equation for b₁ is solved to {change:.0e} only")
    return float(torch.linalg.matrix_norm(b - b.trace() / STREAMS * eye) / torch.linalg.matrix_norm(b))


@claim(19, "alg. ov_hetero", "false", stored=(0.4154, 1.099), allowed=0.02)
def scalar_subordination() -> tuple[float, float]:
    """Operator-valued subordination computes the spectrum of heterogeneous layers

    Why: Its unknown w is a scalar: it is the scalar theory again.
    Shows: error of G at L = 2, different bistochastic skips: median {:.0%}, largest {:.0%}
    """
    found = errors(network("bistochastic", 2, shared=False), "subordination")
    return float(found.median()), float(found.max())
