"""S_n as arrays, against permutation matrices and groups formed element by element."""

import itertools

import numpy as np
import pytest

from jpmhc.paper.generators import symmetric_group


def matrix(perm):
    """The permutation matrix that sends e_j to e_σ(j)."""
    return np.eye(len(perm))[:, perm]


def closure(perms):
    """The group that permutations generate, as a set of tuples, by forming every product."""
    found = frontier = {tuple(range(len(perms[0])))}
    while frontier:
        frontier = {tuple(p[i] for i in g) for g in frontier for p in perms} - found
        found = found | frontier
    return found


@pytest.mark.parametrize("n", range(2, 9))
def test_elements_are_all_permutations_in_the_order_of_their_rank(n):
    group = symmetric_group.elements(n)
    assert len(np.unique(group, axis=0)) == len(group) == np.prod(np.arange(1, n + 1))
    assert (symmetric_group.rank(group) == np.arange(len(group))).all()
    assert (group[0] == np.arange(n)).all()


def test_products_inverses_and_parities_are_those_of_matrices():
    random = np.random.default_rng(0)
    for n in range(2, 9):
        group = symmetric_group.elements(n)
        first, second = group[random.integers(0, len(group), (2, 20))]
        for p, q, product in zip(first, second, symmetric_group.compose(first, second)):
            assert (matrix(product) == matrix(p) @ matrix(q)).all()
        for p, inverse, odd in zip(first, symmetric_group.inverse(first), symmetric_group.is_odd(first)):
            assert (matrix(inverse) == matrix(p).T).all()
            assert round(np.linalg.det(matrix(p))) == (-1 if odd else 1)


@pytest.mark.parametrize(("n", "order"), [(2, 1), (3, 12), (4, 48), (5, 240), (6, 2880)])
def test_symmetries_are_distinct_automorphisms_or_reverse_products(n, order):
    group, table = symmetric_group.elements(n), symmetric_group.symmetries(n).astype(np.int64)
    assert table.shape == (order, len(group))
    assert len(np.unique(table, axis=0)) == order
    g, h = np.random.default_rng(0).integers(0, len(group), (2, 50))
    product = symmetric_group.rank(symmetric_group.compose(group[g], group[h]))
    kept = symmetric_group.rank(symmetric_group.compose(group[table[:, g]], group[table[:, h]]))
    reversed_ = symmetric_group.rank(symmetric_group.compose(group[table[:, h]], group[table[:, g]]))
    automorphism = (kept == table[:, product]).all(axis=1)
    anti_automorphism = (reversed_ == table[:, product]).all(axis=1)
    assert (automorphism | anti_automorphism).all()
    if n > 2:  # half of them each; in S_2 the two are one
        assert automorphism.sum() == anti_automorphism.sum() == order // 2


def test_outer_automorphism_is_one_and_not_a_conjugation():
    group, outer = symmetric_group.elements(6), symmetric_group.outer_automorphism()
    g, h = np.meshgrid(np.arange(720), np.arange(720))
    product = symmetric_group.rank(symmetric_group.compose(group[g], group[h]))
    images = symmetric_group.rank(symmetric_group.compose(group[outer[g]], group[outer[h]]))
    assert (outer[product] == images).all()
    transposition = symmetric_group.rank(np.array([1, 0, 2, 3, 4, 5]))
    assert symmetric_group.cycle_notation(group[outer[transposition]]).count("(") == 3


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_generates_agrees_with_forming_the_group(n):
    group, random = symmetric_group.elements(n), np.random.default_rng(n)
    for size in range(1, min(5, len(group))):
        for _ in range(25):
            perms = group[random.choice(len(group), size, replace=False)]
            assert symmetric_group.generates(perms) == (len(closure(perms.tolist())) == len(group))


def fractional_linear(p):
    """Generators of PGL(2, p) on the projective line 0, …, p − 1, ∞ (written p): x + 1, a primitive multiple, −1/x."""
    primitive = next(a for a in range(2, p) if len({pow(a, k, p) for k in range(p - 1)}) == p - 1)
    shift = [*((x + 1) % p for x in range(p)), p]
    scale = [*(primitive * x % p for x in range(p)), p]
    invert = [p, *(-pow(x, -1, p) % p for x in range(1, p)), 0]
    return [shift, scale, invert]


@pytest.mark.parametrize(
    ("perms", "order"),
    [
        ([[1, 2, 3, 4, 0], [0, 2, 4, 1, 3]], 20),  # AGL(1, 5): x + 1 and 2x
        (fractional_linear(5), 120),
        ([[1, 2, 3, 4, 5, 6, 0], [0, 3, 6, 2, 5, 1, 4]], 42),  # AGL(1, 7): x + 1 and 3x
        (fractional_linear(7), 336),
        ([[1, 2, 3, 0, 4, 5, 6, 7], [1, 0, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]], 1152),  # S_4 wr S_2
    ],
)
def test_generates_recognises_proper_subgroups_with_odd_elements_that_move_every_point(perms, order):
    assert len(closure(perms)) == order
    assert symmetric_group.is_odd(np.array(perms)).any()
    assert not symmetric_group.generates(perms)


@pytest.mark.parametrize("n", [6, 7, 8])
def test_generates_accepts_a_cycle_and_a_transposition(n):
    cycle = np.roll(np.arange(n), -1)
    swap = np.array([1, 0, *range(2, n)])
    assert symmetric_group.generates([cycle, swap])
    assert not symmetric_group.generates([swap, np.array([0, 2, 1, *range(3, n)])])


def test_cycle_notation_writes_disjoint_cycles():
    assert symmetric_group.cycle_notation([0, 1, 2]) == "e"
    assert symmetric_group.cycle_notation([1, 0, 3, 4, 2]) == "(0 1)(2 3 4)"


@pytest.mark.parametrize(
    ("perms", "complaint"),
    [
        ([[0, 1, 1]], "not a permutation"),
        ([[0, 1, 2], [0, 1, 2]], "twice"),
        ([0, 1, 2], "shape"),
        ([[0]], "between 2 and 8"),
        ([list(range(9))], "between 2 and 8"),
        ([[0.0, 1.0]], "integers"),
        (np.empty((0, 3), dtype=int), "shape"),
    ],
)
def test_what_is_no_set_of_permutations_is_refused(perms, complaint):
    with pytest.raises(ValueError, match=complaint):
        symmetric_group.as_permutations(perms)


def test_closure_in_this_file_forms_the_whole_group():
    assert closure([[1, 0, 2], [0, 2, 1]]) == set(itertools.permutations(range(3)))
