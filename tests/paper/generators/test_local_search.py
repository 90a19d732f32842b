"""The local search: against proven optima, and what it may and may not change."""

import numpy as np
import pytest

from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.local_search import ROUNDING, SQUARINGS, _Neighbourhood, _RadiusTable, search_locally
from jpmhc.paper.generators.pruning import select_by_traces
from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.random_walk import plain_spectral_gap, spectral_gap, transition_matrix
from jpmhc.paper.generators.search import best_generating_set


def ignore(done, radius):
    pass


@pytest.mark.parametrize(
    ("n", "size", "constraints", "moves"),
    [
        (4, 3, {}, 3_000),
        (4, 5, {"contains_identity": True}, 3_000),
        (5, 4, {}, 40_000),
        (5, 4, {"reversible": True}, 10_000),
        (5, 5, {"reversible": True, "contains_identity": True}, 10_000),
    ],
)
def test_proven_optima_are_found(n, size, constraints, moves):
    best = best_generating_set(n, size, **constraints)
    local = best_generating_set(n, size, **constraints, method="local", moves=moves)
    assert abs(local.gap - best.gap) < 1e-9
    assert not local.exhaustive
    assert local.gap <= local.bound
    assert local.examined == moves


def test_best_pair_of_six_streams_is_found():
    # 0.2145852: looked for exhaustively, and by the plain matrix
    ranks, radius = search_locally(Question(6, 2), 20_000, 0, ignore)
    assert 1 - radius == pytest.approx(0.2145852, abs=1e-6)
    assert plain_spectral_gap(symmetric_group.elements(6)[ranks]) == pytest.approx(1 - radius, abs=1e-9)


@pytest.mark.parametrize("n", [7, 8])
def test_what_is_found_beyond_the_exhaustive_search_is_verified(n):
    ranks, radius = search_locally(Question(n, 4, contains_identity=True), moves=40, seed=1, progress=lambda *_: None)
    perms = symmetric_group.elements(n)[ranks]
    assert ranks[0] == 0
    assert len(set(ranks)) == 4
    assert symmetric_group.generates(perms)
    assert abs(spectral_gap(perms) - (1 - radius)) < 1e-6
    # Independently of representations: the walk's distance from uniform shrinks by |λ₂| a step.
    group = symmetric_group.elements(n)
    sources = [symmetric_group.rank(group[:, symmetric_group.inverse(p)]) for p in perms]
    law, norms = np.eye(1, len(group))[0], []
    for _ in range(400):
        law = sum(law[s] for s in sources) / len(perms)
        norms.append(np.linalg.norm(law - 1 / len(group)))
        if norms[-1] < 1e-13:
            break
    steps = [k for k, x in enumerate(norms) if 1e-12 < x < 1e-4]
    rate = (norms[steps[-1]] / norms[steps[0]]) ** (1 / (steps[-1] - steps[0]))
    assert abs(rate - radius) < 0.03


def test_search_is_determined_by_its_seed_and_reports():
    seen = []
    first = search_locally(Question(5, 3), 2_000, 3, lambda done, radius: seen.append((done, radius)))
    assert first == search_locally(Question(5, 3), 2_000, 3, ignore)
    done, radii = zip(*seen)
    assert done[-1] == 2_000
    assert list(done) == sorted(done)
    assert list(radii) == sorted(radii, reverse=True)
    assert radii[-1] == first[1]


def test_no_gap_is_said_as_radius_one():
    ranks, radius = search_locally(Question(5, 2, contains_identity=True), 300, 0, ignore)
    assert radius == 1
    assert ranks[0] == 0


def test_smallest_of_many_sets_is_that_of_the_plain_matrices():
    random = np.random.default_rng(0)
    sets = np.array([random.choice(24, 3, replace=False) for _ in range(60)])
    group = symmetric_group.elements(4)
    moduli = [np.sort(np.abs(np.linalg.eigvals(transition_matrix(group[s]))))[-2] for s in sets]
    found, radius = _RadiusTable(4, 3).find_smallest(sets, 1 - 1e-9)
    assert radius == pytest.approx(min(moduli), abs=1e-6)
    assert 1 - spectral_gap(group[found]) == pytest.approx(radius, abs=1e-6)
    assert _RadiusTable(4, 3).find_smallest(sets, min(moduli) - 1e-3) is None


def test_traces_drop_no_block_within_the_limit_and_most_beyond():
    random = np.random.default_rng(1)
    blocks = random.normal(size=(400, 9, 9)) / 3
    radii = np.abs(np.linalg.eigvals(blocks)).max(axis=1)
    kept = set(select_by_traces(blocks, 0.9, SQUARINGS, relative=ROUNDING).tolist())
    assert set(np.flatnonzero(radii <= 0.9).tolist()) <= kept
    beyond = np.flatnonzero(radii > 0.9 * 1.1)
    assert len(beyond) > 100
    assert sum(int(k) in kept for k in beyond) < 0.05 * len(beyond)


@pytest.mark.parametrize("question", [Question(4, 3), Question(4, 4, contains_identity=True)])
def test_neighbours_are_all_sets_that_differ_by_one_element(question):
    neighbourhood = _Neighbourhood(question, np.random.default_rng(0))
    start = neighbourhood.draw_sets(1)[0]
    found = [frozenset(row.tolist()) for batch in neighbourhood.list_neighbours(start) for row in batch]
    free = set(start.tolist()) - ({0} if question.contains_identity else set())
    allowed = set(range(24)) - set(start.tolist())
    truth = {frozenset(start.tolist()) - {old} | {new} for old in free for new in allowed}
    assert set(found) == truth
    assert len(found) == len(truth)


@pytest.mark.parametrize("contains_identity", [False, True])
def test_neighbours_of_reversible_sets_are_reversible_and_reach_every_kind(contains_identity):
    question = Question(4, 5, contains_identity, reversible=True)
    neighbourhood = _Neighbourhood(question, np.random.default_rng(0))
    inverse = symmetric_group.rank(symmetric_group.inverse(symmetric_group.elements(4)))
    kinds = set()
    for start in neighbourhood.draw_sets(20):
        for row in (row for batch in neighbourhood.list_neighbours(start) for row in batch):
            assert len(set(row.tolist())) == 5
            assert set(inverse[row].tolist()) == set(row.tolist())
            assert not contains_identity or 0 in row
            kinds.add(int((inverse[start] == start).sum() - (inverse[row] == row).sum()))
    assert kinds == {-2, 0, 2}  # pairs become two that stand alone, and the other way round
