"""The paper's statements about sets of matrices, their projections and the gradients through them."""

import math
from functools import lru_cache

import torch
from record import claim
from torch import Tensor

from jpmhc.manifolds import birkhoff, grassmann, orthogonal

N = 4


def logits(scale: float, count: int = 10_000, n: int = N, seed: int = 0) -> Tensor:
    """Return normal logits of a scale, in float64. [count, n, n]"""
    return scale * torch.randn(count, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@lru_cache
def doubly_stochastic(scale: float, count: int = 2000) -> Tensor:
    """Return the converged Sinkhorn projections of such logits. [count, n, n]"""
    return birkhoff.project(logits(scale, count), iterations=2000, tolerance=1e-13)


def dimension(matrices: Tensor) -> int:
    """Return the dimension of the linear span of matrices."""
    return int(torch.linalg.matrix_rank(matrices.flatten(1), rtol=1e-9))


@claim(31, "sections 1 and 7.1", "true if", stored=(2, 9, 16, 4), allowed=0.0)
def span_of_rotations() -> tuple[float, ...]:
    """O(n) spans all n × n matrices

    Why: n ≥ 3, or reflections are included: Cayley reaches rotations alone.
    Shows: span of Cayley's range, n = 2, 3, 4: {:.0f}, {:.0f}, {:.0f}; of O(2): {:.0f}
    """
    ranges = [float(dimension(orthogonal.project(logits(10, 200, n)))) for n in (2, 3, 4)]
    both = orthogonal.sample(2, (200,), generator=torch.Generator().manual_seed(0))
    return (*ranges, float(dimension(both)))


@claim(32, "section 7.1", "in part", stored=10, allowed=0.0)
def span_of_bistochastic_matrices() -> float:
    """Bistochastic matrices span less than orthogonal ones, dimension q² − 2q

    Why: Less, but (q − 1)² + 1, as section 1 says.
    Shows: q = 4: {:.0f}
    """
    return float(dimension(doubly_stochastic(1.0, 200)))


@claim(33, "section 1; table ds-vs-orth", "true", stored=4e-16, allowed=(-1e-9, 1e-9))
def operator_norm() -> float:
    """The operator norm of doubly stochastic matrices is at most 1

    Shows: largest norm of 2000, less one: {:.0e}
    """
    return float(torch.linalg.matrix_norm(doubly_stochastic(1.0), 2).max()) - 1


@claim(34, "table ds-vs-orth", "false", stored=(0.5055, 0.2012), allowed=[0.05, 0.1])
def determinant_of_bistochastic_matrices() -> tuple[float, float]:
    """det H ∈ [0, 1] for doubly stochastic H

    Why: |det H| ≤ 1 of either sign: swapping two rows changes it.
    Shows: 2000 converged Sinkhorn matrices, scale 1: negative {:.1%}; largest |det| {:.2f}
    """
    found = torch.linalg.det(doubly_stochastic(1.0))
    return float((found < 0).double().mean()), float(found.abs().max())


@claim(
    35,
    "sections 3.1 and I.3",
    "true if",
    stored=(0.0, 0.6988, 0.001964, 0.9989, 7e-16),
    allowed=[(0, 0.001), 0.05, 0.05, 0.01, (0, 1e-13)],
)
def two_cayley_iterations() -> tuple[float, ...]:
    """Two Cayley iterations give ‖YᵀY − I‖_max < 10⁻³ at α = 0.1

    Why: the entries of H̃ are of scale 0.3 or less; the exact transform holds at any scale.
    Shows: above 10⁻³, scale 0.3 {:.0%}, 1 {:.0%} (median {:.1e}), 3 {:.0%}; exact {:.0e}
    """
    found = {scale: orthogonal.violation(orthogonal.project(logits(scale), 0.1, 2)) for scale in (0.3, 1.0, 3.0)}
    shares = {scale: float((value > 1e-3).double().mean()) for scale, value in found.items()}
    exact = float(orthogonal.violation(orthogonal.project(logits(3.0), 0.1)).max())
    return shares[0.3], shares[1.0], float(found[1.0].median()), shares[3.0], exact


@claim(36, "section I.3", "true if", stored=(0.9454, 1.0, 0.2443, 1.607), allowed=0.02)
def determinant_of_cayley_iterates() -> tuple[float, ...]:
    """|det Y| ≈ 1 after two iterations

    Why: the entries of H̃ are of scale 1 or less.
    Shows: range of det at scale 1: {:.3f} to {:.3f}; at 3: {:.2f} to {:.2f}
    """
    found = [torch.linalg.det(orthogonal.project(logits(scale), 0.1, 2)) for scale in (1.0, 3.0)]
    return tuple(float(value) for det in found for value in (det.min(), det.max()))


@claim(37, "eq. cayley-closed", "in part", stored=1.0, allowed=0.01)
def cayley_is_never_singular() -> float:
    """The Cayley transform reaches det = +1 minus where I − W/2 is singular

    Why: I − W/2 is never singular; missed are rotations with an eigenvalue −1.
    Shows: smallest singular value of I − W/2, W of scale 10: {:.3f}
    """
    matrix = logits(10.0)
    return float(torch.linalg.svdvals(torch.eye(N) - (matrix - matrix.mT) / 2).min())


@claim(38, "section 3.1; eq. cayley-closed", "in part", stored=(4e-16, 0.4412), allowed=[(0, 1e-12), 0.05])
def two_signs() -> tuple[float, float]:
    """The iteration converges to (I − W/2)(I + W/2)⁻¹ and to (I + W/2)(I − W/2)⁻¹

    Why: To the second; the first is its inverse.
    Shows: after 40 iterations: distance to the second {:.0e}, to the first {:.2f}
    """
    matrix = logits(1.0, 1000)
    half = 0.05 * (matrix - matrix.mT)
    eye = torch.eye(N, dtype=torch.float64)
    appendix, main = torch.linalg.solve(eye - half, eye + half), torch.linalg.solve(eye + half, eye - half)
    found = orthogonal.project(matrix, 0.1, 40)
    return float((found - appendix).abs().max()), float((found - main).abs().amax((-2, -1)).median())


def gauss_seidel(p: Tensor, gradient: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Run alg. sinkhorn-implicit-bwd: the gradient after some steps, and the residual of eq. coupled-u."""
    h = p * gradient
    rows, columns = h.sum(-1), h.sum(-2)
    v = torch.zeros_like(columns)
    for _ in range(steps):
        u = rows - (p * v.unsqueeze(-2)).sum(-1)
        v = columns - (p * u.unsqueeze(-1)).sum(-2)
    residual = rows - (p * v.unsqueeze(-2)).sum(-1) - u
    return h - p * u.unsqueeze(-1) - p * v.unsqueeze(-2), residual


def gradient_errors(p: Tensor, steps: int, seed: int = 1) -> Tensor:
    """Return the relative error of the Gauss–Seidel gradient against the exact implicit one. [B]"""
    upstream = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact = birkhoff._tangent(p, upstream)
    error = gauss_seidel(p, upstream, steps)[0] - exact
    return error.flatten(1).norm(dim=-1) / exact.flatten(1).norm(dim=-1)


@claim(39, "prop. gs-convergence", "false", stored=(0.0, 0.128, 0.607, 0.9992), allowed=[(0, 0.01), 0.05, 0.05, 0.02])
def gauss_seidel_rate() -> tuple[float, ...]:
    """Gauss–Seidel contracts with ρ ≤ 1 − 1/n

    Why: It contracts by P's second singular value squared, near 1 for a sharp P.
    Shows: above 3/4, logits of scale 1, 2, 4: {:.1%}, {:.0%}, {:.0%}; measured rate over σ₂²: {:.3f}
    """
    shares = []
    for scale in (1.0, 2.0, 4.0):
        second = torch.linalg.svdvals(doubly_stochastic(scale))[:, 1]
        shares.append(float((second.square() > 0.75).double().mean()))
    p = doubly_stochastic(1.0, 1000)
    upstream = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    early, late = (gauss_seidel(p, upstream, steps)[1].norm(dim=-1) for steps in (4, 5))
    rate = (late / early / torch.linalg.svdvals(p)[:, 1].square()).median()
    return (*shares, float(rate))


@claim(40, "table gs-convergence", "false", stored=(0.01136, 1.763e-10, 0.001893), allowed=[(0, 0.02), 0.5, 0.5])
def residual_table() -> tuple[float, float, float]:
    """Gauss–Seidel's residual is 0.75, 0.56, 0.32, 0.10, 0.010, 0.0001 after 1, 2, 4, 8, 16, 32 iterations

    Why: That is the bound 0.75^k; typical matrices converge faster (docs/results/paper_tables.md).
    Shows: distance to 0.75^k {:.1%}; measured at k = 16, scale 1 {:.0e}, 4 {:.0e}
    """
    printed = {1: 7.5e-1, 2: 5.6e-1, 4: 3.2e-1, 8: 1.0e-1, 16: 1.0e-2, 32: 1.0e-4}
    distance = max(abs(value / 0.75**k - 1) for k, value in printed.items())
    return distance, *(residual_and_error(scale, 16)[0] for scale in (1.0, 4.0))


def residual_and_error(scale: float, steps: int) -> tuple[float, float]:
    """Return medians over 1000 matrices: the residual relative to the first one, and the gradient's relative error."""
    p = doubly_stochastic(scale, 1000)
    upstream = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = (p * upstream).sum(-1).norm(dim=-1)
    residual = gauss_seidel(p, upstream, steps)[1].norm(dim=-1)
    return float((residual / first).median()), float(gradient_errors(p, steps).median())


@claim(
    41,
    "table gs-convergence",
    "true if",
    stored=(0.0005, 0.1865, 0.6695, 0.8695),
    allowed=[(0, 0.01), 0.05, 0.05, 0.05],
)
def sixteen_iterations() -> tuple[float, ...]:
    """k = 16 iterations give less than 0.1 % gradient error

    Why: the logits are of scale 1 or less; the direct solve is exact at any scale.
    Shows: above 0.1 %, scale 1, 2, 4, 8: {:.1%}, {:.0%}, {:.0%}, {:.0%}
    """
    scales = (1.0, 2.0, 4.0, 8.0)
    return tuple(float((gradient_errors(doubly_stochastic(s), 16) > 1e-3).double().mean()) for s in scales)


@claim(42, "table gs-iters", "false", stored=(7, 12, 17, 21, 26, 35), allowed=0.0)
def iteration_table() -> tuple[float, ...]:
    """n = 2, 3, 4, 5, 6, 8 need k = 7, 12, 16, 21, 26, 37

    Why: The formula gives 17 at n = 4, 35 at n = 8, and rests on claim 39.
    Shows: by the formula {:.0f}, {:.0f}, {:.0f}, {:.0f}, {:.0f}, {:.0f}
    """
    return tuple(float(math.ceil(math.log(0.01) / math.log(1 - 1 / n))) for n in (2, 3, 4, 5, 6, 8))


@claim(
    43,
    "sections A.2 and H.2",
    "true if",
    stored=(0.001209, 0.03123, 0.06692, 0.09955),
    allowed=[(0, 1e-2), (0, 5e-2), 0.1, 0.1],
)
def twenty_iterations() -> tuple[float, ...]:
    """T = 20 Sinkhorn iterations give a doubly stochastic matrix

    Why: the logits are of scale 1 or less.
    Shows: largest row error, scale 1, 2, 4, 8: {:.0e}, {:.0e}, {:.3f}, {:.2f}
    """
    return tuple(float(birkhoff.violation(birkhoff.project(logits(s))).max()) for s in (1.0, 2.0, 4.0, 8.0))


@claim(44, "section H.5", "true", stored=6e-12, allowed=(0, 1e-6))
def clamped_gradients() -> float:
    """Clamped (P ≥ 10⁻⁸) and unclamped P give identical gradients

    Shows: largest 1 − cosine, scale 1 to 8: {:.0e}
    """
    worst = 0.0
    for scale in (1.0, 2.0, 4.0, 8.0):
        p = birkhoff.project(logits(scale, 2000))
        upstream = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        plain, clamped = (gauss_seidel(q, upstream, 16)[0].flatten(1) for q in (p, p.clamp_min(1e-8)))
        worst = max(worst, float((1 - torch.cosine_similarity(plain, clamped, dim=-1)).max()))
    return worst


@claim(45, "sections 7.3 and H.5", "true", stored=2.973, allowed=(0, 100))
def self_stabilisation() -> float:
    """Entries with P ≈ 0 have near-zero gradients for any u and v

    Shows: largest gradient over P and upstream, P < 10⁻⁴, scale 4: {:.1f}
    """
    p = birkhoff.project(logits(4.0))
    upstream = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = gauss_seidel(p, upstream, 16)[0].abs() / p / upstream.abs().amax((-2, -1), keepdim=True)
    return float(found[p < 1e-4].max())


@claim(57, "alg. cayley-adam, alg. riemannian-full", "false", stored=(0.0, 1), allowed=[(0, 0.01), 0.01])
def sign_of_the_step() -> tuple[float, float]:
    """The retraction with +α M̂ descends

    Why: M̂ is the gradient's momentum, so +α climbs; the package steps along −M̂.
    Shows: first steps from 1000 random frames that lower ‖UUᵀ − target‖²: as printed {:.0%}, with −α {:.0%}
    """
    generator = torch.Generator().manual_seed(0)
    frame, target = (grassmann.sample_frame(N, 2, (1000,), generator=generator) for _ in range(2))
    target = grassmann.projector(target)
    frame.requires_grad_(True)

    def loss(u: Tensor) -> Tensor:
        return (u @ u.mT - target).square().sum((-2, -1))

    before = loss(frame)
    (gradient,) = torch.autograd.grad(before.sum(), frame)
    direction = 0.1 * grassmann.horizontal(frame, gradient)  # the first momentum, (1 − β₁) times the gradient
    steps = [loss(grassmann.retract(frame, direction, alpha)) for alpha in (0.01, -0.01)]
    return tuple(float((step < before).double().mean()) for step in steps)  # type: ignore[return-value]


@claim(58, "eq. cayley-retract-iter", "true if", stored=(1.055e-06, 0.4884), allowed=0.2)
def retraction_drift() -> tuple[float, float]:
    """Two retraction iterations keep U orthonormal

    Why: the step is small, or QR follows, as here.
    Shows: ‖UᵀU − I‖_max, 1000 steps, no QR: α = 0.01 {:.0e}, 0.3 {:.0e}
    """
    found = []
    for alpha in (0.01, 0.3):
        generator = torch.Generator().manual_seed(0)
        frame = grassmann.sample_frame(N, 2, generator=generator)
        for _ in range(1000):
            direction = torch.randn(N, 2, dtype=torch.float64, generator=generator)
            direction = grassmann.horizontal(frame, direction)
            frame = grassmann.retract(frame, direction / direction.norm(), alpha)
        found.append(float(orthogonal.violation(frame)))
    return found[0], found[1]


@claim(59, "eq. grassmann-projector", "true", stored=(6e-16, 2, 2), allowed=[(0, 1e-13), 0.0, 0.0])
def projector_properties() -> tuple[float, float, float]:
    """UUᵀ is idempotent, symmetric and of rank p

    Shows: largest violation {:.0e}, ranks {:.0f} to {:.0f}
    """
    found = grassmann.sample(N, 2, (10_000,), generator=torch.Generator().manual_seed(0))
    ranks = torch.linalg.matrix_rank(found)
    return float(grassmann.violation(found).max()), float(ranks.min()), float(ranks.max())
