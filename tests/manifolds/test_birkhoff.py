"""Sinkhorn–Knopp and its implicit derivative, against finite differences in float64."""

import pytest
import torch

from jpmhc.manifolds import birkhoff

CONVERGED = {"iterations": 1200, "tolerance": 1e-14}


def converged_logits(scale: float, n: int, count: int) -> torch.Tensor:
    """Logits inside the clamp whose projection converges to 1e-12."""
    generator = torch.Generator().manual_seed(n)
    logits = scale * torch.randn(3 * count, n, n, dtype=torch.float64, generator=generator)
    inside = logits.abs().amax((-2, -1)) < birkhoff.LOGIT_BOUND - 0.1
    good = birkhoff.violation(birkhoff.project(logits, **CONVERGED)) < 1e-12
    logits = logits[good & inside][:count]
    assert len(logits) >= count // 2
    return logits


def relative_gradient_error(logits: torch.Tensor, step: float = 1e-5, **how) -> torch.Tensor:
    """Relative error of the gradient of a random linear function, by central differences of the converged map."""
    n = logits.shape[-1]
    weights = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((birkhoff.project(x, **{**CONVERGED, **how}) * weights).sum(), x)
    bumps = torch.eye(n * n, dtype=torch.float64).view(n * n, 1, n, n) * step
    sides = [(birkhoff.project(logits + sign * bumps, **CONVERGED) * weights).sum((-2, -1)) for sign in (1, -1)]
    numeric = ((sides[0] - sides[1]) / (2 * step)).T.reshape(logits.shape)
    return (gradient - numeric).flatten(1).norm(dim=1) / numeric.flatten(1).norm(dim=1)


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_direct_gradient_is_the_derivative_of_the_converged_projection(scale, n):
    assert relative_gradient_error(converged_logits(scale, n, 24 if n < 8 else 4)).max() < 1e-6


def test_gauss_seidel_stalls_at_sharp_matrices_as_the_notes_say():
    # the paper's 16 steps at n = 4: good to 1e-3 at scale 1, wrong by percents at scale 4
    assert birkhoff.gauss_seidel_steps(4) == 16
    mild = relative_gradient_error(converged_logits(1.0, 4, 40), gradient="gauss_seidel")
    sharp = relative_gradient_error(converged_logits(4.0, 4, 40), gradient="gauss_seidel")
    assert mild.median() < 1e-8
    assert 1e-4 < sharp.median() < 5e-2
    assert sharp.max() > 0.1


def test_gauss_seidel_converges_with_its_iterations():
    logits = converged_logits(2.0, 4, 20).clone().requires_grad_()
    upstream = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(**options):
        p = birkhoff.project(logits, iterations=2000, **options)
        return torch.autograd.grad((p * upstream).sum(), logits)[0]

    exact, usual = gradient(), gradient(gradient="gauss_seidel")
    errors = [
        (gradient(gradient="gauss_seidel", gradient_iterations=k) - exact).norm().item() for k in (1, 4, 16, 64, 4000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 * exact.norm()
    assert torch.equal(usual, gradient(gradient="gauss_seidel", gradient_iterations=16))
    with pytest.raises(ValueError, match=r'gradient_iterations is for gradient="gauss_seidel"'):
        gradient(gradient_iterations=3)


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_forward_is_the_papers_algorithm_in_log_space(iterations):
    logits = 6 * torch.randn(100, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_m = logits.clamp(-10, 10)
    for _ in range(iterations):
        log_m = log_m - log_m.logsumexp(-1, keepdim=True)
        log_m = log_m - log_m.logsumexp(-2, keepdim=True)
    assert torch.allclose(birkhoff.project(logits, iterations), log_m.exp(), rtol=1e-12, atol=0)
    single = birkhoff.project(logits.float(), iterations)
    assert torch.allclose(single.double(), log_m.exp(), rtol=2e-5, atol=0)


def test_gauss_seidel_steps_stay_within_the_papers_bounds():
    assert [birkhoff.gauss_seidel_steps(n) for n in (1, 2, 3, 5, 6, 100)] == [10, 10, 12, 21, 26, 50]


def test_direct_gradient_at_an_unconverged_matrix_conserves_the_sums():
    # T = 1 leaves the row sums off; the gradient must still be finite and keep its gauge
    logits = 4 * torch.randn(50, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = logits.clone().requires_grad_()
    p = birkhoff.project(x, iterations=1)
    assert birkhoff.violation(p).max() > 0.05
    (gradient,) = torch.autograd.grad((p * torch.randn_like(p)).sum(), x)
    inside = logits.abs().amax((-2, -1)) < birkhoff.LOGIT_BOUND
    # moving a whole row or column of logits changes nothing, so the gradient sums to zero along both
    assert gradient[inside].sum(-1).abs().max() < 1e-12
    assert gradient[inside].sum(-2).abs().max() < 1e-12


def test_float32_gradient_stays_accurate_at_very_sharp_matrices():
    generator = torch.Generator().manual_seed(0)
    logits = 9 * torch.eye(4) + 0.3 * torch.randn(200, 4, 4, generator=generator)
    weights = torch.randn(200, 4, 4, generator=generator)
    exact = birkhoff.project(logits.double(), iterations=50)
    found = [birkhoff._tangent(exact.to(dtype), weights.to(dtype)).double() for dtype in (torch.float32, torch.float64)]
    error = (found[0] - found[1]).flatten(1).norm(dim=1) / found[1].flatten(1).norm(dim=1)
    assert error.max() < 1e-5


def test_gradient_sees_the_upstream_gradient_of_clipped_entries():
    logits = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0, 0], logits[2, 1] = 11.0, -14.0
    assert relative_gradient_error(logits[None]).max() < 1e-6
    (gradient,) = torch.func.vjp(lambda x: birkhoff.project(x, **CONVERGED), logits)[1](
        weights := torch.randn(4, 4).double()
    )
    tangent = torch.randn(4, 4).double()
    _, pushed = torch.func.jvp(lambda x: birkhoff.project(x, **CONVERGED), (logits,), (tangent,))
    assert torch.isclose((gradient * tangent).sum(), (pushed * weights).sum())


@pytest.mark.parametrize("gradient", birkhoff.GRADIENTS)
def test_gradient_is_zero_where_the_clamp_clipped(gradient):
    logits = torch.randn(6, 4, 4, dtype=torch.float64)
    logits[:, 1, 2] = 15.0
    logits[:, 3, 0] = -12.0
    x = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad((birkhoff.project(x, gradient=gradient) ** 2).sum(), x)
    clipped = logits.abs() > birkhoff.LOGIT_BOUND
    assert (found[clipped] == 0).all()
    assert (found[~clipped] != 0).all()


def test_backward_cost_does_not_depend_on_iterations():
    def nodes_and_bytes(iterations):
        x = torch.randn(3, 4, 4, requires_grad=True)
        saved = {}  # by storage: an alias costs nothing
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
            p = birkhoff.project(x, iterations=iterations)
        seen, stack = set(), [p.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [f for f, _ in node.next_functions]
        return len(seen), sum(t.nbytes for t in saved.values())

    assert nodes_and_bytes(5) == nodes_and_bytes(100)
    # P in float32 and one byte an entry for the clamp
    assert nodes_and_bytes(5)[1] <= 3 * 16 * 5


def test_unrolled_gradient_agrees_at_convergence():
    logits = converged_logits(1.0, 4, 10)
    assert relative_gradient_error(logits, gradient="unrolled", iterations=200, tolerance=None).max() < 1e-6


def test_tolerance_freezes_each_matrix_on_its_own():
    logits = torch.stack(
        [torch.zeros(4, 4), 6 * torch.randn(4, 4, generator=torch.Generator().manual_seed(3))]
    ).double()
    loose = birkhoff.project(logits, iterations=500, tolerance=1e-3)
    tight = birkhoff.project(logits, iterations=500, tolerance=1e-10)
    assert torch.equal(loose[0], tight[0])
    assert 1e-10 < birkhoff.violation(loose)[1] < 2e-3
    assert birkhoff.violation(tight)[1] < 2e-10


def test_forward_mode_and_second_derivatives():
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    project = lambda a: birkhoff.project(a, iterations=200)  # noqa: E731
    assert torch.autograd.gradcheck(project, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(project, x)


def test_sample_is_doubly_stochastic_and_seeded():
    draw = lambda: birkhoff.sample(5, (100,), generator=torch.Generator().manual_seed(0))  # noqa: E731
    assert birkhoff.violation(draw()).max() < 1e-12
    assert torch.equal(draw(), draw())


def test_violation_measures_sums_and_signs():
    matrix = torch.tensor([[1.25, -0.25], [-0.25, 1.25]])
    assert birkhoff.violation(matrix) == 0.25
    assert torch.isclose(birkhoff.violation(torch.tensor([[0.5, 0.5], [0.25, 0.5]])), torch.tensor(0.25))


def test_nan_spoils_its_own_matrix_alone_and_infinity_is_clipped():
    logits = torch.randn(3, 4, 4)
    logits[1, 2, 3] = float("nan")
    found = birkhoff.project(logits)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], birkhoff.project(logits[[0, 2]]))
    logits[1, 2, 3] = float("inf")
    assert torch.equal(birkhoff.project(logits), birkhoff.project(logits.clamp(max=10)))


@pytest.mark.parametrize("gradient", birkhoff.GRADIENTS)
def test_columns_first_is_rows_first_of_the_transpose(gradient):
    logits = 3 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = birkhoff.project(logits, 6, gradient=gradient, first="columns")
    assert torch.equal(found, birkhoff.project(logits.mT, 6, gradient=gradient).mT)
    assert torch.allclose(found.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-14)
    assert (found.sum(-2) - 1).abs().max() > 1e-6


@pytest.mark.parametrize("clamp", [2.0, 30.0])
def test_iterations_with_eps_are_the_loop_written_out(clamp):
    logits = 8 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = birkhoff.project(logits, 3, gradient="unrolled", eps=1e-3, clamp=clamp)
    for matrix, start in zip(found, logits.clamp(-clamp, clamp)):
        p = start.exp() / start.exp().sum(1, keepdim=True) + 1e-3
        for step in ("columns", "rows", "columns", "rows", "columns"):
            p = p / (p.sum(0 if step == "columns" else 1, keepdim=True) + 1e-3)
        torch.testing.assert_close(matrix, p, rtol=1e-13, atol=1e-15)
    unclamped = birkhoff.project(logits, 3, gradient="unrolled", eps=1e-3, clamp=None)
    assert torch.equal(unclamped, found) == (clamp == 30.0)
    x = logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: birkhoff.project(x, 3, gradient="unrolled", eps=1e-3, clamp=None), x, atol=1e-7
    )


def test_an_eps_that_vanishes_changes_nothing():
    logits = 2 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = birkhoff.project(logits, 20, gradient="unrolled", eps=1e-15)
    torch.testing.assert_close(found, birkhoff.project(logits, 20), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: birkhoff.project(torch.zeros(3, 4)), r"\[\.\.\., n, n\]"),
        (lambda: birkhoff.project(torch.zeros(4, 4), iterations=0), "iterations must be a whole number, at least 1"),
        (lambda: birkhoff.project(torch.zeros(4, 4), gradient="exact"), "direct, gauss_seidel, unrolled"),
        (lambda: birkhoff.project(torch.zeros(4, 4), tolerance=0.0), "tolerance must be positive and finite"),
        (lambda: birkhoff.project(torch.zeros(4, 4, dtype=torch.long)), "floating-point"),
        (
            lambda: birkhoff.project(torch.zeros(4, 4), first="both"),
            "no side to normalise first is called 'both'",
        ),
        (lambda: birkhoff.project(torch.zeros(4, 4), clamp=None), "clamp=None needs an eps above 0"),
        (lambda: birkhoff.project(torch.zeros(4, 4), eps=1e-6), 'an eps needs gradient="unrolled" and no tolerance'),
        (lambda: birkhoff.sample(0), "n must be a whole number, at least 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_that_sum_to_one_at_the_start_are_not_taken_for_a_converged_matrix():
    """Each row has one large entry, two of them in one column: the row sums are one before any normalisation."""
    logits = torch.full((3, 3), -9.0, dtype=torch.float64)
    logits[0, 1] = logits[1, 2] = logits[2, 2] = 9.0
    assert birkhoff.violation(birkhoff.project(logits, iterations=5000, tolerance=1e-3)) <= 1e-3
