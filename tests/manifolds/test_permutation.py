"""The paper's basis and mixtures over it."""

import pytest
import torch

from jpmhc.manifolds import permutation


def test_basis_begins_as_the_paper_lists_it():
    rows = permutation.basis(4, 6).tolist()
    assert rows[:5] == [[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [1, 2, 3, 0], [3, 0, 1, 2]]
    assert rows[5] not in rows[:5]
    assert permutation.basis(4, 6).equal(permutation.basis(4, 6))


@pytest.mark.parametrize(("n", "size"), [(2, 2), (3, 6), (4, 24), (6, 40)])
def test_basis_has_distinct_permutations_up_to_the_whole_group(n, size):
    rows = permutation.basis(n, size)
    assert len({tuple(row) for row in rows.tolist()}) == size
    assert rows.sort(-1).values.equal(torch.arange(n).expand(size, n))


def test_matrices_move_entry_j_to_place_sigma_j():
    perms = torch.tensor([[1, 2, 0]])
    x = torch.tensor([10.0, 20.0, 30.0])
    assert (permutation.matrices(perms)[0] @ x).tolist() == [30.0, 10.0, 20.0]


def test_mixture_is_the_weighted_sum():
    basis = permutation.basis(4, 5)
    logits = torch.randn(3, 5, dtype=torch.float64)
    expected = sum(
        weight[:, None, None] * permutation.matrices(basis[k : k + 1], torch.float64)
        for k, weight in enumerate(logits.softmax(-1).unbind(-1))
    )
    mixed = permutation.mix(logits, basis)
    assert torch.allclose(mixed, expected)
    assert permutation.violation(mixed).max() < 1e-14
    assert permutation.violation(permutation.sample(5, 7, (9,))).max() < 1e-14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: permutation.basis(1, 1), "n of at least 2"),
        (lambda: permutation.basis(3, 7), "between 1 and 3! = 6"),
        (lambda: permutation.matrices(torch.tensor([[0, 0, 1]])), "each of 0..n-1 once"),
        (lambda: permutation.mix(torch.zeros(4), permutation.basis(4, 6)), "6 permutations need as many logits, got 4"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
