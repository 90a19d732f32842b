"""The Cayley transform, against dense inverses in float64."""

import pytest
import torch

from jpmhc.manifolds import orthogonal


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_exact_form_is_the_closed_form_of_the_appendix(n):
    matrix = 10 * torch.randn(20, n, n, dtype=torch.float64)
    half = 0.05 * (matrix - matrix.mT)
    identity = torch.eye(n, dtype=torch.float64)
    expected = (identity + half) @ torch.linalg.inv(identity - half)  # eq. cayley-closed
    assert torch.allclose(orthogonal.project(matrix), expected, atol=1e-13)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_exact_form_is_orthogonal_to_rounding(n):
    matrix = 3 * torch.randn(2000, n, n, generator=torch.Generator().manual_seed(n))
    assert orthogonal.violation(orthogonal.project(matrix)).max() < 2e-6


def test_two_iterations_are_as_orthogonal_as_the_notes_measured():
    draws = torch.randn(5000, 4, 4, generator=torch.Generator().manual_seed(0))
    small, unit, large = (orthogonal.violation(orthogonal.project(s * draws, iterations=2)) for s in (0.3, 1.0, 3.0))
    assert small.max() < 1e-3
    assert 1e-3 < unit.median() < 3e-3
    assert 1e-2 < unit.max() < 1e-1
    assert large.max() > 0.3


def test_iteration_converges_to_the_exact_form():
    matrix = torch.randn(10, 4, 4, dtype=torch.float64)
    assert torch.allclose(orthogonal.project(matrix, iterations=60), orthogonal.project(matrix), atol=1e-12)


@pytest.mark.parametrize("n", [3, 4, 6])
@pytest.mark.parametrize("iterations", [None, 2])
def test_derivatives(n, iterations):
    matrix = torch.randn(2, n, n, dtype=torch.float64, requires_grad=True)
    project = lambda m: orthogonal.project(m, scale=0.7, iterations=iterations)  # noqa: E731
    assert torch.autograd.gradcheck(project, matrix, check_forward_ad=True)


def test_haar_sample_has_both_determinants_and_uniform_columns():
    q = orthogonal.sample(3, (4000,), generator=torch.Generator().manual_seed(0))
    assert orthogonal.violation(q).max() < 1e-13
    assert 0.45 < (torch.linalg.det(q) > 0).double().mean() < 0.55
    assert q.mean(0).abs().max() < 0.05
    # trace moments of Haar measure on O(3): E tr = 0, E tr^2 = 1
    trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert trace.mean().abs() < 0.06
    assert (trace.square().mean() - 1).abs() < 0.1


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"\[\.\.\., n, n\]"):
        orthogonal.project(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="iterations must be a whole number, at least 1"):
        orthogonal.project(torch.zeros(3, 3), iterations=0)
    with pytest.raises(ValueError, match=r"expected k of shape \[\.\.\., n, n\], got \[3, 4\]"):
        orthogonal.cayley(torch.zeros(3, 4))


@pytest.mark.parametrize("make", [orthogonal.skew, orthogonal.cayley_of_entries])
@pytest.mark.parametrize(("n", "given"), [(4, 5), (4, 7), (3, 6), (6, 6)])
def test_a_wrong_number_of_entries_is_refused(make, n, given):
    sentence = rf"a skew {n} × {n} matrix has {n * (n - 1) // 2} entries .*, got the shape \[2, {given}\]"
    with pytest.raises(ValueError, match=sentence):
        make(torch.randn(2, given), n)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_nan_spoils_its_own_matrix_alone(n):
    matrices = torch.randn(3, n, n)
    matrices[1, 0, 1] = float("nan")
    assert orthogonal.project(matrices).isfinite().all((-2, -1)).tolist() == [True, False, True]


@pytest.mark.parametrize("n", [5, 6, 8])
def test_large_entries_cost_no_digits_in_float32(n):
    matrix = torch.randn(50, n, n, generator=torch.Generator().manual_seed(n))
    for size in (10.0, 1e3, 1e5):
        found = orthogonal.project(size * matrix, scale=1.0)
        assert orthogonal.violation(found).max() < 2e-6
        assert (found - orthogonal.project((size * matrix).double(), scale=1.0)).abs().max() < 1e-6


def test_entries_too_large_for_the_solve_give_nan_for_themselves():
    matrix = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
    matrix[1] *= 1e10
    assert orthogonal.project(matrix).isnan().all((-2, -1)).tolist() == [False, True, False]


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e6])
def test_four_streams_stay_orthogonal_in_float32_at_every_size(size):
    entries = size * torch.randn(2000, 6, generator=torch.Generator().manual_seed(0))
    assert orthogonal.violation(orthogonal.cayley_of_entries(entries, 4)).max() < 2e-6
