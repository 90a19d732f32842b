"""Orbits of subsets, against orbits formed by applying every map to every subset."""

import itertools
from math import comb

import numpy as np
import pytest

from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.subset_orbits import SubsetOrbits


def orbits_by_force(action, weights, weight):
    """Every orbit of subsets of a total weight, as a frozenset of frozensets."""
    points = range(action.shape[1])
    subsets = {
        frozenset(s)
        for size in range(weight + 1)
        for s in itertools.combinations(points, size)
        if sum(weights[list(s)]) == weight
    }
    return {frozenset(frozenset(row[list(s)].tolist()) for row in action) for s in subsets}


def found(orbits):
    """Representatives with their stabilisers, as the class lists them."""
    for unit in orbits.units():
        for subsets, stabilisers in orbits.representatives(unit):
            yield from zip(subsets.tolist(), stabilisers.tolist())


@pytest.mark.parametrize(("n", "weight"), [(2, 1), (2, 2), *((3, k) for k in range(7)), *((4, k) for k in range(1, 4))])
def test_one_representative_of_each_orbit_with_its_stabiliser(n, weight):
    action = symmetric_group.symmetries(n).astype(np.int64)
    expected = orbits_by_force(action, np.ones(action.shape[1], dtype=int), weight)
    orbits = SubsetOrbits(action, weight)
    listed = list(found(orbits))
    assert len(listed) == orbits.count_orbits() == len(expected)
    for subset, stabiliser in listed:
        orbit = next(o for o in expected if frozenset(subset) in o)
        assert len(action) // stabiliser == len(orbit)
        expected.remove(orbit)
    assert not expected


def test_weighted_points_are_chosen_by_total_weight():
    # The symmetries of a square on its corners, each with a heavier copy of itself: weights 1 and 2.
    square = np.array([[(a * s + b) % 4 for a in range(4)] for s in (1, 3) for b in range(4)])
    action = np.concatenate([square, square + 4], axis=1)
    weights = np.array([1] * 4 + [2] * 4)
    for weight in range(1, 7):
        orbits = SubsetOrbits(action, weight, weights)
        expected = orbits_by_force(action, weights, weight)
        listed = [frozenset(subset) for subset, _ in found(orbits)]
        assert len(listed) == len(expected) == orbits.count_orbits()
        assert all(any(subset in orbit for subset in listed) for orbit in expected)
        assert orbits.count_subsets() == sum(map(len, expected))


@pytest.mark.parametrize(("n", "size"), [(4, 8), (5, 3), (5, 4), (6, 3)])
def test_orbits_fill_all_subsets_and_agree_with_burnside(n, size):
    orbits = SubsetOrbits(symmetric_group.symmetries(n), size)
    stabilisers = np.array([s for _, s in found(orbits)])
    assert len(stabilisers) == orbits.count_orbits()
    assert (orbits.order // stabilisers).sum() == orbits.count_subsets() == comb(orbits.points, size)


def test_burnside_counts_the_classes_of_conjugation_alone():
    assert SubsetOrbits(symmetric_group.symmetries(5, inversion=False), 4).count_orbits() == 69366
