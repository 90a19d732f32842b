"""Votes and pass@k: perfect answers, hand-counted votes, slow forms, and errors against repeated sampling."""

import itertools
import json
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch

from jpmhc.experiments.evaluation.checkpoints import fill_scorer
from jpmhc.experiments.evaluation.scores import Answers
from jpmhc.experiments.evaluation.votes import (
    VoteScorer,
    hash_grid,
    iid_pass,
    rank_candidates,
    rank_of,
    resampled_ranks,
)
from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.task import Batch


def oracle(batch: Batch) -> Answers:
    return Answers(batch.labels, torch.ones(len(batch)), torch.zeros(len(batch)))


def corrupt(batch: Batch, rows: list[int]) -> Answers:
    """The oracle with one colour changed in these rows."""
    tokens = batch.labels.clone()
    for row in rows:
        cell = int(torch.nonzero(tokens[row] >= 2)[0])
        tokens[row, cell] = 2 + (tokens[row, cell] - 1) % 10
    return Answers(tokens, torch.ones(len(batch)), torch.zeros(len(batch)))


def score(arc: Arc, rows: np.ndarray, right: np.ndarray, confidence: np.ndarray | None = None) -> VoteScorer:
    """An evaluation where some rows are right and the others vote for one wrong grid of each puzzle."""
    scorer = arc.scorer(rows)
    place, _, pair = arc.locate_rows(rows)
    truths = {}
    for puzzle in scorer.puzzles:
        for at, output in zip(puzzle.at.T, puzzle.outputs):
            assert output is not None
            truths.update(dict.fromkeys(at.tolist(), hash_grid(output)))
    scorer.columns["seen"][:] = scorer.columns["known"][:] = True
    scorer.columns["exact"][:] = right
    wrong = (place * 31 + pair).astype(np.uint64)
    scorer.columns["votes"][:] = [truths[k] if r else w for k, (r, w) in enumerate(zip(right, wrong))]
    scorer.columns["confidence"][:] = 0.5 if confidence is None else confidence
    return scorer


def test_labels_as_predictions_score_everything(arc: Arc) -> None:
    scorer = arc.scorer(arc.test_selection())
    fill_scorer(scorer, arc, oracle, batch_size=500)
    result = scorer.result()
    assert result["rows"] == arc.test_rows
    assert result["tasks"] == 400
    assert result["tests"] == 419
    for name in ("exact_accuracy", "token_accuracy", "pass@1", "pass@1000", "solved@1", "iid_pass@1"):
        assert result[name] == 1
    assert result["standard_error"]["pass@1"] == 0
    assert result["standard_error"]["exact_accuracy"] == 0


def test_a_corrupted_cell_does_not_change_the_vote(arc: Arc) -> None:
    scorer = arc.scorer(arc.test_selection())
    fill_scorer(scorer, arc, lambda batch: corrupt(batch, [0]), batch_size=10**6)
    result = scorer.result()
    assert result["exact_accuracy"] == pytest.approx(1 - 1 / arc.test_rows)
    assert result["pass@1"] == 1
    name = arc.puzzles[arc.tested[0]].name
    first = result["per_task"][name][0]
    assert (first["rank"], first["votes"], first["right"], first["candidates"]) == (1, 7, 6, 2)
    assert result["iid_pass@1"] < 1


def test_sharding_changes_nothing(arc: Arc) -> None:
    rows = arc.test_selection(3)
    generator = np.random.default_rng(0)
    noise = {int(row): float(q) for row, q in zip(rows, generator.random(len(rows)))}

    def model(part: np.ndarray) -> Answers:
        batch = arc.test_examples(part)
        tokens = batch.labels.clone()
        wrong = torch.tensor([noise[int(r)] < 0.5 for r in part])
        tokens[wrong, 0] = 1 + torch.tensor([int(noise[int(r)] * 6) for r in part])[wrong]
        q = torch.tensor([noise[int(r)] for r in part])
        return Answers(tokens, q, q.double())

    results = []
    for world in (1, 3):
        scorers = [arc.scorer(rows) for _ in range(world)]
        for rank, scorer in enumerate(scorers):
            mine = rows[rank::world]
            for start in range(0, len(mine), 100):
                part = mine[start : start + 100]
                scorer.update(part, arc.test_examples(part).labels, model(part))
        for other in scorers[1:]:
            scorers[0].merge(other.collected())
        results.append(json.dumps(scorers[0].result(), sort_keys=True))
    assert results[0] == results[1]
    assert 0.3 < json.loads(results[0])["exact_accuracy"] < 0.7


def test_a_task_scores_the_fraction_of_its_tests(arc: Arc) -> None:
    rows = arc.test_selection()
    _, _, pair = arc.locate_rows(rows)
    puzzles = [arc.puzzles[t] for t in arc.tested]
    first = arc._first_test[arc.tested]
    result = score(arc, rows, np.isin(pair, first)).result()  # the first test of every puzzle is right
    assert result["pass@1"] == pytest.approx(np.mean([1 / len(p.tests) for p in puzzles]))
    assert result["solved@1"] == pytest.approx(np.mean([len(p.tests) == 1 for p in puzzles]))
    assert result["iid_pass@1000"] == pytest.approx(result["pass@1"])
    assert result["iid_capped"]["iid_pass@1000"] == 419
    assert result["iid_capped"]["iid_pass@1"] == 0


def test_pass_at_two_takes_the_second_candidate(arc: Arc) -> None:
    rows = arc.test_selection()
    place, variant, _ = arc.locate_rows(rows)
    minority = variant - arc.variants.starts[arc.tested[place]] == 0  # one right vote of each puzzle's
    result = score(arc, rows, minority).result()
    fewer = arc.variants.counts[arc.tested] == 1
    ties = arc.variants.counts[arc.tested] == 2
    assert not ties.any()
    assert result["pass@1"] == pytest.approx(fewer.mean())
    assert result["pass@2"] == 1


def test_pooling_adds_the_votes_of_other_evaluations(arc: Arc) -> None:
    rows = arc.test_selection()
    place, variant, _ = arc.locate_rows(rows)
    number = variant - arc.variants.starts[arc.tested[place]]
    weak, strong = score(arc, rows, number < 2), score(arc, rows, number > 0)
    assert weak.result()["pass@1"] < 0.1
    pooled = weak.result(pool=[strong])
    assert pooled["pooled"] == 2
    assert pooled["pass@1"] == 1
    assert "exact_accuracy" not in pooled  # a checkpoint's own
    assert set(pooled["standard_error"]) == {f"pass@{k}" for k in (1, 2, 5, 10, 100, 1000)}
    with pytest.raises(ValueError, match="same test rows"):
        weak.result(pool=[score(arc, arc.test_selection(2), np.zeros(len(arc.test_selection(2)), bool))])


def test_incomplete_evaluations_are_refused(arc: Arc) -> None:
    rows = arc.test_selection(1)
    scorer = arc.scorer(rows)
    with pytest.raises(ValueError, match=f"{len(rows)} of {len(rows)} test rows have no answer"):
        scorer.result()
    first = arc.test_examples(rows[:1])
    scorer.update(rows[:1], first.labels, oracle(first))
    with pytest.raises(ValueError, match="have no answer"):
        scorer.result()
    with pytest.raises(ValueError, match="not part of this evaluation"):
        scorer.update(rows[-1:] + 1, first.labels, oracle(first))
    nan = Answers(first.labels, torch.tensor([torch.nan]), torch.zeros(1))
    with pytest.raises(ValueError, match="not finite"):
        scorer.update(rows[:1], first.labels, nan)


def test_half_variants_are_refused(arc: Arc) -> None:
    several = next(k for k, p in enumerate(arc.tested) if len(arc.puzzles[p].tests) > 1)
    with pytest.raises(ValueError, match="some, but not all, tests of a variant"):
        arc.scorer(arc._row_starts[several : several + 1])


def test_one_variant_has_no_error_estimate(arc: Arc) -> None:
    rows = arc.test_selection(1)
    assert score(arc, rows, np.ones(len(rows), bool)).result()["standard_error"] is None


def test_standard_errors_equal_the_spread_over_samples() -> None:
    """Draw variants again and again: the scatter of each metric is what one sample's standard error says."""
    names = ("00576224", "009d5c81", "00dbd492", "03560426", "05a7bcf2", "0607ce86", "0692e18c", "070dd51e")
    arc = ArcConfig(augmentations=100, tasks=names).build()
    rows = arc.test_selection()
    rng = np.random.default_rng(0)
    place, _, _ = arc.locate_rows(rows)
    right = rng.random(len(rows)) < np.linspace(0.3, 0.7, len(names))[place]
    full = score(arc, rows, right).result()
    values: dict[str, list[float]] = {"exact_accuracy": [], "pass@1": []}
    errors: dict[str, list[float]] = {"exact_accuracy": [], "pass@1": []}
    for seed in range(150):
        some = arc.test_selection(15, seed)
        result = score(arc, some, right[some]).result()
        for name in values:
            values[name].append(result[name])
            errors[name].append(result["standard_error"][name])
    assert np.mean(values["exact_accuracy"]) == pytest.approx(full["exact_accuracy"], abs=4 * 0.05 / np.sqrt(150))
    assert np.sqrt(np.mean(np.square(errors["exact_accuracy"]))) == pytest.approx(
        np.std(values["exact_accuracy"]), rel=0.2
    )
    # The bootstrap of a vote is approximate: within a factor of 1.5 of the truth.
    assert 1 / 1.5 < np.sqrt(np.mean(np.square(errors["pass@1"]))) / np.std(values["pass@1"]) < 1.5


def test_uneven_samples_are_weighted_back() -> None:
    """A puzzle with few variants counts as in the full evaluation, not as much as one with many."""
    arc = ArcConfig(augmentations=60, tasks=("00576224", "1a2e2828")).build()
    counts = arc.variants.counts[arc.tested]
    rows = arc.test_selection(5)
    place, _, _ = arc.locate_rows(rows)
    tests = np.array([len(arc.puzzles[t].tests) for t in arc.tested])
    result = score(arc, rows, place == 0).result()
    assert result["exact_accuracy"] == pytest.approx(counts[0] * tests[0] / (counts * tests).sum())


def test_answers_are_the_grids_in_order_of_votes(tmp_path: Path) -> None:
    arc = ArcConfig(augmentations=6, tasks=("00576224",)).build()
    rows = arc.test_selection()
    scorer = arc.scorer(rows, keep_grids=True)
    batch = arc.test_examples(rows)
    scorer.update(rows, batch.labels, corrupt(batch, [2]))
    truth = arc.puzzles[arc.tested[0]].tests[0].output
    assert truth is not None
    [answered] = scorer.answered()
    assert (answered.puzzle, answered.test) == ("00576224", 0)
    assert answered.output is truth
    first, second = answered.candidates
    assert (first.grid == truth).all()
    assert (first.votes, first.of) == (6, 7)
    assert second.grid.shape == truth.shape
    assert (second.grid != truth).sum() == 1
    assert second.votes == 1


def test_unknown_answers_are_left_out_of_the_score(tmp_path: Path) -> None:
    pair = {"input": [[1, 0]], "output": [[0, 1]]}
    (tmp_path / "half.json").write_text(json.dumps({"train": [pair], "test": [pair, {"input": [[2, 0]]}]}))
    arc = ArcConfig(version="none", evaluation_tasks=tmp_path, augmentations=5).build()
    scorer = arc.scorer(arc.test_selection())
    fill_scorer(scorer, arc, oracle, batch_size=4)
    result = scorer.result()
    assert result["tests"] == 1
    assert result["rows"] == arc.test_rows // 2
    assert result["pass@1"] == result["exact_accuracy"] == 1
    (tmp_path / "half.json").write_text(json.dumps({"train": [pair], "test": [{"input": [[2, 0]]}]}))
    arc = ArcConfig(version="none", evaluation_tasks=tmp_path, augmentations=5).build()
    scorer = arc.scorer(arc.test_selection())
    fill_scorer(scorer, arc, oracle, batch_size=4)
    assert not scorer.scorable
    with pytest.raises(ValueError, match="no test row has a known answer"):
        scorer.result()


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
        candidates, counts = rank_candidates(votes, confidence)
        assert candidates.tolist() == slow_ranking(votes.tolist(), confidence.tolist())
        assert counts.tolist() == [int(np.sum(votes == c)) for c in candidates]


def test_confidence_decides_between_equal_votes_alone() -> None:
    votes = np.array([5, 5, 3, 3, 9], np.uint64)
    order, _ = rank_candidates(votes, np.array([0.1, 0.2, 0.2, 0.3, 1.0]))
    assert order.tolist() == [3, 5, 9]
    assert rank_of(np.uint64(5), votes, np.array([0.1, 0.2, 0.2, 0.3, 1.0])) == 2
    assert rank_of(np.uint64(4), votes, np.zeros(5)) is None


def test_independent_pass_is_the_share_of_subsets_with_a_right_answer() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k))
                assert iid_pass(n, c, k) == pytest.approx(hits / comb(n, k))


def test_independent_pass_beyond_the_samples_is_whether_any_is_right() -> None:
    assert iid_pass(5, 1, 1000) == 1
    assert iid_pass(5, 0, 1000) == 0


def test_digest_sees_shape_and_cells() -> None:
    grids = [np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((1, 6)), np.eye(2, 3), np.zeros((0, 0))]
    assert len({int(hash_grid(g.astype(np.uint8))) for g in grids}) == len(grids)
    turned = np.arange(6, dtype=np.uint8).reshape(2, 3).T
    assert hash_grid(turned) == hash_grid(turned.copy())  # memory order does not matter


def test_resampled_ranks_equal_ranking_each_time() -> None:
    rng = np.random.default_rng(1)
    votes, confidence = rng.integers(0, 5, 12).astype(np.uint64), rng.integers(0, 3, 12) / 2
    chosen = rng.integers(0, 12, (100, 12))
    for truth in (0, 1, 4, 7):
        ranks = resampled_ranks(np.uint64(truth), votes, confidence, chosen)
        slow = [rank_of(np.uint64(truth), votes[c], confidence[c]) for c in chosen]
        assert ranks.tolist() == [np.inf if r is None else r for r in slow]
