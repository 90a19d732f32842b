r"""ARC metrics from a model's answers: single rows, votes, and the error of looking at some of the variants only.

What each number means is derived in docs/derivations/arc_evaluation.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jpmhc.trm.tasks.arc import vote
from jpmhc.trm.tasks.batch import Answers, Batch
from jpmhc.trm.tasks.row_scores import RowScorer

if TYPE_CHECKING:
    from jpmhc.trm.tasks.arc.dataset import Arc

_ROUNDS = 200  # resamplings for the standard error of a vote


@dataclass(frozen=True)
class _Tested:
    """A tested puzzle as an evaluation sees it."""

    name: str
    at: np.ndarray  # [variants taken, tests]: places of its rows
    truths: list[np.uint64 | None]  # digest of each test's output
    variants: int  # how many variants the puzzle has in all

    @property
    def known(self) -> list[int]:
        """Tests whose output is known."""
        return [t for t, truth in enumerate(self.truths) if truth is not None]


@dataclass(frozen=True)
class Candidate:
    """A grid that variants of a puzzle voted for."""

    grid: np.ndarray  # [h, w] uint8
    votes: int
    of: int  # votes cast


class ArcScorer(RowScorer):
    """Collects one vote a row beside the row metrics: about 50 bytes a row in all.

    Args:
        task: the puzzles that the rows belong to.
        rows: numbers of the test rows that the evaluation covers; whole variants, as `test_selection` gives them.
        keep_grids: also keep the grids voted for, which a submission needs and a score does not.
    """

    def __init__(self, task: Arc, rows: np.ndarray, keep_grids: bool = False) -> None:
        super().__init__(rows)
        self.task = task
        self.columns["votes"] = np.zeros(len(self.rows), np.uint64)
        self.grids: dict[int, np.ndarray] | None = {} if keep_grids else None
        self.tested = list(self._tested())
        for puzzle in self.tested:
            # A row stands for as many rows as its puzzle has variants to each one taken.
            self.weights[puzzle.at] = puzzle.variants / len(puzzle.at)

    def _tested(self) -> Iterator[_Tested]:
        place, variant, _ = self.task.locate(self.rows)
        ends = np.flatnonzero(np.diff(place, append=-1)) + 1
        for start, end in zip([0, *ends[:-1]], ends):
            puzzle = self.task.puzzles[self.task.tested[place[start]]]
            taken = len(np.unique(variant[start:end]))
            if end - start != taken * len(puzzle.tests):
                raise ValueError(f"the evaluation takes some tests of a variant of task {puzzle.name} but not all.")
            truths = [vote.digest(test.output) if test.output is not None else None for test in puzzle.tests]
            at = np.arange(start, end).reshape(taken, len(puzzle.tests))
            yield _Tested(puzzle.name, at, truths, int(self.task.variants.counts[self.task.tested[place[start]]]))

    @property
    def scorable(self) -> bool:
        """Whether any test has a known output."""
        return any(puzzle.known for puzzle in self.tested)

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Take the answers to the test rows numbered `rows`."""
        super().update(rows, batch, answers)
        cells, heights, widths = self.task.restore(rows, answers.tokens.cpu().numpy())
        votes = np.empty(len(rows), np.uint64)
        for k, (height, width) in enumerate(zip(heights, widths)):
            grid = cells[k, :height, :width]
            votes[k] = vote.digest(grid)
            if self.grids is not None:
                self.grids.setdefault(int(votes[k]), grid.copy())
        self._write(rows, votes=votes)

    def state(self) -> dict[str, Any]:
        """What has been collected so far, to be sent to another rank."""
        return {**super().state(), "grids": self.grids}

    def merge(self, state: dict[str, Any]) -> None:
        """Take over what another rank has collected of the same evaluation."""
        super().merge(state)
        if self.grids is not None:
            self.grids |= state["grids"]

    def result(self, pool: Sequence[ArcScorer] = ()) -> dict[str, Any]:
        """Row metrics, pass@k by vote, pass@k of independent answers, and their errors.

        Args:
            pool: evaluations of other checkpoints over the same rows, whose votes are counted too. Row metrics are
                left out then, as they belong to one checkpoint.
        """
        result = super().result()
        if pool:
            result = {"rows": result["rows"]}
        sources = [self, *pool]
        for other in pool:
            other.require_complete()
            if not np.array_equal(self.rows, other.rows):
                raise ValueError("only votes on the same test rows can be pooled; these evaluations differ in theirs.")
        scored = [puzzle for puzzle in self.tested if puzzle.known]
        tests = {puzzle.name: [_count(puzzle, t, sources) for t in puzzle.known] for puzzle in scored}
        result |= {"tasks": len(scored), "tests": sum(map(len, tests.values())), "pooled": len(sources)}
        for k in vote.PASS_AT:
            hits = {name: [_hit(test["rank"], k) for test in mine] for name, mine in tests.items()}
            result[f"pass@{k}"] = float(np.mean([np.mean(mine) for mine in hits.values()]))
            result[f"solved@{k}"] = float(np.mean([all(mine) for mine in hits.values()]))
        for k in vote.PASS_AT:
            chances = [[vote.iid_pass(t["votes"], t["right"], k) for t in mine] for mine in tests.values()]
            result[f"iid_pass@{k}"] = float(np.mean([np.mean(mine) for mine in chances]))
        result["iid_capped"] = {
            f"iid_pass@{k}": sum(t["votes"] < k for mine in tests.values() for t in mine) for k in vote.PASS_AT
        }
        result["standard_error"] = self._standard_errors(scored, sources)
        result["per_task"] = tests
        return result

    def _standard_errors(self, scored: list[_Tested], sources: list[ArcScorer]) -> dict[str, float] | None:
        """Errors from having taken some of the variants, at random; None where one variant is all that was taken."""
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
            [_vote_variances(p, sources) if u > 0 else np.zeros(len(vote.PASS_AT)) for p, u in zip(scored, unseen)]
        )
        for k, spread in zip(vote.PASS_AT, spreads.T):
            errors[f"pass@{k}"] = float(np.sqrt(np.sum(unseen * spread)) / len(scored))
        return errors

    def answers(self, best: int = 2) -> dict[str, list[list[Candidate]]]:
        """Up to `best` candidates of every test of every puzzle, best first; needs `keep_grids`.

        A vote for an empty grid counts among the votes but is no candidate.
        """
        if self.grids is None:
            raise ValueError("this evaluation did not keep the grids voted for.")
        self.require_complete()
        chosen = {}
        for puzzle in self.tested:
            tests = []
            for at in puzzle.at.T:
                order, counts = vote.ranking(self.columns["votes"][at], self.columns["confidence"][at])
                ranked = [Candidate(self.grids[int(d)], int(count), len(at)) for d, count in zip(order, counts)]
                tests.append([candidate for candidate in ranked if candidate.grid.size][:best])
            chosen[puzzle.name] = tests
        return chosen


def _count(puzzle: _Tested, test: int, sources: list[ArcScorer]) -> dict[str, Any]:
    """How the votes on one test went: the truth's rank among the candidates is all that pass@k needs."""
    at, truth = puzzle.at[:, test], puzzle.truths[test]
    votes = np.concatenate([source.columns["votes"][at] for source in sources])
    confidence = np.concatenate([source.columns["confidence"][at] for source in sources])
    assert truth is not None
    return {
        "test": test,
        "rank": vote.rank_of(truth, votes, confidence),
        "votes": len(votes),
        "right": int(np.sum(votes == truth)),
        "candidates": len(np.unique(votes)),
    }


def _hit(rank: float | None, k: int) -> bool:
    return rank is not None and rank <= k


def _variance_of_mean(values: np.ndarray) -> float:
    return float(np.var(values, ddof=1) / len(values)) if len(values) > 1 else 0.0


def _vote_variances(puzzle: _Tested, sources: list[ArcScorer]) -> np.ndarray:
    """Variance of a puzzle's pass@k over the choice of variants, by resampling them with repetition: [len(PASS_AT)]."""
    taken = len(puzzle.at)
    chosen = np.random.default_rng(0).integers(0, taken, (_ROUNDS, taken))
    chosen_of_all = np.concatenate([chosen + taken * s for s in range(len(sources))], 1)
    ranks = []
    for test in puzzle.known:
        at, truth = puzzle.at[:, test], puzzle.truths[test]
        votes = np.concatenate([source.columns["votes"][at] for source in sources])
        confidence = np.concatenate([source.columns["confidence"][at] for source in sources])
        assert truth is not None
        ranks.append(vote.resampled_ranks(truth, votes, confidence, chosen_of_all))
    hits = np.stack(ranks)[None] <= np.array(vote.PASS_AT)[:, None, None]  # [k, tests, rounds]
    return hits.mean(1).var(-1) * taken / (taken - 1)
