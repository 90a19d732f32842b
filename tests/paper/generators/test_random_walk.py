"""Gaps of walks, against the plain n! × n! matrix, the average permutation matrix, and traces of powers."""

import numpy as np
import pytest
import torch

from jpmhc import generators
from jpmhc.manifolds import permutation
from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.random_walk import (
    gap_bound,
    plain_spectral_gap,
    spectral_gap,
    stream_gap,
    transition_matrix,
)


def random_set(n, size, random):
    group = symmetric_group.elements(n)
    return group[random.choice(len(group), size, replace=False)]


def test_transition_matrix_is_the_walk_of_the_paper():
    perms = np.array([[1, 0, 2], [1, 2, 0]])
    matrix, group = transition_matrix(perms), symmetric_group.elements(3)
    for g, element in enumerate(group.tolist()):
        for sigma in perms.tolist():
            product = [element[sigma[i]] for i in range(3)]
            assert matrix[g, group.tolist().index(product)] == 0.5
    assert (matrix.sum(axis=0) == 1).all()
    assert (matrix.sum(axis=1) == 1).all()


@pytest.mark.parametrize(("n", "repeats"), [(2, 2), (3, 40), (4, 40), (5, 60)])
def test_gap_is_that_of_the_plain_matrix(n, repeats):
    random = np.random.default_rng(n)
    for _ in range(repeats):
        perms = random_set(n, random.integers(1, min(8, len(symmetric_group.elements(n))) + 1), random)
        gap, plain = spectral_gap(perms), plain_spectral_gap(perms)
        # A walk that moves when its matrix is disturbed by rounding has a defective λ₂; the plain matrix is then the
        # less exact of the two.
        noise = 1e-14 * random.standard_normal((len(symmetric_group.elements(n)),) * 2)
        moduli = np.sort(np.abs(np.linalg.eigvals(transition_matrix(perms) + noise)))
        defective = abs(moduli[-1] - moduli[-2] - plain) > 1e-11
        assert abs(gap - plain) < (1e-3 if defective else 1e-10)


@pytest.mark.parametrize("n", range(3, 9))
def test_gap_on_the_streams_is_that_of_the_average_matrix(n):
    random = np.random.default_rng(n)
    for size in (2, 3, 6):
        perms = random_set(n, size, random)
        average = np.eye(n)[perms].mean(axis=0)
        moduli = np.sort(np.abs(np.linalg.eigvals(average)))
        assert abs(stream_gap(perms) - (1 - moduli[-2])) < 1e-6


@pytest.mark.parametrize("n", [7, 8])
def test_gap_of_a_closed_form_beyond_the_plain_matrix(n):
    # "Top to random": the top card is put anywhere; the eigenvalues are 0, 1/n, …, (n − 2)/n and 1 (Diaconis et al.).
    cycles = []
    for k in range(n):
        cycle = np.arange(n)
        cycle[: k + 1] = np.roll(cycle[: k + 1], 1)
        cycles.append(cycle)
    assert abs(spectral_gap(cycles) - 2 / n) < 1e-9


def test_gap_is_zero_exactly_where_a_set_does_not_generate_or_is_periodic():
    assert spectral_gap([[1, 2, 3, 0], [2, 3, 0, 1]]) == 0.0  # a cyclic group
    assert spectral_gap([[1, 0, 2, 3], [1, 2, 3, 0]]) == 0.0  # generates S_4; both are odd
    assert spectral_gap([[0, 1, 2, 3, 4, 5, 6, 7]]) == 0.0
    assert stream_gap([[1, 0, 2, 3], [0, 1, 3, 2]]) == 0.0
    assert spectral_gap([[0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 3, 0]]) > 0.1


def test_gap_is_kept_by_conjugation_and_inversion_but_not_by_translation():
    random = np.random.default_rng(0)
    perms = random_set(5, 4, random)
    h = symmetric_group.elements(5)[77]
    conjugated = symmetric_group.compose(symmetric_group.compose(h, perms), symmetric_group.inverse(h))
    translated = symmetric_group.compose(h, perms)
    assert abs(spectral_gap(conjugated) - spectral_gap(perms)) < 1e-14
    assert abs(spectral_gap(symmetric_group.inverse(perms)) - spectral_gap(perms)) < 1e-14
    assert abs(spectral_gap(translated) - spectral_gap(perms)) > 1e-3


def test_outer_automorphism_keeps_the_gap_of_the_group_and_not_of_the_streams():
    perms = random_set(6, 4, np.random.default_rng(3))
    images = symmetric_group.elements(6)[symmetric_group.outer_automorphism()[symmetric_group.rank(perms)]]
    assert abs(spectral_gap(perms) - spectral_gap(images)) < 1e-14
    assert abs(stream_gap(perms) - stream_gap(images)) > 1e-3


def test_bound_is_not_exceeded_and_sometimes_met():
    random = np.random.default_rng(0)
    for n in (3, 4, 5):
        for size in (2, 3, 4, 5, 6):
            for _ in range(5):
                assert spectral_gap(random_set(n, size, random)) <= gap_bound(n, size) + 1e-12
    assert gap_bound(5, 4) == 0.75
    assert gap_bound(4, 6) == 1.0  # 4! divides a power of 6
    assert spectral_gap(symmetric_group.elements(3)) == gap_bound(3, 6) == 1.0


def test_bound_for_sets_closed_under_inverses_is_not_exceeded():
    random = np.random.default_rng(1)
    for n in (4, 5):
        for _ in range(20):
            perms = random_set(n, 2, random)
            closed = np.unique(np.concatenate([perms, symmetric_group.inverse(perms)]), axis=0)
            assert spectral_gap(closed) <= gap_bound(n, len(closed), reversible=True) + 1e-12
    # Length two alone: n! walks return K times, so ρ² ≥ (n!/K − 1)/(n! − 1).
    assert gap_bound(5, 4, reversible=True) <= 1 - np.sqrt((120 / 4 - 1) / 119)


def test_public_names_take_tensors():
    basis = permutation.basis(4, 6)
    assert isinstance(basis, torch.Tensor)
    assert abs(generators.spectral_gap(basis) - plain_spectral_gap(basis)) < 1e-10
    assert 0 < generators.stream_gap(basis) < 1


def test_a_plain_matrix_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="n ≤ 6"):
        transition_matrix([[1, 0, 2, 3, 4, 5, 6]])
