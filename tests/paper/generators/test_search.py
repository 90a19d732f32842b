"""The search for the largest gap, against the plain algorithm over all subsets and against itself by other ways."""

import itertools
import json
from math import comb, factorial

import numpy as np
import pytest
import torch

from jpmhc import generators
from jpmhc.manifolds import permutation
from jpmhc.paper.generators import exhaustive_search, symmetric_group
from jpmhc.paper.generators.question import Question, SetClasses
from jpmhc.paper.generators.random_walk import plain_spectral_gap, spectral_gap, transition_matrix
from jpmhc.paper.generators.search import AUTO_CLASSES, best_generating_set, prepare_search


def plain_gaps(n, size):
    """Gaps of all subsets of a size by the eigenvalues of the plain matrix, as the paper's algorithm finds them."""
    group = symmetric_group.elements(n)
    single = np.stack([transition_matrix([perm]) for perm in group])  # [n!, n!, n!]
    subsets = np.array(list(itertools.combinations(range(len(group)), size)))
    gaps = []
    for part in np.array_split(subsets, -(-len(subsets) // 2000)):
        moduli = np.sort(np.abs(np.linalg.eigvals(single[part].mean(axis=1))), axis=1)
        gaps.append(moduli[:, -1] - moduli[:, -2])
    return subsets, np.concatenate(gaps)


def orbit_sizes(question, ties):
    """Numbers of sets equivalent to each tie, by applying every symmetry."""
    table = symmetric_group.symmetries(question.n)
    return [len({frozenset(row[symmetric_group.rank(t)].tolist()) for row in table}) for t in np.asarray(ties)]


@pytest.mark.parametrize(("n", "size"), [(n, size) for n in (3, 4) for size in range(1, 5)])
def test_best_gap_and_number_of_ties_are_those_of_the_plain_algorithm(n, size):
    _, gaps = plain_gaps(n, size)
    if size == 1:
        assert gaps.max() < 1e-6
        with pytest.raises(ValueError, match=f"no such set of 1 permutation of {n} streams generates all"):
            best_generating_set(n, size)
        return
    result = best_generating_set(n, size)
    assert abs(result.gap - gaps.max()) < 1e-6
    assert result.examined == result.classes
    assert result.covered == result.subsets == comb(factorial(n), size) == len(gaps)
    tied = int((gaps > gaps.max() - 1e-6).sum())
    assert sum(orbit_sizes(result.question, result.ties)) == tied
    assert abs(plain_spectral_gap(result.perms) - result.gap) < 1e-6


@pytest.mark.parametrize(
    ("n", "size", "constraints", "perms"),
    [
        (2, 1, {}, [[1, 0]]),
        # two transpositions of three streams: the only sets of two that hold their inverses and generate S_3
        (3, 2, {"reversible": True}, [[0, 2, 1], [1, 0, 2]]),
    ],
)
def test_where_no_set_has_a_gap_one_that_generates_is_returned(n, size, constraints, perms):
    result = best_generating_set(n, size, **constraints)
    assert result.gap == 0
    assert result.exhaustive
    assert symmetric_group.generates(result.perms)
    assert abs(plain_spectral_gap(result.perms)) < 1e-9
    assert sorted(result.perms.tolist()) == perms
    assert result.ties.tolist() == [result.perms.tolist()]


@pytest.mark.parametrize(
    ("n", "size", "constraints"),
    [
        (3, 1, {}),
        (5, 2, {"contains_identity": True}),  # a cyclic group
        (4, 2, {"reversible": True}),  # a dihedral one
        (2, 1, {"contains_identity": True}),
    ],
)
def test_where_no_set_generates_the_group_that_is_said(n, size, constraints):
    with pytest.raises(ValueError, match=r"generates all .* permutations; ask for a larger size"):
        best_generating_set(n, size, **constraints)


def test_exact_comparison_finds_ties_that_rounding_hides():
    # Six of the 35 classes are so defective that floating point misses their |λ₂| = 1/5 by more than 1e-6.
    result = best_generating_set(4, 5)
    assert abs(result.gap - 0.8) < 1e-14
    assert result.gap == pytest.approx(result.bound, abs=1e-14)
    rounded = np.array([plain_spectral_gap(perms) for perms in result.ties])
    assert len(rounded) == 35
    assert 0 < (np.abs(rounded - 0.8) > 1e-6).sum() < 10
    assert np.abs(rounded - 0.8).max() < 0.02


def test_five_streams_four_permutations_are_certified_by_the_plain_matrix():
    result = best_generating_set(5, 4)
    assert result.examined == 38082
    assert result.covered == 8_214_570
    assert symmetric_group.generates(result.perms)
    assert abs(plain_spectral_gap(result.perms) - result.gap) < 1e-10
    assert 0.5642601 < result.gap < 0.5642603
    random = np.random.default_rng(0)
    for _ in range(50):
        other = symmetric_group.elements(5)[random.choice(120, 4, replace=False)]
        assert spectral_gap(other) <= result.gap + 1e-12


@pytest.mark.parametrize(("contains_identity", "reversible"), [(True, False), (False, True), (True, True)])
def test_constraints_are_those_of_a_filter_over_all_subsets(contains_identity, reversible):
    subsets, gaps = plain_gaps(4, 4)
    inverses = symmetric_group.rank(symmetric_group.inverse(symmetric_group.elements(4)))
    allowed = np.ones(len(subsets), dtype=bool)
    if contains_identity:
        allowed &= subsets[:, 0] == 0
    if reversible:
        allowed &= (np.sort(inverses[subsets], axis=1) == subsets).all(axis=1)
    result = best_generating_set(4, 4, contains_identity=contains_identity, reversible=reversible)
    assert result.covered == allowed.sum()
    assert abs(result.gap - gaps[allowed].max()) < 1e-6
    ranks = set(symmetric_group.rank(result.perms.numpy()).tolist())
    assert not contains_identity or 0 in ranks
    assert not reversible or ranks == set(inverses[list(ranks)].tolist())


def test_a_batch_of_no_sets_is_a_batch():
    # Enumeration in small batches may find that none of a batch is the one of its class.
    assert Question(5, 4).elements_of(np.empty((0, 4), dtype=np.int64)).shape == (0, 4)
    assert Question(5, 4, contains_identity=True).elements_of(np.empty((0, 3), dtype=np.int64)).shape == (0, 4)


def test_representatives_with_constraints_are_one_of_each_class():
    question = Question(4, 4, contains_identity=True, reversible=True)
    classes_of_sets = SetClasses(question)
    table = symmetric_group.symmetries(4)
    classes = [
        frozenset(frozenset(row[s].tolist()) for row in table)
        for unit in classes_of_sets.units()
        for sets, _ in classes_of_sets.list_sets(unit)
        for s in sets
    ]
    assert len(classes) == len(set(classes)) == classes_of_sets.count_orbits()
    assert sum(map(len, classes)) == classes_of_sets.count_subsets()


def test_among_ties_the_streams_decide():
    result = best_generating_set(4, 4)
    assert len(result.ties) == 4
    assert result.stream_gap == pytest.approx(max(generators.stream_gap(perms) for perms in result.ties), abs=1e-9)


def test_six_streams_use_the_outer_automorphism_for_the_streams():
    result = best_generating_set(6, 2)
    assert result.examined == 230
    images = symmetric_group.outer_automorphism()[symmetric_group.rank(result.perms.numpy())]
    assert result.stream_gap >= generators.stream_gap(symmetric_group.elements(6)[images]) - 1e-9
    assert abs(plain_spectral_gap(result.perms) - result.gap) < 1e-9


def test_result_is_a_basis_of_the_mixer():
    result = best_generating_set(4, 3)
    mixed = permutation.mix(torch.zeros(3, dtype=torch.float64), result.perms)
    moduli = np.sort(np.abs(np.linalg.eigvals(mixed.numpy())))
    assert abs(1 - moduli[-2] - result.stream_gap) < 1e-9


def test_an_interrupted_search_goes_on_where_it_was(tmp_path):
    path = tmp_path / "deep" / "state.json"

    def interrupt(done, total, gap):
        if path.exists():  # the first unit is finished, and the second has begun
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        best_generating_set(4, 5, state=path, progress=interrupt)
    kept = json.loads(path.read_text())
    assert 0 < kept["examined"] < 1239
    resumed: list[int] = []
    result = best_generating_set(4, 5, state=path, progress=lambda done, total, gap: resumed.append(done))
    assert resumed[0] > kept["examined"]
    assert (result.examined, len(result.ties)) == (1239, 35)
    again = best_generating_set(4, 5, state=path, progress=lambda *_: pytest.fail("nothing is left to do"))
    assert (again.gap, again.examined) == (result.gap, 1239)
    with pytest.raises(ValueError, match="another search"):
        best_generating_set(4, 4, state=path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="not the state"):
        best_generating_set(4, 5, state=path)


def test_processes_find_what_one_finds(monkeypatch):
    alone = best_generating_set(4, 4, workers=1)
    monkeypatch.setattr(exhaustive_search, "PARALLEL_CLASSES", 0)
    together = best_generating_set(4, 4, workers=2)
    assert torch.equal(alone.ties, together.ties)
    assert (alone.gap, alone.examined, alone.covered) == (together.gap, together.examined, together.covered)


def test_what_there_is_to_look_at_is_counted_before_the_search():
    search = prepare_search(Question(6, 4), workers=2)
    assert search.exhaustive
    assert search.classes == 3_929_455
    assert search.subsets == comb(720, 4)
    assert search.estimate_seconds() == 3_929_455 // 800_000
    beyond = prepare_search(Question(6, 6), moves=10)
    assert not beyond.exhaustive
    assert beyond.classes > AUTO_CLASSES
    assert prepare_search(Question(8, 3), moves=10).classes is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"n": 1, "size": 1}, "between 2 and 8"),
        ({"n": 9, "size": 1}, "between 2 and 8"),
        ({"n": 4, "size": 0}, "at least 1"),
        ({"n": 3, "size": 7}, "1 to 6"),
        ({"n": 4, "size": 3, "method": "guess"}, "auto, exhaustive or local"),
        ({"n": 8, "size": 3, "method": "exhaustive"}, "n ≤ 7"),
        ({"n": 4, "size": 3, "workers": 0}, "workers must be a whole number, at least 1"),
        ({"n": 4, "size": 3, "method": "local", "moves": 0}, "moves must be a whole number, at least 1"),
        ({"n": 4, "size": 3, "moves": 10}, "this search is exhaustive, without moves or a seed"),
        ({"n": 4, "size": 3, "seed": 1}, "this search is exhaustive, without moves or a seed"),
        ({"n": 4, "size": 3, "method": "local", "seed": -1}, "seed must be a whole number and not negative"),
        ({"n": 4, "size": 3, "method": "local", "workers": 2}, "one process"),
        ({"n": 8, "size": 1, "moves": 200}, "none of the 200 moves led to a set of 1 permutation of 8 streams"),
        ({"n": 2.5, "size": 1}, "streams must be a whole number"),
        ({"n": 4, "size": "3"}, "size of a set must be a whole number"),
    ],
)
def test_bad_questions_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        best_generating_set(**arguments)


def test_a_local_search_keeps_no_state(tmp_path):
    with pytest.raises(ValueError, match="stores no state"):
        best_generating_set(4, 3, method="local", moves=10, state=tmp_path / "state")
