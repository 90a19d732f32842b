r"""Scores of tasks whose puzzles have variants: every variant of a puzzle casts one vote on each of its tests.

A vote is the model's answer, turned back into a grid of the original puzzle and stored as a 64-bit hash. Candidate
grids are ranked by number of votes, then by mean confidence. pass@k is the share of a puzzle's tests whose true grid is
among the k best candidates, averaged over puzzles. docs/derivations/arc_evaluation.md explains all metrics.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Self, TypedDict

import numpy as np
from torch import Tensor

from jpmhc.experiments.evaluation.scores import Answers, Metrics, Records, RowScorer

PASS_AT = (1, 2, 5, 10, 100, 1000)
_ROUNDS = 200  # resamplings for the standard error of pass@k

Grids = Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]
"""A function that turns numbers of test rows [B] and a model's tokens [B, S] into grids of the original puzzles."""


@dataclass(frozen=True)
class VotingPuzzle:
    """A puzzle whose variants vote in an evaluation."""

    name: str
    inputs: tuple[np.ndarray, ...]  # the tests' input grids
    outputs: tuple[np.ndarray | None, ...]  # the tests' output grids; None: unknown
    at: np.ndarray  # [evaluated variants, tests]: positions of the puzzle's rows among the evaluation's rows
    variants: int  # number of all variants of the puzzle, evaluated or not

    @property
    def known(self) -> list[int]:
        """The numbers of the puzzle's tests whose output is known."""
        return [test for test, output in enumerate(self.outputs) if output is not None]


@dataclass(frozen=True)
class Candidate:
    """A grid that variants of a puzzle voted for."""

    grid: np.ndarray  # [h, w] uint8
    votes: int
    of: int  # number of all votes on the test


@dataclass(frozen=True)
class AnsweredTest:
    """One test of a puzzle with the grids that got the most votes."""

    puzzle: str  # the puzzle's name
    test: int
    input: np.ndarray
    output: np.ndarray | None  # None: unknown
    candidates: list[Candidate]  # best first


class VoteCount(TypedDict):
    """The numbers of votes on one test, and the rank of the true grid."""

    test: int
    rank: int | None  # rank of the true grid among the candidates, 1 is best; None: no vote is right
    votes: int
    right: int
    candidates: int


class VoteScorer(RowScorer):
    """A scorer that records a vote and the scores of each row, in about 50 bytes per row.

    The rows must include either all tests of a variant or none. `read_grids` turns row numbers [B] and tokens [B, S]
    into grids of the original puzzles. With `keep_grids` the scorer stores the grids with votes, which submissions need
    and scores do not.
    """

    def __init__(
        self, rows: np.ndarray, puzzles: Sequence[VotingPuzzle], read_grids: Grids, keep_grids: bool = False
    ) -> None:
        super().__init__(rows)
        self.puzzles, self.read_grids = puzzles, read_grids
        self.columns["votes"] = np.zeros(len(self.rows), np.uint64)
        self.grids: dict[int, np.ndarray] | None = {} if keep_grids else None
        for puzzle in puzzles:
            # Each evaluated variant represents an equal share of all variants of its puzzle.
            self.weights[puzzle.at] = puzzle.variants / len(puzzle.at)

    @property
    def scorable(self) -> bool:
        """Whether any test has a known output."""
        return any(puzzle.known for puzzle in self.puzzles)

    def update(self, rows: np.ndarray, labels: Tensor, answers: Answers) -> None:
        super().update(rows, labels, answers)
        grids = self.read_grids(rows, answers.tokens.cpu().numpy())
        votes = np.array([hash_grid(grid) for grid in grids], np.uint64)
        self._write(rows, votes=votes)
        if self.grids is not None:
            for vote, grid in zip(votes, grids):
                self.grids.setdefault(int(vote), grid.copy())

    def collected(self) -> Records:
        return {**super().collected(), "grids": self.grids}

    def merge(self, collected: Records) -> None:
        super().merge(collected)
        if self.grids is not None:
            self.grids |= collected["grids"]

    def result(self, pool: Sequence[Self] = ()) -> Metrics:
        """Return row metrics, pass@k by vote, pass@k of independent answers (see `iid_pass`), and standard errors.

        The votes of the scorers in `pool` are added. With a pool there are no row metrics, because they describe
        one checkpoint.
        """
        result = super().result()
        if pool:
            result = {"rows": result["rows"]}
        sources = [self, *pool]
        for other in pool:
            other.require_complete()
            if not np.array_equal(self.rows, other.rows):
                raise ValueError(
                    "only votes on the same test rows can be pooled; these evaluations have different rows"
                )
        scored = [puzzle for puzzle in self.puzzles if puzzle.known]
        tests = {puzzle.name: [_count_votes(puzzle, test, sources) for test in puzzle.known] for puzzle in scored}
        result |= {"tasks": len(scored), "tests": sum(map(len, tests.values())), "pooled": len(sources)}
        for k in PASS_AT:
            hits = [[t["rank"] is not None and t["rank"] <= k for t in mine] for mine in tests.values()]
            result[f"pass@{k}"] = float(np.mean([np.mean(mine) for mine in hits]))
            result[f"solved@{k}"] = float(np.mean([all(mine) for mine in hits]))
        for k in PASS_AT:
            chances = [[iid_pass(t["votes"], t["right"], k) for t in mine] for mine in tests.values()]
            result[f"iid_pass@{k}"] = float(np.mean([np.mean(mine) for mine in chances]))
        result["iid_capped"] = {
            f"iid_pass@{k}": sum(t["votes"] < k for mine in tests.values() for t in mine) for k in PASS_AT
        }
        result["standard_error"] = self._standard_errors(scored, sources)
        result["per_task"] = tests
        return result

    def headline(self, result: Metrics) -> list[str]:
        """Return the names of the row metrics and of pass@k, for k up to the number of votes and at least up to 2."""
        votes = max(test["votes"] for tests in result["per_task"].values() for test in tests)
        return super().headline(result) + [f"pass@{k}" for k in PASS_AT if k <= max(2, votes)]

    def _standard_errors(self, scored: list[VotingPuzzle], sources: Sequence[RowScorer]) -> dict[str, float] | None:
        """Estimate the standard errors due to the choice of variants; None if a puzzle has only one chosen variant."""
        if any(len(puzzle.at) < min(2, puzzle.variants) for puzzle in scored):
            return None
        rows = np.array([puzzle.variants * len(puzzle.known) for puzzle in scored])
        unseen = np.array([1 - len(puzzle.at) / puzzle.variants for puzzle in scored])
        errors = {}
        columns = {"exact_accuracy": "exact", "token_accuracy": "tokens", "lm_loss": "loss"}
        for name, column in columns.items() if len(sources) == 1 else ():
            variants = [self.columns[column][p.at][:, p.known].mean(1) for p in scored]
            spread = [np.var(each, ddof=1) / len(each) if len(each) > 1 else 0.0 for each in variants]
            errors[name] = float(np.sqrt(np.sum((rows / rows.sum()) ** 2 * unseen * spread)))
        spreads = np.array(
            [_vote_variances(p, sources) if u > 0 else np.zeros(len(PASS_AT)) for p, u in zip(scored, unseen)]
        )
        for k, spread in zip(PASS_AT, spreads.T):
            errors[f"pass@{k}"] = float(np.sqrt(np.sum(unseen * spread)) / len(scored))
        return errors

    def answered(self, best: int = 2) -> list[AnsweredTest]:
        """Return every test of every puzzle with up to `best` candidates, best first; needs `keep_grids`.

        Empty grids are not candidates, but their votes count in `Candidate.of`.
        """
        assert self.grids is not None
        self.require_complete()
        answered = []
        for puzzle in self.puzzles:
            for test, at in enumerate(puzzle.at.T):
                order, counts = rank_candidates(self.columns["votes"][at], self.columns["confidence"][at])
                ranked = [Candidate(self.grids[int(d)], int(count), len(at)) for d, count in zip(order, counts)]
                candidates = [candidate for candidate in ranked if candidate.grid.size][:best]
                answered.append(AnsweredTest(puzzle.name, test, puzzle.inputs[test], puzzle.outputs[test], candidates))
        return answered


def hash_grid(grid: np.ndarray) -> np.uint64:
    """Return a 64-bit hash of a grid's shape and cells (BLAKE2)."""
    shape = bytes(grid.shape)  # sides are below 256
    cells = np.ascontiguousarray(grid, np.uint8).tobytes()
    return np.uint64(int.from_bytes(hashlib.blake2b(shape + cells, digest_size=8).digest(), "little"))


def rank_candidates(votes: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct candidates, best first, and their numbers of votes.

    `votes` has the hash of each vote's grid, [N], and `confidence` each vote's confidence, [N]. Candidates are sorted
    by count, then mean confidence, then hash, so that the order of the votes does not matter.

    >>> rank_candidates(np.array([7, 5, 7], np.uint64), np.array([0.1, 0.9, 0.2]))[0].tolist()
    [7, 5]
    """
    candidates, which, counts = np.unique(votes, return_inverse=True, return_counts=True)
    mean = np.bincount(which, confidence) / counts
    order = np.lexsort((candidates, -mean, -counts))
    return candidates[order], counts[order]


def rank_of(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray) -> int | None:
    """Return the rank of the hash `truth` in the order of `rank_candidates` (1 is best); None if no vote is right."""
    at = np.flatnonzero(rank_candidates(votes, confidence)[0] == truth)
    return int(at[0]) + 1 if len(at) else None


def iid_pass(samples: int, right: int, k: int) -> float:
    """Estimate the chance that at least one of k independent answers is right, if `right` of `samples` answers are.

    This is the unbiased estimator `1 − C(N − c, k) / C(N, k)` with N samples, c of them right. For k > N, where it is
    not defined, the value at k = N is returned: 1 if any answer is right, else 0.

    >>> iid_pass(samples=4, right=1, k=2)
    0.5
    """
    k = min(k, samples)
    return 1 - comb(samples - right, k) / comb(samples, k)


def resampled_ranks(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the true grid's rank in each of R resamplings of the votes on a test; infinite if no vote is right. [R]

    `truth` is the true grid's hash, `votes` [N] and `confidence` [N] are as for `rank_candidates`, and each row of
    `chosen` [R, N'] has the indices of the votes in one resampling.
    """
    candidates, which = np.unique(votes, return_inverse=True)
    rounds, width = len(chosen), len(candidates)
    cell = (np.arange(rounds)[:, None] * width + which[chosen]).reshape(-1)
    counts = np.bincount(cell, minlength=rounds * width).reshape(rounds, width)
    total = np.bincount(cell, confidence[chosen].reshape(-1), minlength=rounds * width).reshape(rounds, width)
    mean = total / np.maximum(counts, 1)
    right = np.flatnonzero(candidates == truth)
    if not len(right):
        return np.full(rounds, np.inf)
    own, own_mean = counts[:, right], mean[:, right]
    ahead = (counts > own) | ((counts == own) & (mean > own_mean))
    ahead |= (counts == own) & (mean == own_mean) & (np.arange(width) < right)
    return np.where(own[:, 0] > 0, 1 + ahead.sum(1), np.inf)


def _votes_on(
    puzzle: VotingPuzzle, test: int, sources: Sequence[RowScorer]
) -> tuple[np.uint64, np.ndarray, np.ndarray]:
    """Return the hash of a test's true grid, and the hash and the confidence of each vote on the test, [votes].

    The votes are the pooled votes of the scorers `sources`.
    """
    at, output = puzzle.at[:, test], puzzle.outputs[test]
    assert output is not None
    votes = np.concatenate([source.columns["votes"][at] for source in sources])
    return hash_grid(output), votes, np.concatenate([source.columns["confidence"][at] for source in sources])


def _count_votes(puzzle: VotingPuzzle, test: int, sources: Sequence[RowScorer]) -> VoteCount:
    truth, votes, confidence = _votes_on(puzzle, test, sources)
    return {
        "test": test,
        "rank": rank_of(truth, votes, confidence),
        "votes": len(votes),
        "right": int(np.sum(votes == truth)),
        "candidates": len(np.unique(votes)),
    }


def _vote_variances(puzzle: VotingPuzzle, sources: Sequence[RowScorer]) -> np.ndarray:
    """Estimate the variance of a puzzle's pass@k due to the choice of variants, for each k in `PASS_AT`, by resampling.

    `sources` are the scorers whose votes are pooled. [len(PASS_AT)]
    """
    taken = len(puzzle.at)
    chosen = np.random.default_rng(0).integers(0, taken, (_ROUNDS, taken))
    chosen_of_all = np.concatenate([chosen + taken * s for s in range(len(sources))], 1)
    ranks = [resampled_ranks(*_votes_on(puzzle, test, sources), chosen_of_all) for test in puzzle.known]
    hits = np.stack(ranks)[None] <= np.array(PASS_AT)[:, None, None]  # [k, tests, rounds]
    return hits.mean(1).var(-1) * taken / (taken - 1)
