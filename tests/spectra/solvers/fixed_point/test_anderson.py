"""Batched Anderson mixing on problems whose fixed points are known."""

import torch

from jpmhc.spectra.solvers.fixed_point.anderson import anderson


def semicircle(z):
    """The Cauchy transform of the semicircle law of variance 1."""
    root = torch.sqrt(z - 2) * torch.sqrt(z + 2)
    return (z - root) / 2


def test_semicircle_law_at_every_point_of_a_grid():
    z = torch.linspace(-3, 3, 41, dtype=torch.float64) + 1e-3j

    def step(g, index):
        return 1 / (z[index].unsqueeze(-1) - g)

    found = anderson(step, torch.full((41, 1), -0.5j, dtype=torch.complex128), tolerance=1e-12)
    assert found.converged.all()
    assert (found.x.squeeze(-1) - semicircle(z)).abs().max() < 1e-8  # at the edges the residual is a square
    assert found.iterations.max() < 100


def test_linear_problem_ends_after_as_many_steps_as_it_has_unknowns():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 4, 4, dtype=torch.float64, generator=generator)  # not a contraction: plain steps diverge
    offset = torch.randn(7, 4, dtype=torch.float64, generator=generator)

    def step(x, index):
        return (matrix[index] @ x.unsqueeze(-1)).squeeze(-1) + offset[index]

    found = anderson(step, torch.zeros(7, 4, dtype=torch.float64), tolerance=1e-9, maximum=30)
    truth = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - matrix, offset.unsqueeze(-1)).squeeze(-1)
    assert found.converged.all()
    assert (found.x - truth).abs().max() < 1e-7
    assert found.iterations.max() <= 9


def test_rows_that_have_converged_are_no_longer_evaluated():
    rate = torch.tensor([0.0] * 9 + [0.999], dtype=torch.float64)
    seen = []

    def step(x, index):
        seen.append(len(index))
        return torch.cos(rate[index].unsqueeze(-1) * x)

    found = anderson(step, torch.zeros(10, 1, dtype=torch.float64), depth=1)
    assert found.converged.all()
    assert seen[0] == 10
    assert seen[-1] == 1
    assert found.iterations[:9].max() < found.iterations[9]


def test_what_does_not_converge_is_marked():
    def step(x, index):
        return torch.where(index.unsqueeze(-1) == 1, x + 1, 0.5 * x)

    found = anderson(step, torch.ones(2, 1, dtype=torch.float64), maximum=20)
    assert found.converged.tolist() == [True, False]
    assert found.iterations[1] == 20
    assert found.residual[1] == 1


def test_inadmissible_candidates_are_replaced_by_plain_steps():
    inadmissible = []

    def step(x, index):
        inadmissible.append(bool((x < 0).any()))
        return torch.sqrt(x) * 0 + torch.exp(-3 * x)

    found = anderson(
        step, torch.full((3, 1), 2.0, dtype=torch.float64), admissible=lambda x, index: (x >= 0).all(-1), damping=0.5
    )
    assert found.converged.all()
    assert not any(inadmissible)
    assert (found.x - torch.exp(-3 * found.x)).abs().max() < 1e-9
