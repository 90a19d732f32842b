r"""ARC metrics from a model's answers: single rows, votes, and the error that comes from drawing some variants only.

docs/derivations/arc_evaluation.md derives what each number means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jpmhc.experiments.tasks.arc import vote
from jpmhc.experiments.tasks.arc.puzzles import Puzzle
from jpmhc.experiments.tasks.batch import Answers, Batch
from jpmhc.experiments.tasks.row_scores import RowScorer
from jpmhc.experiments.tasks.task import Answered, VotedAnswer

if TYPE_CHECKING:
    from jpmhc.experiments.tasks.arc.dataset import Arc

_ROUNDS = 200  # resamplings for the standard error of a vote


@dataclass(frozen=True)
class _Tested:
    """A tested puzzle as an evaluation sees it."""

    puzzle: Puzzle
    at: np.ndarray  # [variants taken, tests]: places of its rows
    truths: list[np.uint64 | None]  # digest of each test's output
    variants: int  # how many variants the puzzle has in all

    @property
    def known(self) -> list[int]:
        """Tests whose output is known."""
        return [t for t, truth in enumerate(self.truths) if truth is not None]


class ArcScorer(RowScorer):
    """Records one vote for each row beside the row metrics: about 50 bytes a row in all.

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
        place, variant, _ = self.task.locate_rows(self.rows)
        ends = np.flatnonzero(np.diff(place, append=-1)) + 1
        for start, end in zip([0, *ends[:-1]], ends):
            puzzle = self.task.puzzles[self.task.tested[place[start]]]
            taken = len(np.unique(variant[start:end]))
            if end - start != taken * len(puzzle.tests):
                raise ValueError(f"the evaluation takes some tests of a variant of task {puzzle.name} but not all")
            truths = [vote.hash_grid(test.output) if test.output is not None else None for test in puzzle.tests]
            at = np.arange(start, end).reshape(taken, len(puzzle.tests))
            yield _Tested(puzzle, at, truths, int(self.task.variants.counts[self.task.tested[place[start]]]))

    @property
    def scorable(self) -> bool:
        """Whether any test has a known output."""
        return any(puzzle.known for puzzle in self.tested)

    def update(self, rows: np.ndarray, batch: Batch, answers: Answers) -> None:
        """Record the answers to the test rows numbered `rows`."""
        super().update(rows, batch, answers)
        cells, heights, widths = self.task.restore_grids(rows, answers.tokens.cpu().numpy())
        votes = np.empty(len(rows), np.uint64)
        for k, (height, width) in enumerate(zip(heights, widths)):
            grid = cells[k, :height, :width]
            votes[k] = vote.hash_grid(grid)
            if self.grids is not None:
                self.grids.setdefault(int(votes[k]), grid.copy())
        self._write(rows, votes=votes)

    def collected(self) -> dict[str, Any]:
        """Return everything recorded so far, to be sent to another process."""
        return {**super().collected(), "grids": self.grids}

    def merge(self, collected: dict[str, Any]) -> None:
        """Add what the scorer of another process has recorded in the same evaluation."""
        super().merge(collected)
        if self.grids is not None:
            self.grids |= collected["grids"]

    def result(self, pool: Sequence[Self] = ()) -> dict[str, Any]:
        """Compute row metrics, pass@k by vote, pass@k of independent answers, and their errors.

        Args:
            pool: scorers of other checkpoints over the same rows, whose votes are counted too. Row metrics are left
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
        scored = [puzzle for puzzle in self.tested if puzzle.known]
        tests = {p.puzzle.name: [_count_votes(p, t, sources) for t in p.known] for p in scored}
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

    def headline(self, result: dict[str, Any]) -> list[str]:
        """Add pass@k where there are as many votes as attempts, and up to the two attempts that ARC Prize allows."""
        votes = max(test["votes"] for tests in result["per_task"].values() for test in tests)
        return super().headline(result) + [f"pass@{k}" for k in vote.PASS_AT if k <= max(2, votes)]

    def _standard_errors(self, scored: list[_Tested], sources: Sequence[ArcScorer]) -> dict[str, float] | None:
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
            [_vote_variances(p, sources) if u > 0 else np.zeros(len(vote.PASS_AT)) for p, u in zip(scored, unseen)]
        )
        for k, spread in zip(vote.PASS_AT, spreads.T):
            errors[f"pass@{k}"] = float(np.sqrt(np.sum(unseen * spread)) / len(scored))
        return errors

    def answered(self, best: int = 2) -> list[Answered]:
        """Return every test of every puzzle with up to `best` candidates, best first; needs `keep_grids`.

        A vote for an empty grid counts among the votes but is no candidate.
        """
        assert self.grids is not None
        self.require_complete()
        found = []
        for tested in self.tested:
            for k, (pair, at) in enumerate(zip(tested.puzzle.tests, tested.at.T)):
                order, counts = vote.rank_candidates(self.columns["votes"][at], self.columns["confidence"][at])
                ranked = [VotedAnswer(self.grids[int(d)], int(count), len(at)) for d, count in zip(order, counts)]
                candidates = [candidate for candidate in ranked if candidate.grid.size][:best]
                found.append(Answered(tested.puzzle.name, k, pair.input, pair.output, candidates))
        return found


def _votes_on(puzzle: _Tested, test: int, sources: Sequence[ArcScorer]) -> tuple[np.uint64, np.ndarray, np.ndarray]:
    """Return the true digest of one test, and the digests and confidences of all votes on it."""
    at, truth = puzzle.at[:, test], puzzle.truths[test]
    assert truth is not None
    votes = np.concatenate([source.columns["votes"][at] for source in sources])
    return truth, votes, np.concatenate([source.columns["confidence"][at] for source in sources])


def _count_votes(puzzle: _Tested, test: int, sources: Sequence[ArcScorer]) -> dict[str, Any]:
    """Describe how the votes on one test went: the truth's rank among the candidates is all that pass@k needs."""
    truth, votes, confidence = _votes_on(puzzle, test, sources)
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


def _vote_variances(puzzle: _Tested, sources: Sequence[ArcScorer]) -> np.ndarray:
    """Estimate the variance of a puzzle's pass@k over the choice of variants by resampling them: [len(PASS_AT)]."""
    taken = len(puzzle.at)
    chosen = np.random.default_rng(0).integers(0, taken, (_ROUNDS, taken))
    chosen_of_all = np.concatenate([chosen + taken * s for s in range(len(sources))], 1)
    ranks = []
    for test in puzzle.known:
        ranks.append(vote.resampled_ranks(*_votes_on(puzzle, test, sources), chosen_of_all))
    hits = np.stack(ranks)[None] <= np.array(vote.PASS_AT)[:, None, None]  # [k, tests, rounds]
    return hits.mean(1).var(-1) * taken / (taken - 1)
