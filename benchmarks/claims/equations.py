"""The paper's equations of one layer, of signals and of numerics: which are right as printed."""

import math

import numpy as np
import torch
from record import claim
from scipy.interpolate import AAA

from jpmhc import spectra
from jpmhc.manifolds import orthogonal
from jpmhc.spectra import trace
from jpmhc.spectra.activations import ACTIVATIONS, hermite_nodes
from spectra import BUDGET, ETA, POINTS, green, network

Z = POINTS.numpy()


def one_layer(skip: float, variance: float = BUDGET) -> np.ndarray:
    """Return the right Cauchy transform of one layer with a scalar skip."""
    return green(spectra.Network.repeated(torch.eye(1) * skip, variance, 1), "dyson").numpy()


def printed(method: str) -> np.ndarray:
    """Return G by one of the main text's equations for one layer with the skip 1."""
    return green(spectra.Network.repeated(torch.eye(1), BUDGET, 1), method).numpy()


@claim(9, "eq. dyson-fp", "false", stored=(0.873, 50.01), allowed=0.01)
def scalar_dyson() -> tuple[float, float]:
    """The scalar Dyson equation m = a/(z − σ²m) gives G = m/z

    Why: The appendix's eq. dyson_subordination is right.
    Shows: error of G at a = 1, σ² = 0.05: {:.0%} to {:.0%}
    """
    error = np.abs(printed("dyson-fp") / one_layer(1.0) - 1)
    return float(error.min()), float(error.max())


@claim(10, "eq. newton-scalar", "false", stored=(42, 4), allowed=0.0)
def newton_derivative() -> tuple[float, float]:
    """The Newton step for eq. dyson-fp divides by 1 + aσ²/(z − σ²m)²

    Why: The derivative is 1 − aσ²/(z − σ²m)²; as printed convergence is linear.
    Shows: iterations to 10⁻¹²: as printed {:.0f}, with the right sign {:.0f}
    """
    z, variance = complex(Z[2]), BUDGET
    counts = []
    for sign in (1, -1):
        m, count = 1 / z, 0
        while abs(residual := m - 1 / (z - variance * m)) > 1e-12 and count < 1000:
            m -= residual / (1 + sign * variance / (z - variance * m) ** 2)
            count += 1
        counts.append(float(count))
    return counts[0], counts[1]


@claim(11, "prop. kronecker-collapse", "false", stored=1.947, allowed=0.01)
def matrix_equation_of_one_stream() -> float:
    """For n = 1 the matrix equation reduces to eq. dyson-fp

    Why: It becomes the cubic M = (a + σ²M)/(z − (a + σ²M)²); neither is the right law.
    Shows: a = 1, σ² = 0.05: median difference of the two solutions {:.0%}
    """
    scalar, resolvent = Z * printed("dyson-fp"), printed("matrix-dyson")
    matrix = resolvent / (1 - BUDGET * resolvent)  # M = (1 + σ²M) G
    return float(np.median(np.abs(matrix / scalar - 1)))


@claim(12, "section 2.2", "in part", stored=2097000.0, allowed=0.01)
def kronecker_saving() -> float:
    """The Kronecker structure saves (p/n)³ ≈ 10⁵ at n = 4, p = 512

    Why: It saves 2·10⁶; one layer needs only a scalar equation.
    Shows: (512/4)³ = {:.1e}
    """
    return (512 / 4) ** 3


@claim(13, "section 2.3", "true", stored=(2, 5), allowed=0.0)
def newton_iterations() -> tuple[float, float]:
    """With branch continuation Newton takes 3–5 iterations to 10⁻¹²

    Shows: eq. dyson_subordination, bistochastic: median {:.0f}, largest {:.0f}
    """
    s = torch.linalg.svdvals(network("bistochastic", 1).skips[0]).square().numpy()
    g, counts = 0.1 + 0j, []
    for z in np.linspace(10, 0.01, 400) + 1j * ETA:
        count = 0
        while True:
            u = 1 - BUDGET * g
            h, square = np.mean(1 / (z * u**2 - s)), np.mean(1 / (z * u**2 - s) ** 2)
            residual = u * h - g  # eq. dyson_residual
            if abs(residual) < 1e-12:
                break
            g -= residual / (-BUDGET * h + 2 * BUDGET * z * u**2 * square - 1)  # eq. dyson_jacobian
            count += 1
        counts.append(count)
    return float(np.median(counts[1:])), float(max(counts[1:]))


@claim(15, "section F.5.5", "false", stored=(0.2021, 3.573), allowed=0.01)
def self_energy() -> tuple[float, float]:
    # The printed self-energy leads to eq. matrix-dyson.
    """The self-energy is off-diagonal, Σ₁₂ = σ² m₁₂

    Why: It is diagonal: Σ₁₁ = σ² tr M₂₂, Σ₂₂ = σ² tr M₁₁.
    Shows: error of G: A = I {:.0%}, A = 0 {:.0%}
    """
    identity = np.abs(printed("matrix-dyson") / one_layer(1.0) - 1)
    nothing = np.abs(1 / Z / one_layer(0.0, 1.0) - 1)  # m₁₂ = 0 solves the printed equations
    return float(identity.max()), float(nothing.max())


@claim(20, "eq. richardson", "false", stored=(1.984, 0.02055, 0.0001059), allowed=[0.02, 0.1, 0.1])
def smoothing_order() -> tuple[float, float, float]:
    """The smoothing error of the density is O(η²)

    Why: It is O(η): the tableau needs 2^j instead of 4^j (`refine="richardson"`).
    Shows: error at 2η over error at η: {:.2f}; after four levels: 4^j {:.0e}, 2^j {:.0e}
    """
    asked = network("identity", 1)
    x = torch.linspace(0.6, 1.6, 41, dtype=torch.float64)

    def curve(eta: float, refine: str | None = None) -> torch.Tensor:
        return spectra.density(asked, x, eta=eta, refine=refine).values

    truth = curve(1e-7)
    errors = [(curve(eta) - truth).abs() for eta in (0.02, 0.01)]
    paper, ours = ((curve(0.01, name) - truth).abs().max() for name in ("richardson-paper", "richardson"))
    return float((errors[0] / errors[1]).median()), float(paper), float(ours)


@claim(21, "section S.3", "true if", stored=(3.177e-06, 0.02244, 0.009772), allowed=[(0, 1e-2), (1e-2, 1e4), (0, 1e-1)])
def rational_fit() -> tuple[float, float, float]:
    """AAA recovers the density from 20–50 evaluations of G

    Why: η is 0.02; with a smaller η a deep network needs more.
    Shows: error, bistochastic L = 10: 50 nodes, η = 0.02 {:.0e}; η = 0.001 x {:.0e}, 120 in log x {:.0e}
    """
    asked = network("bistochastic", 10)
    x = np.linspace(0.01, 2.0, 400)
    return (
        _fit_error(asked, 50, x, np.full_like(x, ETA), False),
        _fit_error(asked, 50, x, 1e-3 * x, False),
        _fit_error(asked, 120, x, 1e-3 * x, True),
    )


def _fit_error(asked: spectra.Network, count: int, x: np.ndarray, eta: np.ndarray, logarithmic: bool) -> float:
    place = np.log if logarithmic else np.asarray
    low, high = place(x[0]), place(x[-1])
    nodes = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(count) + 0.5) / count)[::-1]
    nodes = np.exp(nodes) if logarithmic else nodes
    points = nodes + 1j * np.interp(nodes, x, eta)
    fit = AAA(points, green(asked, z=torch.from_numpy(points)).numpy(), rtol=1e-10)
    truth = -green(asked, z=torch.from_numpy(x + 1j * eta)).imag.numpy()
    return float(np.abs(-fit(x + 1j * eta).imag - truth).max() / truth.max())


@claim(22, "eq. hutchpp", "false", stored=(-4.078e-05, 1.002), allowed=[(-0.02, 0.02), 0.05])
def stochastic_trace() -> tuple[float, float]:
    """Hutch++ with complex Gaussian unit vectors and gᵀ estimates the trace

    Why: E[gᵀAg] = 0 for complex g; it needs g* and a factor N.
    Shows: a random positive matrix of size 60, estimated over true: as printed {:.0e}, with g* and N {:.2f}
    """
    generator = torch.Generator().manual_seed(0)
    size, count = 60, 2000
    matrix = torch.randn(size, size, dtype=torch.complex128, generator=generator)
    matrix = matrix @ matrix.mH
    sketch = torch.linalg.qr(torch.randn(size, 10, dtype=torch.complex128, generator=generator))[0]
    rest = torch.eye(size, dtype=torch.complex128) - sketch @ sketch.mH
    inner = rest @ matrix @ rest
    g = trace.probes(count, size, dtype=torch.complex128, generator=generator)
    printed = (g @ inner * g).sum(-1).mean()
    right = size * (g.conj() @ inner * g).sum(-1).mean()
    truth = inner.trace()
    return float((printed / truth).real), float((right / truth).real)


@claim(23, "section L", "true if", stored=(8e-10, 0.0003018, 0.881, 0.04055), allowed=[(0, 1e-8), 0.1, 0.05, 0.05])
def hermite_quadrature() -> tuple[float, ...]:
    """Gauss–Hermite with 100 nodes computes an activation's moments

    Why: the activation is smooth and q at most about 1.
    Shows: error of ψ: tanh, q = 1 {:.0e}, 4 {:.0e}, 100 {:.0%}; hard-tanh {:.1%}
    """
    nodes, weights = hermite_nodes(100)
    found = []
    for name, q in (("tanh", 1.0), ("tanh", 4.0), ("tanh", 100.0), ("hard_tanh", 1.0)):
        activation = ACTIVATIONS[name]
        printed = (activation.derivative(q**0.5 * nodes).square() * weights).sum()
        found.append(abs(float(printed / activation.psi(q)) - 1))
    return tuple(found)


@claim(24, "eqs. q_recursion, v_recursion", "false", stored=(0.04057, 348.2, 0.009454), allowed=[0.02, 0.02, (0, 0.03)])
def signal_propagation() -> tuple[float, float, float]:
    """The pre-activation variance is q = σ_w² (v + e)

    Why: q = σ_w² v (+ σ_b²): e is a moment of slopes; and the skip's gain is ‖A‖_F² over np, not p.
    Shows: mean square after 5 tanh layers: one stream as printed {:.0%} off, four a factor {:.0f}; mean field {:.1%}
    off
    """
    generator = torch.Generator().manual_seed(0)
    skips = orthogonal.sample(4, (5,), generator=generator)
    single = torch.ones(5, 1, 1, dtype=torch.float64)
    one, four = (_mean_square_of_tanh_networks(part, 400, generator) for part in (single, skips))

    def ratio(layers: torch.Tensor, form: str, measured: float) -> float:
        return float(spectra.propagate("tanh", layers, 1.0, form=form).v[-1]) / measured

    printed = abs(ratio(single, "paper", one) - 1)
    return printed, ratio(skips, "paper", four), abs(ratio(skips, "mean_field", four) - 1)


def _mean_square_of_tanh_networks(skips: torch.Tensor, size: int, generator: torch.Generator) -> float:
    squares = []
    for _ in range(40):
        x = torch.randn(skips.shape[-1], size // skips.shape[-1], dtype=torch.float64, generator=generator)
        for skip in skips:
            weight = torch.randn(size, size, dtype=torch.float64, generator=generator) / size**0.5
            x = skip @ x + torch.tanh(weight @ x.flatten()).view_as(x)
        squares.append(float(x.square().mean()))
    return sum(squares) / len(squares)


@claim(25, "sections 1 and 2.1", "true if", stored=(0.5593, 0.09098, 0.009837), allowed=0.05)
def universality() -> tuple[float, ...]:
    """Any activation gives the same spectrum at the same weight variance

    Why: each of many layers adds little noise; otherwise the distribution of slopes matters.
    Shows: difference of G, ReLU to Gaussian, Lσ² = 1: L = 1 {:.0%}, 4 {:.1%}, 32 {:.1%}
    """
    x = torch.tensor([0.1, 0.3, 0.6, 1.0, 2.0, 4.0], dtype=torch.float64)
    z = torch.complex(x, torch.full_like(x, 0.1))
    found = []
    for depth in (1, 4, 32):
        scale = math.sqrt(2 / depth)  # ψ = 1/2 for ReLU, so that L σ² = 1
        skip = torch.eye(1, dtype=torch.float64)
        exact = spectra.Network.from_activation(skip, "relu", scale, depth=depth, paths=256)
        mean = spectra.Network.repeated(skip, float(exact.variance[0]), depth)
        one, other = green(exact, z=z), green(mean, z=z)
        found.append(float(((other - one) / one).abs().max()))
    return tuple(found)
