"""The exhaustive search for the sets of permutations with the smallest |λ₂| (defined in `jpmhc.paper.generators`).

Of each class of equivalent sets, one set is proven worse than the best or compared exactly.

A unit is a part of the enumeration (`SubsetOrbits.units`). A `SearchRecord` contains the results so far. The record may
be saved in a file, from which an interrupted search continues.
"""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.pool import Pool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jpmhc.files import write_file
from jpmhc.paper.generators import representations, symmetric_group
from jpmhc.paper.generators.exact_radius import ExactSpectrum
from jpmhc.paper.generators.pruning import BlockPruner
from jpmhc.paper.generators.question import Question, find_classes
from jpmhc.paper.generators.random_walk import float_radius

# The sizes of the first and of the largest batch of sets: small at first, when nothing can be pruned yet.
FIRST_BATCH, BATCH = 64, 16384
# Searches of fewer classes run in one process, because starting more would take longer than the search.
PARALLEL_CLASSES = 1_500_000
# Exact radii that differ by less than this are ties (they are right to 1e-14), and a gap below this is zero.
TIE = 1e-9

Unit = tuple[int, int]
_COUNTS = ("examined", "covered", "seconds")  # fields of a record that its file holds as they are


@dataclass
class SearchRecord:
    """The progress of a search, and all best sets so far, one per class."""

    question: Question  # sets that the search is for
    done: set[Unit] = field(default_factory=set)  # finished units of the enumeration, from `SubsetOrbits.units`
    examined: int = 0  # number of classes examined
    covered: int = 0  # number of sets in the examined classes
    # number of classes dropped by each representation
    pruned: dict[representations.Partition, int] = field(default_factory=dict)
    sets: list[tuple[float, list[int]]] = field(default_factory=list)  # radius |λ₂| and ranks of each best set
    seconds: float = 0.0
    path: Path | None = None  # file that stores the record, if any

    @property
    def radius(self) -> float:
        """The smallest |λ₂| of the stored sets.

        Without stored sets the result is just below 1, so that no set with |λ₂| = 1 is ever stored.
        """
        return min((radius for radius, _ in self.sets), default=1.0 - 2 * TIE)

    def add(self, other: "SearchRecord") -> None:
        """Add a record that has the results of other units of the enumeration."""
        self.done |= other.done
        self.examined += other.examined
        self.covered += other.covered
        for shape, count in other.pruned.items():
            self.pruned[shape] = self.pruned.get(shape, 0) + count
        self.sets += other.sets
        self.keep_ties(self.radius)

    def keep_ties(self, radius: float) -> None:
        """Drop the stored sets whose |λ₂| is above `radius`."""
        self.sets = [entry for entry in self.sets if entry[0] <= radius + TIE]

    @classmethod
    def open(cls, question: Question, path: Path | None) -> "SearchRecord":
        """Return the record of `question` from the file `path`, or a new record if there is no such file."""
        if path is None or not path.exists():
            return cls(question, path=path)
        try:
            state = json.loads(path.read_text())
            record = cls(
                Question(**state["question"]),
                done={(m, p) for m, p in state["done"]},
                pruned={tuple(shape): count for shape, count in state["pruned"]},
                sets=[(radius, ranks) for radius, ranks in state["sets"]],
                path=path,
                **{name: state[name] for name in _COUNTS},
            )
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not the state of a search; remove it or name another file.") from error
        if record.question != question:
            raise ValueError(f"{path} is the state of another search, {record.question}; name another file")
        return record

    def save(self) -> None:
        """Write the record to its file, atomically; do nothing if it has no file."""
        if self.path is None:
            return
        state = {
            "question": asdict(self.question),
            "done": sorted(self.done),
            "pruned": list(self.pruned.items()),
            "sets": self.sets,
        }
        write_file(self.path, json.dumps(state | {name: getattr(self, name) for name in _COUNTS}))


class UnitSearcher:
    """A searcher of units (`SubsetOrbits.units`) in one process, which calls `after_batch` after every batch of sets.

    All processes share the smallest |λ₂|, a double, and the number of examined classes, an integer.
    """

    def __init__(
        self,
        question: Question,
        radius: "Synchronized[float]",
        examined: "Synchronized[int]",
        after_batch: Callable[[], None] = lambda: None,
    ):
        self.question, self.radius, self.examined, self.after_batch = question, radius, examined, after_batch
        self.classes = find_classes(question)
        self.pruner = BlockPruner(question.n, question.size)
        self.shapes = representations.nontrivial_partitions(question.n)
        self.group = symmetric_group.elements(question.n)
        self.batch = FIRST_BATCH

    def search_unit(self, unit: Unit) -> SearchRecord:
        """Examine every class of a unit, and return a record of the best sets and the numbers of classes and sets."""
        result = SearchRecord(self.question, done={unit})
        for sets, class_sizes in self.classes.list_sets(unit):
            result.covered += int(class_sizes.sum())
            while len(sets):
                batch, sets = sets[: self.batch], sets[self.batch :]
                self.batch = min(2 * self.batch, BATCH)
                result.examined += len(batch)
                self._keep_best(self.pruner.select_survivors(batch, self.radius.value + TIE, result.pruned), result)
                with self.examined.get_lock():
                    self.examined.value += len(batch)
                self.after_batch()
        return result

    def _keep_best(self, sets: NDArray[np.int64], result: SearchRecord) -> None:
        """Compute the exact |λ₂| of sets that could not be pruned, and add the best sets to the result."""
        if not len(sets):
            return
        # One column per representation. Floating-point values only decide the order of the exact computations.
        rough = np.stack(
            [[float_radius(block) for block in self.pruner.blocks(shape, sets)] for shape in self.shapes], axis=1
        )
        for row in np.argsort(rough.max(axis=1), kind="stable"):
            exact = self._find_radius(self.group[sets[row]], np.argsort(-rough[row], kind="stable"))
            if exact is not None:
                with self.radius.get_lock():
                    self.radius.value = min(self.radius.value, exact)
                result.sets.append((exact, sets[row].tolist()))
        result.keep_ties(self.radius.value)

    def _find_radius(self, perms: NDArray[np.int64], order: NDArray[np.int64]) -> float | None:
        """Return the exact |λ₂| of a set, or None if a representation shows that |λ₂| is above the smallest so far."""
        spectrum, worst = ExactSpectrum(perms), 0.0
        for k in order:
            worst = max(worst, spectrum.radius(self.shapes[k]))
            if worst > self.radius.value + TIE:
                return None
        return worst


def search_exhaustively(
    classes: int, workers: int, record: SearchRecord, progress: Callable[[int, int, float], None]
) -> SearchRecord:
    """Run or finish the search of `record`, and return the record after checking that no class or set was left out.

    The record is updated and saved after every unit of the enumeration. `progress` is called now and then with the
    number of examined classes, the number `classes` of all classes, and the best gap so far.
    """
    question, start, before = record.question, time.perf_counter(), record.seconds
    units = [unit for unit in find_classes(question).units() if unit not in record.done]
    context = multiprocessing.get_context("spawn")
    radius, examined = context.Value("d", record.radius), context.Value("q", record.examined)

    def add_unit(unit_record: SearchRecord) -> None:
        record.add(unit_record)
        record.seconds = before + time.perf_counter() - start
        record.save()

    def report() -> None:
        progress(examined.value, classes, 1 - radius.value)

    if workers == 1 or classes - record.examined < PARALLEL_CLASSES:
        searcher = UnitSearcher(question, radius, examined, report)
        for unit in units:
            add_unit(searcher.search_unit(unit))
    else:
        with context.Pool(workers, _start_worker, (question, radius, examined)) as pool:
            for unit_record in _collect_results(pool, units, report):
                add_unit(unit_record)
    record.seconds = before + time.perf_counter() - start
    if (record.examined, record.covered) != (classes, subsets := find_classes(question).count_subsets()):
        raise ArithmeticError(
            f"the search examined {record.examined} classes with {record.covered} sets, but there are {classes} "
            f"classes by Burnside's lemma, and {subsets} sets"
        )
    return record


def _collect_results(pool: Pool, units: list[Unit], waiting: Callable[[], None]) -> Iterator[SearchRecord]:
    """Yield the units' records as soon as they are finished; in between, call `waiting` every half second."""
    results = pool.imap_unordered(_search_unit, units)
    while True:
        try:
            yield results.next(timeout=0.5)
        except multiprocessing.TimeoutError:
            waiting()
        except StopIteration:
            return


_searcher: UnitSearcher | None = None  # the searcher of a worker process


def _start_worker(question: Question, radius: "Synchronized[float]", examined: "Synchronized[int]") -> None:
    global _searcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    _searcher = UnitSearcher(question, radius, examined, _exit_if_orphaned)


def _exit_if_orphaned() -> None:
    """End this worker process if its parent process was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        sys.exit()


def _search_unit(unit: Unit) -> SearchRecord:
    assert _searcher is not None
    return _searcher.search_unit(unit)
