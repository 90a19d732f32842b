"""Exact spectral radii, against polynomials with known roots and blocks in floating point."""

import numpy as np
import pytest

from jpmhc.paper.generators import representations, symmetric_group
from jpmhc.paper.generators.exact_radius import ExactSpectrum, find_roots, squarefree


def random_set(n, size, seed):
    group = symmetric_group.elements(n)
    return group[np.random.default_rng(seed).choice(len(group), size, replace=False)]


def product(*factors):
    result = [1]
    for factor in factors:
        result = np.convolve(np.array(result, dtype=object), np.array(factor, dtype=object)).tolist()
    return result


@pytest.mark.parametrize(("n", "size"), [(3, 2), (4, 5), (5, 4), (6, 3), (6, 12), (7, 3)])
def test_power_sums_and_polynomials_are_those_of_the_blocks(n, size):
    perms = random_set(n, size, seed=n)
    spectrum = ExactSpectrum(perms)
    for shape in representations.partitions(n):
        block = representations.represent(shape, perms).sum(axis=0)
        sums = [np.trace(np.linalg.matrix_power(block, k)) for k in range(1, 5)]
        np.testing.assert_allclose(np.array(spectrum.power_sums(shape, 4), dtype=float), sums, rtol=1e-9, atol=1e-8)
        # det(x − A) at a point outside the spectrum, where the polynomial is well conditioned
        at = 1.5 * size
        coefficients = np.array(spectrum.characteristic_polynomial(shape), dtype=float)
        determinant = np.linalg.det(at * np.eye(len(block)) - block)
        np.testing.assert_allclose(np.polyval(coefficients, at), determinant, rtol=1e-9)


def test_radii_agree_with_floating_point_where_eigenvalues_are_simple():
    for seed in range(10):
        perms = random_set(5, 5, seed)
        spectrum = ExactSpectrum(perms)
        for shape in representations.nontrivial_partitions(5):
            eigenvalues, vectors = np.linalg.eig(representations.represent(shape, perms).mean(axis=0))
            if np.linalg.cond(vectors) < 1e4:
                assert abs(spectrum.radius(shape) - np.abs(eigenvalues).max()) < 1e-11


def test_powers_beyond_64_bits_are_exact():
    # The whole group: every block but the trivial one is zero, and the trivial one is 720.
    spectrum = ExactSpectrum(symmetric_group.elements(6))
    assert spectrum.power_sums((6,), 16)[-1] == 720**16
    assert spectrum.power_sums((3, 2, 1), 16) == [0] * 16
    assert spectrum.radius((3, 2, 1)) == 0.0


def test_a_defective_block_keeps_full_precision():
    # Four permutations whose standard block has a Jordan block: floating point errs by more than 1e-6 somewhere.
    worst = 0.0
    for seed in range(400):
        perms = random_set(4, 5, seed)
        block = representations.represent((2, 1, 1), perms).mean(axis=0)
        eigenvalues = np.linalg.eigvals(block)
        exact = ExactSpectrum(perms).radius((2, 1, 1))
        worst = max(worst, abs(np.abs(eigenvalues).max() - exact))
        # ρ is a root: the polynomial of the nearest eigenvalue modulus vanishes at K ρ times some unit number.
        coefficients = np.array(ExactSpectrum(perms).characteristic_polynomial((2, 1, 1)), dtype=float)
        angles = np.angle(eigenvalues[np.abs(np.abs(eigenvalues) - exact) < 1e-3])
        assert min(abs(np.polyval(coefficients, 5 * exact * np.exp(1j * a))) for a in angles) < 1e-3
    assert worst > 1e-9


def test_squarefree_part_has_each_root_but_zero_once():
    polynomial = product([1, -2], [1, -2], [1, -2], [1, 0, 1], [1, 0, 1], [3, 1], [1, 0], [1, 0])
    assert squarefree(polynomial) in (
        product([1, -2], [1, 0, 1], [3, 1]),
        [-c for c in product([1, -2], [1, 0, 1], [3, 1])],
    )
    assert len(squarefree([1, 0, 0, 0])) == 1


def test_roots_of_a_squarefree_polynomial_are_polished_from_poor_guesses():
    polynomial = product([1, -1], [1, -3], [1, 0, 4])
    roots = find_roots(polynomial, np.array([0.9, 3.2, 0.1 + 1.9j, -0.1 - 2.1j]))
    np.testing.assert_allclose(sorted(map(abs, roots)), [1, 2, 2, 3], rtol=0, atol=1e-15)
    # Guesses that all lead to one root are joined by others, so that none is missed.
    assert len(find_roots(polynomial, np.full(4, 3.01))) == 4
