"""The exhaustive search: units of candidates pruned, compared exactly, spread over processes, kept on disk."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jpmhc.generators import symmetric_group, young
from jpmhc.generators.block_pruning import BlockPruner
from jpmhc.generators.exact_radius import ExactSpectrum
from jpmhc.generators.generator_candidates import Question, candidates
from jpmhc.generators.walk_spectrum import float_radius

# Exact radii nearer than this are ties (they are right to 1e-14), and a gap below it is zero.
TIE = 1e-9
# Sets looked at together: few at first, when nothing can be pruned yet, then as many as the cache holds.
FIRST_BATCH, BATCH = 64, 16384
# Below this many classes starting processes takes longer than the search.
PARALLEL_CLASSES = 1_500_000

Unit = tuple[int, int]


@dataclass
class SearchState:
    """What a search has done: counts, and every set within a tie of the best radius |λ₂| found.

    Args:
        question: What is searched for.
        done: Units of the enumeration that are finished.
        examined: Classes looked at.
        covered: Sets in those classes.
        pruned: Classes dropped by each representation.
        sets: Radius and ranks of each set kept.
        seconds: Time spent.
        path: Where the state is kept, if anywhere.
    """

    question: Question
    done: set[Unit] = field(default_factory=set)
    examined: int = 0
    covered: int = 0
    pruned: dict[young.Partition, int] = field(default_factory=dict)
    sets: list[tuple[float, list[int]]] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None

    @property
    def radius(self) -> float:
        """The smallest |λ₂| found; just below 1 at first, so that a set with no gap is never kept."""
        return min((radius for radius, _ in self.sets), default=1.0 - 2 * TIE)

    def add(self, found: "UnitResult") -> None:
        """Take in a finished unit."""
        self.done.add(found.unit)
        self.examined += found.examined
        self.covered += found.covered
        for shape, count in found.pruned.items():
            self.pruned[shape] = self.pruned.get(shape, 0) + count
        self.sets += found.sets
        best = self.radius
        self.sets = [entry for entry in self.sets if entry[0] <= best + TIE]

    @classmethod
    def open(cls, question: Question, path: Path | None) -> "SearchState":
        """The state kept at a path, or a new one that will be kept there."""
        if path is None or not path.exists():
            return cls(question, path=path)
        try:
            kept = json.loads(path.read_text())
            state = cls(
                Question(**kept["question"]),
                {(m, p) for m, p in kept["done"]},
                kept["examined"],
                kept["covered"],
                {tuple(shape): count for shape, count in kept["pruned"]},
                [(radius, ranks) for radius, ranks in kept["sets"]],
                kept["seconds"],
                path,
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not the state of a search; remove it or name another file.") from error
        if state.question != question:
            raise ValueError(f"{path} is the state of another search, {state.question}; name another file.")
        return state

    def save(self) -> None:
        """Write the state where it is kept, whole or not at all."""
        if self.path is None:
            return
        kept = {
            "question": asdict(self.question),
            "done": sorted(self.done),
            "examined": self.examined,
            "covered": self.covered,
            "pruned": [[shape, count] for shape, count in self.pruned.items()],
            "sets": self.sets,
            "seconds": self.seconds,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(kept))
        os.replace(partial, self.path)


@dataclass
class UnitResult:
    """What one unit of the enumeration gave; see `SearchState`."""

    unit: Unit
    examined: int = 0
    covered: int = 0
    pruned: dict[young.Partition, int] = field(default_factory=dict)
    sets: list[tuple[float, list[int]]] = field(default_factory=list)


class Searcher:
    """Looks through units; holds the tables of one process, and shares the best radius with the others.

    Args:
        question: What is searched for.
        radius: The smallest |λ₂| found by any process, a shared double.
        examined: Classes looked at by all processes, a shared integer.
        after_batch: Called after every batch of sets.
    """

    def __init__(self, question: Question, radius: Any, examined: Any, after_batch: Callable[[], None] = lambda: None):
        self.question, self.radius, self.examined, self.after_batch = question, radius, examined, after_batch
        self.candidates = candidates(question)
        self.pruner = BlockPruner(question.n, question.size)
        self.shapes = young.nontrivial(question.n)
        self.group = symmetric_group.elements(question.n)
        self.batch = FIRST_BATCH

    def run(self, unit: Unit) -> UnitResult:
        """Look at every class of a unit."""
        result = UnitResult(unit)
        for sets, class_sizes in self.candidates.representatives(unit):
            result.covered += int(class_sizes.sum())
            for batch in self._batches(sets):
                result.examined += len(batch)
                self._compare(self.pruner.survivors(batch, self.radius.value + TIE, result.pruned), result)
                with self.examined.get_lock():
                    self.examined.value += len(batch)
                self.after_batch()
        return result

    def _batches(self, sets: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        start = 0
        while start < len(sets):
            yield sets[start : start + self.batch]
            start += self.batch
            self.batch = min(2 * self.batch, BATCH)

    def _compare(self, sets: NDArray[np.int64], result: UnitResult) -> None:
        """Find the exact |λ₂| of sets that could not be pruned, the most promising first, and keep the best."""
        if not len(sets):
            return
        # One column for each representation; floating point decides only the order in which exact values are found.
        rough = np.stack(
            [[float_radius(block) for block in self.pruner.blocks(shape, sets)] for shape in self.shapes], axis=1
        )
        for row in np.argsort(rough.max(axis=1), kind="stable"):
            exact = self._exact(self.group[sets[row]], np.argsort(-rough[row], kind="stable"))
            if exact is not None:
                with self.radius.get_lock():
                    self.radius.value = min(self.radius.value, exact)
                result.sets.append((exact, sets[row].tolist()))
        best = self.radius.value
        result.sets = [entry for entry in result.sets if entry[0] <= best + TIE]

    def _exact(self, perms: NDArray[np.int64], order: NDArray[np.int64]) -> float | None:
        """The exact |λ₂| of a set, or None once some representation shows it to be larger than the best."""
        spectrum, worst = ExactSpectrum(perms), 0.0
        for k in order:
            worst = max(worst, spectrum.radius(self.shapes[k]))
            if worst > self.radius.value + TIE:
                return None
        return worst


def search(
    question: Question,
    classes: int,
    workers: int,
    state: SearchState,
    progress: Callable[[int, int, float], None],
) -> SearchState:
    """Finish a search from its state, and check that it looked at every class and covered every set."""
    start, before = time.perf_counter(), state.seconds
    units = [unit for unit in candidates(question).units() if unit not in state.done]
    context = multiprocessing.get_context("spawn")
    radius, examined = context.Value("d", state.radius), context.Value("q", state.examined)

    def absorb(found: UnitResult) -> None:
        state.add(found)
        state.seconds = before + time.perf_counter() - start
        state.save()

    def report() -> None:
        progress(examined.value, classes, 1 - radius.value)

    if workers == 1 or classes - state.examined < PARALLEL_CLASSES:
        searcher = Searcher(question, radius, examined, report)
        for unit in units:
            absorb(searcher.run(unit))
    else:
        with context.Pool(workers, _start_worker, (question, radius, examined)) as pool:
            for found in _as_finished(pool, units, report):
                absorb(found)
    state.seconds = before + time.perf_counter() - start
    if (state.examined, state.covered) != (classes, subsets := candidates(question).subsets()):
        raise ArithmeticError(
            f"looked at {state.examined} classes with {state.covered} sets, where Burnside's lemma counts {classes} "
            f"and there are {subsets} sets"
        )
    return state


def _as_finished(pool: Pool, units: list[Unit], waiting: Callable[[], None]) -> Iterator[UnitResult]:
    """Results of units as they come, calling `waiting` twice a second in between."""
    results = pool.imap_unordered(_run_unit, units)
    for _ in units:
        while True:
            try:
                found = results.next(timeout=0.5)
                break
            except multiprocessing.TimeoutError:
                waiting()
        yield found


_searcher: Searcher | None = None  # of a worker process


def _start_worker(question: Question, radius: Any, examined: Any) -> None:
    global _searcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    _searcher = Searcher(question, radius, examined, _leave_if_orphaned)


def _leave_if_orphaned() -> None:
    """End a worker whose parent was killed, which would otherwise work on to the end of its unit for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit()


def _run_unit(unit: Unit) -> UnitResult:
    assert _searcher is not None
    return _searcher.run(unit)
