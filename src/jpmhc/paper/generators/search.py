"""Find the sets of permutations with the largest spectral gap, by an exhaustive or a local search.

The exhaustive search replaces alg. spectral-gap-search. It examines one set of each class of equivalent sets, and drops
the set as soon as one representation proves that it is worse than the best set so far. The remaining sets, including
ties, are compared by exact characteristic polynomials. See docs/derivations/generating_sets.md.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jpmhc import checks
from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.exhaustive_search import TIE, SearchRecord, search_exhaustively
from jpmhc.paper.generators.local_search import search_locally
from jpmhc.paper.generators.question import Question, find_classes
from jpmhc.paper.generators.random_walk import gap_bound, spectral_gap, stream_gap

# The number of classes that one core examines per second (n = 6, K = 4), to estimate the time of a search.
CLASSES_PER_SECOND = 400_000
# `auto` searches exhaustively up to this many classes, about half an hour on two cores.
AUTO_CLASSES = 1_000_000_000
# The largest n whose table of symmetries fits into memory.
EXHAUSTIVE_DEGREE = 7
# The number of sets that a local search examines; for n = 6, K = 4 it needs 350,000 on average to find the best.
MOVES = 500_000

Method = Literal["auto", "exhaustive", "local"]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Search:
    """A search that is ready to run, with the amount of work that it needs."""

    question: Question  # sets that the search is for
    exhaustive: bool  # whether all classes are examined, so that no set is better; otherwise the search is local
    classes: int | None  # number of classes of equivalent sets, by Burnside's lemma; None if not counted (n = 8)
    subsets: int | None  # number of sets in all classes together; None if not counted
    work: int  # number of classes to examine, or of sets that a local search examines
    workers: int  # number of processes of an exhaustive search
    state: Path | None  # file in which an exhaustive search stores its record, if any
    seed: int

    def estimate_seconds(self) -> int | None:
        """Estimate the seconds of an exhaustive search, as an integer of any size; return None for a local search."""
        return self.work // (CLASSES_PER_SECOND * self.workers) if self.exhaustive else None


@dataclass(frozen=True, kw_only=True)
class GeneratingSet(Search):
    """A finished search with its answer, the best set that was found, and with statistics."""

    # the best set, which can be the basis of the permutation mixer; among ties, the set with the largest gap on the
    # streams. [K, n]
    perms: Tensor
    gap: float  # the set's spectral gap on S_n; 0 if every set that generates S_n contains only odd permutations
    stream_gap: float  # the set's gap on the n streams
    ties: Tensor  # all sets with this gap, one of each class; for a local search only the best set. [T, K, n]
    bound: float  # proven upper bound on the gap of sets of this size
    examined: int  # number of examined classes, or of examined sets in a local search
    covered: int  # number of sets in the examined classes, which equals `subsets` after an exhaustive search
    # {a representation's partition: the number of classes that it dropped}; all others were compared exactly
    pruned: dict[tuple[int, ...], int]
    seconds: float  # wall-clock time, of all runs together for a resumed search


def prepare_search(
    question: Question,
    method: Method = "auto",
    *,
    workers: int | None = None,
    state: Path | None = None,
    moves: int | None = None,
    seed: int | None = None,
) -> Search:
    """Return the exhaustive or the local search for a question, with the numbers of classes and sets.

    The arguments are as in `best_generating_set`.
    """
    if method not in ("auto", "exhaustive", "local"):
        raise ValueError(f"the method must be auto, exhaustive or local, not {method!r}")
    checks.optional_whole_number(moves, "the number of moves")
    checks.optional_whole_number(workers, "the number of workers")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"the seed must be a whole number and not negative, got {seed!r}")
    possible = question.n <= EXHAUSTIVE_DEGREE
    if method == "exhaustive" and not possible:
        raise ValueError(f"an exhaustive search is possible for n ≤ {EXHAUSTIVE_DEGREE}, not {question.n}; use local")
    classes = find_classes(question).count_orbits() if possible else None
    subsets = find_classes(question).count_subsets() if possible else None
    exhaustive = classes is not None and (method == "exhaustive" or (method == "auto" and classes <= AUTO_CLASSES))
    if exhaustive and (moves is not None or seed is not None):
        raise ValueError(
            "this search is exhaustive, without moves or a seed: leave out moves and seed, or use the method local"
        )
    if not exhaustive and (state is not None or workers is not None):
        raise ValueError("a local search runs in one process and stores no state: leave out workers and state")
    work = classes if exhaustive and classes is not None else moves or MOVES
    return Search(question, exhaustive, classes, subsets, work, workers or available_cores(), state, seed or 0)


def best_generating_set(
    n: int,
    size: int,
    *,
    contains_identity: bool = False,
    reversible: bool = False,
    method: Method = "auto",
    workers: int | None = None,
    state: Path | None = None,
    moves: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> GeneratingSet:
    """Find the set of `size` permutations of n streams with the largest spectral gap.

    Args:
        n: The number of streams, 2 to 8.
        size: The number of permutations, K.
        contains_identity: Whether the set must contain the identity, as for a mixer that starts as the plain residual.
        reversible: Whether the set must be closed under inverses.
        method: "exhaustive" (n ≤ 7) proves its answer, "local" does not; "auto" is exhaustive up to 10⁹ classes.
        workers: The number of processes of an exhaustive search; one per core if None. Short searches use one.
        state: A file in which an exhaustive search stores its progress, and from which it continues.
        moves: The number of sets that a local search examines, 500,000 by default.
        seed: The seed of a local search, 0 by default.
        progress: A function that is called now and then with the numbers of classes (sets, if local) examined and to
            examine, and the best gap so far.

    Raises:
        ValueError: If no such set generates all permutations (one permutation alone, or one and the identity), or
            a local search found none.

    >>> result = best_generating_set(4, 3)
    >>> result.exhaustive, round(result.gap, 3)
    (True, 0.667)
    """
    question = Question(n, size, contains_identity, reversible)
    return run_search(prepare_search(question, method, workers=workers, state=state, moves=moves, seed=seed), progress)


def run_search(search: Search, progress: Progress | None = None) -> GeneratingSet:
    """Run a search that `prepare_search` returned, and return its answer.

    `progress` is as in `best_generating_set`.
    """
    notify = progress or (lambda done, total, gap: None)
    question, group = search.question, symmetric_group.elements(search.question.n)
    if search.exhaustive:
        record = search_exhaustively(search.work, search.workers, SearchRecord.open(question, search.state), notify)
    else:
        record = _search_locally(search, notify)
    ties = np.array([ranks for _, ranks in sorted(record.sets)] or _find_generating_sets(search), dtype=np.int64)
    perms, on_streams = _select_fastest_on_streams(question, ties)
    return GeneratingSet(
        **vars(search),
        perms=torch.from_numpy(perms),
        gap=spectral_gap(perms),
        stream_gap=on_streams,
        ties=torch.from_numpy(group[ties]),
        bound=gap_bound(question.n, question.size, question.reversible),
        examined=record.examined,
        covered=record.covered,
        pruned=record.pruned,
        seconds=record.seconds,
    )


def _search_locally(search: Search, notify: Progress) -> SearchRecord:
    start = time.perf_counter()
    ranks, radius = search_locally(
        search.question, search.work, search.seed, lambda done, radius: notify(done, search.work, 1 - radius)
    )
    sets = [(radius, ranks)] if radius < 1 - TIE else []
    return SearchRecord(search.question, examined=search.work, sets=sets, seconds=time.perf_counter() - start)


def _find_generating_sets(search: Search) -> list[list[int]]:
    """Return sets that generate S_n, one of each class, as ranks, for a question whose sets all have a gap of zero.

    There are only a few such questions, with small sets, such as the single transposition of two streams.
    """
    question, group = search.question, symmetric_group.elements(search.question.n)
    if search.exhaustive:
        classes = find_classes(question)
        sets = (batch for unit in classes.units() for batch, _ in classes.list_sets(unit))
        generating = [ranks.tolist() for batch in sets for ranks in batch if symmetric_group.generates(group[ranks])]
        if generating:
            return generating
    kind = f"set of {question.size} permutation{'s' if question.size > 1 else ''} of {question.n} streams"
    if search.exhaustive:
        raise ValueError(f"no such {kind} generates all {len(group)} permutations; ask for a larger size")
    raise ValueError(
        f"none of the {search.work:,} moves led to a {kind} that mixes; ask for more moves or a larger size"
    )


def _select_fastest_on_streams(question: Question, ties: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Return the set with the largest gap on the streams, among sets with equal gaps on S_n, and its stream gap."""
    if question.n == 6:
        # The outer automorphism keeps the gap on S_n and changes the gap on the streams.
        ties = np.concatenate([ties, symmetric_group.outer_automorphism()[ties]])
    group = symmetric_group.elements(question.n)
    sets = np.sort(ties, axis=1)
    average = np.eye(question.n)[group[sets]].mean(axis=1)  # [T, n, n]
    second = np.sort(np.abs(np.linalg.eigvals(average)), axis=1)[:, -2]
    # The gaps are rounded, so that the order of the sets, and not rounding errors, decides between equal gaps.
    best = np.lexsort((*sets.T[::-1], np.round(second, 6)))[0]
    return group[sets[best]], stream_gap(group[sets[best]])


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
