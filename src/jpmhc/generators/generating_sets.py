"""Sets of permutations with the largest spectral gap: all up to symmetry, or a local search where that is too long.

The exhaustive search replaces Algorithm spectral-gap-search: it looks at one set of each class of equivalent ones and
drops it on the first representation that proves it worse than the best set so far. What is left, ties included, is
compared through exact characteristic polynomials. See docs/derivations/generating_sets.md.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jpmhc import checks
from jpmhc.generators import symmetric_group
from jpmhc.generators.generator_candidates import Question, candidates
from jpmhc.generators.generator_search import TIE, SearchState, search
from jpmhc.generators.local_search import local_search
from jpmhc.generators.walk_spectrum import gap_bound, spectral_gap, stream_gap

# Classes one core looks at in a second (n = 6, K = 4); says what a search will cost, and decides nothing but `auto`.
CLASSES_PER_SECOND = 400_000
# `auto` searches exhaustively up to this many classes, about half an hour on two cores.
AUTO_CLASSES = 1_000_000_000
# Largest n whose symmetries fit in memory as a table.
EXHAUSTIVE_DEGREE = 7
# Sets a local search looks at: at n = 6, K = 4 it needs 350,000 on average to find the best.
MOVES = 500_000

Method = Literal["auto", "exhaustive", "local"]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Plan:
    """What a search will do, known before it starts.

    Args:
        question: What is searched for.
        exhaustive: Whether all classes are looked at; otherwise the search is local.
        classes: Classes of equivalent sets, by Burnside's lemma; None where they were not counted (n = 8).
        subsets: Sets in all classes together.
        work: Steps of progress: classes, or the sets a local search looks at.
    """

    question: Question
    exhaustive: bool
    classes: int | None
    subsets: int | None
    work: int

    def seconds(self, workers: int) -> int | None:
        """About how long an exhaustive search takes (an integer, as it may exceed any float); None for a local one."""
        return self.work // (CLASSES_PER_SECOND * workers) if self.exhaustive else None


@dataclass(frozen=True)
class GeneratingSet:
    """The outcome of a search.

    Args:
        question: What was searched for.
        perms: The best set, [K, n], usable as the permutation mixer's basis; among ties the one with the largest gap
            on the streams.
        gap: Its spectral gap on S_n; 0 where every set that generates S_n holds odd permutations only.
        stream_gap: Its gap on the n streams.
        ties: Every set with that gap, one of each class, [T, K, n]; a local search lists only its own.
        bound: No set of this size has a larger gap, whatever the search found.
        exhaustive: Whether every class was looked at, so that no set is better.
        examined: Classes looked at, or sets in a local search.
        classes: Classes there are by Burnside's lemma, None if not counted.
        covered: Sets in the classes looked at, which must be all sets there are.
        subsets: Sets there are, None if not counted.
        pruned: Classes dropped by each representation, by its partition; the rest were compared exactly.
        seconds: Wall-clock time, of all runs together where a search was resumed.
    """

    question: Question
    perms: Tensor
    gap: float
    stream_gap: float
    ties: Tensor
    bound: float
    exhaustive: bool
    examined: int
    classes: int | None
    covered: int
    subsets: int | None
    seconds: float
    pruned: dict[tuple[int, ...], int] = field(default_factory=dict)


def plan(question: Question, method: Method = "auto", moves: int | None = None) -> Plan:
    """Decide how a question will be answered, and count what there is to look at."""
    if method not in ("auto", "exhaustive", "local"):
        raise ValueError(f"the method must be auto, exhaustive or local, not {method!r}.")
    checks.at_least_one(moves, "the number of moves")
    sets = MOVES if moves is None else moves
    if question.n > EXHAUSTIVE_DEGREE:
        if method == "exhaustive":
            raise ValueError(
                f"an exhaustive search is possible for n ≤ {EXHAUSTIVE_DEGREE}, not {question.n}; use local."
            )
        return Plan(question, False, None, None, sets)
    classes, subsets = candidates(question).count(), candidates(question).subsets()
    exhaustive = method == "exhaustive" or (method == "auto" and classes <= AUTO_CLASSES)
    if exhaustive and moves is not None:
        raise ValueError("this search looks at every class and makes no moves; leave them away, or use method local.")
    return Plan(question, exhaustive, classes, subsets, classes if exhaustive else sets)


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
    """The set of `size` permutations of n streams with the largest spectral gap.

    Args:
        n: Number of streams, 2 to 8.
        size: Number of permutations, K.
        contains_identity: Only sets that hold the identity.
        reversible: Only sets closed under inverses.
        method: "exhaustive" (n ≤ 7) proves its answer, "local" does not; "auto" is exhaustive up to 10⁹ classes.
        workers: Processes of an exhaustive search; every core if None. Short searches use one.
        state: File in which an exhaustive search keeps what it has done, and from which it goes on.
        moves: Sets that a local search looks at, 500,000 by default.
        seed: Of a local search, 0 by default.
        progress: Called now and then with the work done, all the work, and the best gap so far.

    Raises:
        ValueError: If no such set generates all permutations (one permutation alone, or one and the identity), or
            a local search found none.
    """
    return carry_out(
        plan(Question(n, size, contains_identity, reversible), method, moves),
        workers=workers,
        state=state,
        seed=seed,
        progress=progress,
    )


def carry_out(
    plan: Plan,
    *,
    workers: int | None = None,
    state: Path | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> GeneratingSet:
    """Do what was planned; the arguments are those of `best_generating_set`."""
    checks.at_least_one(workers, "the number of workers")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"the seed must be a whole number and not negative, got {seed!r}.")
    question, start = plan.question, time.perf_counter()
    notify = progress or (lambda done, total, gap: None)
    if plan.exhaustive:
        if seed is not None:
            raise ValueError("this search looks at every class and draws nothing; leave the seed away, or use local.")
        found = search(question, plan.work, workers or available_cores(), SearchState.open(question, state), notify)
        seconds = found.seconds
    else:
        if state is not None or workers is not None:
            raise ValueError("a local search is one process and keeps no state; leave workers and state away.")
        ranks, radius = local_search(
            question, plan.work, seed or 0, lambda done, radius: notify(done, plan.work, 1 - radius)
        )
        found = SearchState(question, examined=plan.work, sets=[(radius, ranks)] if radius < 1 - TIE else [])
        seconds = time.perf_counter() - start
    kept = [ranks for _, ranks in sorted(found.sets)] or _generating(plan)
    ties = np.array(kept, dtype=np.int64)
    group = symmetric_group.elements(question.n)
    perms, on_streams = _fastest_on_streams(question, ties)
    return GeneratingSet(
        question=question,
        perms=torch.from_numpy(perms),
        gap=spectral_gap(perms),
        stream_gap=on_streams,
        ties=torch.from_numpy(group[ties]),
        bound=gap_bound(question.n, question.size, question.reversible),
        exhaustive=plan.exhaustive,
        examined=found.examined,
        classes=plan.classes,
        covered=found.covered,
        subsets=plan.subsets,
        seconds=seconds,
        pruned=found.pruned,
    )


def _generating(plan: Plan) -> list[list[int]]:
    """Where no set has a gap: those that generate S_n all the same, one of each class, as ranks.

    Only few and small sets come to that, such as the one transposition of two streams.
    """
    question, group = plan.question, symmetric_group.elements(plan.question.n)
    if plan.exhaustive:
        sets = (s for unit in candidates(question).units() for s, _ in candidates(question).representatives(unit))
        found = [ranks.tolist() for batch in sets for ranks in batch if symmetric_group.generates(group[ranks])]
        if found:
            return found
    what = f"set of {question.size} permutation{'s' if question.size > 1 else ''} of {question.n} streams"
    if plan.exhaustive:
        raise ValueError(f"no such {what} generates all {len(group)} permutations; ask for a larger size.")
    raise ValueError(
        f"none of the {plan.work:,} moves led to a {what} that mixes; ask for more of them or a larger size."
    )


def _fastest_on_streams(question: Question, ties: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Of sets with the same gap on S_n the one with the largest gap on the streams."""
    if question.n == 6:
        # The outer automorphism keeps the group's gap and changes the streams'.
        ties = np.concatenate([ties, symmetric_group.outer_automorphism()[ties]])
    group = symmetric_group.elements(question.n)
    sets = np.sort(ties, axis=1)
    average = np.eye(question.n)[group[sets]].mean(axis=1)  # [T, n, n]
    second = np.sort(np.abs(np.linalg.eigvals(average)), axis=1)[:, -2]
    # Rounded, so that the choice among equals falls to the order of the sets and not to rounding errors.
    best = np.lexsort((*sets.T[::-1], np.round(second, 6)))[0]
    return group[sets[best]], stream_gap(group[sets[best]])


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
