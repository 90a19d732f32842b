r"""Scores of tasks whose puzzles have variants: every variant casts one vote for each of its puzzle's tests.

A vote is the grid that the model wrote, with the variant undone, and is represented by a 64-bit digest. Candidates are
ranked by (votes, mean confidence). docs/derivations/arc_evaluation.md derives the meaning of each number.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Self, TypedDict

import numpy as np
from torch import Tensor

from jpmhc.experiments.evaluation.scores import Answers, RowScorer

PASS_AT = (1, 2, 5, 10, 100, 1000)
_ROUNDS = 200  # resamplings for the standard error of a vote

Grids = Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]
"""Turns (numbers of test rows [B], a model's tokens [B, S]) into grids of the puzzles as published."""


@dataclass(frozen=True)
class VotingPuzzle:
    """A puzzle whose variants vote in an evaluation."""

    name: str
    inputs: tuple[np.ndarray, ...]  # of its tests
    outputs: tuple[np.ndarray | None, ...]  # None: not known
    at: np.ndarray  # [variants taken, tests]: the positions of its rows among the evaluation's
    variants: int  # number of variants that the puzzle has in all

    @property
    def known(self) -> list[int]:
        """The tests whose output is known."""
        return [test for test, output in enumerate(self.outputs) if output is not None]


@dataclass(frozen=True)
class Candidate:
    """A grid that variants of a puzzle voted for."""

    grid: np.ndarray  # [h, w] uint8
    votes: int
    of: int  # votes cast


@dataclass(frozen=True)
class Answered:
    """One test of a puzzle and the grids with the most votes."""

    puzzle: str  # its name
    test: int
    input: np.ndarray
    output: np.ndarray | None  # None: not known
    candidates: list[Candidate]  # best first


class VoteCount(TypedDict):
    """The votes on one test; pass@k needs the rank alone."""

    test: int
    rank: int | None  # of the true grid among the candidates, 1 being best
    votes: int
    right: int
    candidates: int


class VoteScorer(RowScorer):
    """Records one vote per row beside the row's own scores: about 50 bytes per row.

    Args:
        rows: Numbers of the test rows that the evaluation covers; whole variants, as `test_selection` returns them.
        puzzles: The puzzles that the rows belong to.
        read_grids: Turns a model's tokens into grids.
        keep_grids: Also keep the grids with votes, which a submission needs and a score does not.
    """

    def __init__(
        self, rows: np.ndarray, puzzles: Sequence[VotingPuzzle], read_grids: Grids, keep_grids: bool = False
    ) -> None:
        super().__init__(rows)
        self.puzzles, self.read_grids = puzzles, read_grids
        self.columns["votes"] = np.zeros(len(self.rows), np.uint64)
        self.grids: dict[int, np.ndarray] | None = {} if keep_grids else None
        for puzzle in puzzles:
            # A row stands for as many rows as its puzzle has variants per variant taken.
            self.weights[puzzle.at] = puzzle.variants / len(puzzle.at)

    @property
    def scorable(self) -> bool:
        """Whether any test has a known output."""
        return any(puzzle.known for puzzle in self.puzzles)

    def update(self, rows: np.ndarray, labels: Tensor, answers: Answers) -> None:
        """Record the answers to the test rows numbered `rows` [B], whose true tokens are `labels` [B, S]."""
        super().update(rows, labels, answers)
        grids = self.read_grids(rows, answers.tokens.cpu().numpy())
        votes = np.array([hash_grid(grid) for grid in grids], np.uint64)
        self._write(rows, votes=votes)
        if self.grids is not None:
            for vote, grid in zip(votes, grids):
                self.grids.setdefault(int(vote), grid.copy())

    def collected(self) -> dict[str, Any]:
        """Return everything recorded so far, to be sent to another process."""
        return {**super().collected(), "grids": self.grids}

    def merge(self, collected: dict[str, Any]) -> None:
        """Add the records that another process's scorer collected in the same evaluation."""
        super().merge(collected)
        if self.grids is not None:
            self.grids |= collected["grids"]

    def result(self, pool: Sequence[Self] = ()) -> dict[str, Any]:
        """Return row metrics, pass@k by vote, pass@k of independent answers, and their errors.

        Args:
            pool: Scorers of other checkpoints over the same rows, whose votes are counted too. Row metrics are left
                out then, as they belong to one checkpoint.
        """
        result = super().result()
        if pool:
            result = {"rows": result["rows"]}
        sources = [self, *pool]
        for other in pool:
            other.require_complete()
            if not np.array_equal(self.rows, other.rows):
                raise ValueError("only votes on the same test rows can be pooled; these evaluations differ in theirs")
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

    def headline(self, result: dict[str, Any]) -> list[str]:
        """Add pass@k where there are as many votes as attempts, and up to the two attempts that ARC Prize allows."""
        votes = max(test["votes"] for tests in result["per_task"].values() for test in tests)
        return super().headline(result) + [f"pass@{k}" for k in PASS_AT if k <= max(2, votes)]

    def _standard_errors(self, scored: list[VotingPuzzle], sources: Sequence[RowScorer]) -> dict[str, float] | None:
        """Estimate the errors that come from drawing some of the variants; None where a single one was drawn."""
        if any(len(puzzle.at) < min(2, puzzle.variants) for puzzle in scored):
            return None
        rows = np.array([puzzle.variants * len(puzzle.known) for puzzle in scored])
        unseen = np.array([1 - len(puzzle.at) / puzzle.variants for puzzle in scored])
        errors = {}
        columns = {"exact_accuracy": "exact", "token_accuracy": "tokens", "lm_loss": "loss"}
        for name, column in columns.items() if len(sources) == 1 else ():
            spread = [_variance_of_mean(self.columns[column][p.at][:, p.known].mean(1)) for p in scored]
            errors[name] = float(np.sqrt(np.sum((rows / rows.sum()) ** 2 * unseen * spread)))
        spreads = np.array(
            [_vote_variances(p, sources) if u > 0 else np.zeros(len(PASS_AT)) for p, u in zip(scored, unseen)]
        )
        for k, spread in zip(PASS_AT, spreads.T):
            errors[f"pass@{k}"] = float(np.sqrt(np.sum(unseen * spread)) / len(scored))
        return errors

    def answered(self, best: int = 2) -> list[Answered]:
        """Return every test of every puzzle with up to `best` candidates, best first; needs `keep_grids`.

        A vote for an empty grid counts among the votes but is no candidate.
        """
        assert self.grids is not None
        self.require_complete()
        answered = []
        for puzzle in self.puzzles:
            for test, at in enumerate(puzzle.at.T):
                order, counts = rank_candidates(self.columns["votes"][at], self.columns["confidence"][at])
                ranked = [Candidate(self.grids[int(d)], int(count), len(at)) for d, count in zip(order, counts)]
                candidates = [candidate for candidate in ranked if candidate.grid.size][:best]
                answered.append(Answered(puzzle.name, test, puzzle.inputs[test], puzzle.outputs[test], candidates))
        return answered


def hash_grid(grid: np.ndarray) -> np.uint64:
    """Hash a grid's shape and cells to 64 bits (BLAKE2)."""
    shape = bytes(grid.shape)  # sides are below 256
    cells = np.ascontiguousarray(grid, np.uint8).tobytes()
    return np.uint64(int.from_bytes(hashlib.blake2b(shape + cells, digest_size=8).digest(), "little"))


def rank_candidates(votes: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank the distinct candidates, best first, and count the votes for each.

    Args:
        votes: Digests voted for, [N].
        confidence: Confidence of each vote, [N].

    Returns:
        Digests and counts, sorted by (count, mean confidence). Equals are sorted by digest, so that the order of the
        votes does not matter.

    >>> rank_candidates(np.array([7, 5, 7], np.uint64), np.array([0.1, 0.9, 0.2]))[0].tolist()
    [7, 5]
    """
    candidates, which, counts = np.unique(votes, return_inverse=True, return_counts=True)
    mean = np.bincount(which, confidence) / counts
    order = np.lexsort((candidates, -mean, -counts))
    return candidates[order], counts[order]


def rank_of(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray) -> int | None:
    """Return the rank of the truth among the candidates, 1 being best; None if no vote is right."""
    at = np.flatnonzero(rank_candidates(votes, confidence)[0] == truth)
    return int(at[0]) + 1 if len(at) else None


def iid_pass(samples: int, right: int, k: int) -> float:
    """Estimate the chance that at least one of k independent answers is right, from `samples` with `right` right ones.

    This is the unbiased estimator `1 − C(N − c, k) / C(N, k)`. It is not defined for k above N, where the value at
    k = N is returned: 1 if any answer is right, else 0.

    >>> iid_pass(samples=4, right=1, k=2)
    0.5
    """
    k = min(k, samples)
    return 1 - comb(samples - right, k) / comb(samples, k)


def resampled_ranks(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the truth's rank under many resamplings of the votes.

    Args:
        truth: Digest of the right grid.
        votes: [N].
        confidence: [N].
        chosen: Indices of the votes in each resampling, [R, N'].

    Returns:
        Ranks, [R] floats, infinite where no chosen vote is right.
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
    """Return the true digest of one test, and the digests and confidences of all votes on it."""
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


def _variance_of_mean(values: np.ndarray) -> float:
    return float(np.var(values, ddof=1) / len(values)) if len(values) > 1 else 0.0


def _vote_variances(puzzle: VotingPuzzle, sources: Sequence[RowScorer]) -> np.ndarray:
    """Estimate the variance of a puzzle's pass@k over the choice of variants by resampling them. [len(PASS_AT)]"""
    taken = len(puzzle.at)
    chosen = np.random.default_rng(0).integers(0, taken, (_ROUNDS, taken))
    chosen_of_all = np.concatenate([chosen + taken * s for s in range(len(sources))], 1)
    ranks = [resampled_ranks(*_votes_on(puzzle, test, sources), chosen_of_all) for test in puzzle.known]
    hits = np.stack(ranks)[None] <= np.array(PASS_AT)[:, None, None]  # [k, tests, rounds]
    return hits.mean(1).var(-1) * taken / (taken - 1)
