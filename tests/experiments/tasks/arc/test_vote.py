"""Votes and pass@k against slow and independent forms."""

import itertools
from math import comb

import numpy as np
import pytest

from jpmhc.experiments.tasks.arc import vote


def slow_ranking(votes: list[int], confidence: list[float]) -> list[int]:
    """Candidates by (votes, mean confidence), from a dictionary."""
    table: dict[int, list[float]] = {}
    for candidate, q in zip(votes, confidence):
        table.setdefault(candidate, []).append(q)
    return sorted(table, key=lambda c: (-len(table[c]), -sum(table[c]) / len(table[c]), c))


def test_ranking_equals_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 30))
        votes, confidence = rng.integers(0, 6, n).astype(np.uint64), rng.integers(0, 3, n) / 2
        candidates, counts = vote.rank_candidates(votes, confidence)
        assert candidates.tolist() == slow_ranking(votes.tolist(), confidence.tolist())
        assert counts.tolist() == [int(np.sum(votes == c)) for c in candidates]


def test_confidence_decides_between_equal_votes_alone() -> None:
    votes = np.array([5, 5, 3, 3, 9], np.uint64)
    order, _ = vote.rank_candidates(votes, np.array([0.1, 0.2, 0.2, 0.3, 1.0]))
    assert order.tolist() == [3, 5, 9]
    assert vote.rank_of(np.uint64(5), votes, np.array([0.1, 0.2, 0.2, 0.3, 1.0])) == 2
    assert vote.rank_of(np.uint64(4), votes, np.zeros(5)) is None


def test_independent_pass_is_the_share_of_subsets_with_a_right_answer() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k))
                assert vote.iid_pass(n, c, k) == pytest.approx(hits / comb(n, k))


def test_independent_pass_beyond_the_samples_is_whether_any_is_right() -> None:
    assert vote.iid_pass(5, 1, 1000) == 1
    assert vote.iid_pass(5, 0, 1000) == 0


def test_digest_sees_shape_and_cells() -> None:
    grids = [np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((1, 6)), np.eye(2, 3), np.zeros((0, 0))]
    assert len({int(vote.hash_grid(g.astype(np.uint8))) for g in grids}) == len(grids)
    turned = np.arange(6, dtype=np.uint8).reshape(2, 3).T
    assert vote.hash_grid(turned) == vote.hash_grid(turned.copy())  # memory order does not matter


def test_resampled_ranks_equal_ranking_each_time() -> None:
    rng = np.random.default_rng(1)
    votes, confidence = rng.integers(0, 5, 12).astype(np.uint64), rng.integers(0, 3, 12) / 2
    chosen = rng.integers(0, 12, (100, 12))
    for truth in (0, 1, 4, 7):
        ranks = vote.resampled_ranks(np.uint64(truth), votes, confidence, chosen)
        slow = [vote.rank_of(np.uint64(truth), votes[c], confidence[c]) for c in chosen]
        assert ranks.tolist() == [np.inf if r is None else r for r in slow]
