"""Young's orthogonal form, against the laws of representations and characters known by other means."""

import numpy as np
import pytest

from jpmhc.paper.generators import representations, symmetric_group


@pytest.mark.parametrize("n", range(2, 7))
def test_matrices_are_orthogonal_and_multiply_as_permutations_do(n):
    group, random = symmetric_group.elements(n), np.random.default_rng(0)
    first, second = group[random.integers(0, len(group), (2, 30))]
    product = symmetric_group.compose(first, second)
    for shape in representations.partitions(n):
        left, right = representations.represent(shape, first), representations.represent(shape, second)
        assert np.abs(left @ left.mT - np.eye(representations.dimension(shape))).max() < 1e-14
        assert np.abs(representations.represent(shape, product) - left @ right).max() < 1e-14


@pytest.mark.parametrize("n", range(2, 7))
def test_characters_are_orthonormal_and_dimensions_fill_the_group(n):
    group, shapes = symmetric_group.elements(n), representations.partitions(n)
    assert sum(representations.dimension(shape) ** 2 for shape in shapes) == len(group)
    characters = np.stack([np.trace(representations.represent(shape, group), axis1=-2, axis2=-1) for shape in shapes])
    assert np.abs(characters @ characters.T / len(group) - np.eye(len(shapes))).max() < 1e-12


@pytest.mark.parametrize("n", [3, 5, 8])
def test_known_representations_have_their_shapes(n):
    perms = symmetric_group.elements(n)[:: max(1, len(symmetric_group.elements(n)) // 40)]
    fixed = (perms == np.arange(n)).sum(axis=1)
    sign = np.where(symmetric_group.is_odd(perms), -1, 1)
    assert (representations.represent((n,), perms) == 1).all()
    assert np.abs(representations.represent((1,) * n, perms)[:, 0, 0] - sign).max() < 1e-14
    standard = np.trace(representations.represent((n - 1, 1), perms), axis1=-2, axis2=-1)
    assert np.abs(standard - (fixed - 1)).max() < 1e-13


def test_dimensions_are_those_of_the_hook_length_formula():
    dimensions = [representations.dimension(shape) for shape in representations.partitions(6)]
    assert dimensions == [1, 5, 9, 10, 5, 16, 10, 5, 9, 5, 1]
    assert max(representations.dimension(shape) for shape in representations.partitions(8)) == 90


def test_nontrivial_shapes_come_cheapest_first_and_the_sign_leads():
    shapes = representations.nontrivial_partitions(6)
    assert shapes[:2] == [(1,) * 6, (5, 1)]
    assert (6,) not in shapes
    assert [representations.dimension(s) for s in shapes] == sorted(representations.dimension(s) for s in shapes)
