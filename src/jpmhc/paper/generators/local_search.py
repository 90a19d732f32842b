"""The local search: improve random sets of permutations by exchanges, when there are too many sets to examine all."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.pruning import BlockPruner, select_by_traces
from jpmhc.paper.generators.question import Question

# The sizes of the first and of the largest batch of neighbours: small first, because often many changes are better.
FIRST_BATCH, BATCH = 32, 4096
# The number of changes of a set that are tried, in random order, before the set counts as a local optimum.
NEIGHBOURS = 6000
# A set replaces another only if its |λ₂| is smaller by more than rounding.
ROUNDING = 1e-9
SQUARINGS = 6  # powers up to 2⁷ = 128 are traced


def search_locally(
    question: Question, moves: int, seed: int, progress: Callable[[int, float], None]
) -> tuple[list[int], float]:
    """Find a set with a small |λ₂| by descents from random sets; return its ranks in ascending order, and its |λ₂|.

    Each step of a descent exchanges one atom (an element, or an element and its inverse) for another. The exchanges are
    tried in batches; the step takes the set with the smallest |λ₂| in the first batch that lowers |λ₂|. When no tried
    exchange lowers |λ₂|, a new descent starts from another random set. The search ends after `moves` examined sets; if
    none has a gap, it returns an arbitrary set and 1. `progress` is called with the number of examined sets and the
    smallest |λ₂| so far.
    """
    neighbourhood, radii = (
        _Neighbourhood(question, np.random.default_rng(seed)),
        _RadiusTable(question.n, question.size),
    )
    best, smallest, looked = neighbourhood.draw_sets(1)[0], 1.0, 0

    def find_better(batches: Iterator[NDArray[np.int64]], radius: float) -> tuple[NDArray[np.int64], float] | None:
        """Return the set with the smallest |λ₂| in the first batch with a set below `radius`, and its |λ₂|."""
        nonlocal looked
        for sets in batches:
            if looked >= moves:
                break
            sets = sets[: moves - looked]
            looked += len(sets)
            better = radii.find_smallest(sets, radius - ROUNDING)
            progress(looked, min(smallest, radius) if better is None else min(smallest, better[1]))
            if better is not None:
                return better
        return None

    while looked < moves:
        better = find_better(iter([neighbourhood.draw_sets(FIRST_BATCH)]), 1.0)
        while better is not None:
            ranks, radius = better
            if radius < smallest:
                best, smallest = ranks, radius
            better = find_better(neighbourhood.list_neighbours(ranks), radius)
    return np.sort(best).tolist(), smallest


class _RadiusTable(BlockPruner):
    """A finder of the set with the smallest |λ₂| among many sets, which uses the cheapest representation first."""

    def find_smallest(self, sets: NDArray[np.int64], limit: float) -> tuple[NDArray[np.int64], float] | None:
        """Return the set with the smallest |λ₂| and this |λ₂|, or None if all are above the limit."""
        radii = np.abs(1 - 2 * self.odd[sets].mean(axis=1))
        alive = np.flatnonzero(radii <= limit)
        for shape in self.shapes:
            if not len(alive):
                break
            blocks = self.blocks(shape, sets[alive])
            # Traces exclude most blocks in a tenth of the time of all eigenvalues. Because of rounding they prove
            # nothing, but the result of a local search is verified in the end.
            possible = select_by_traces(blocks, limit, SQUARINGS, relative=ROUNDING)
            alive = alive[possible]
            largest = np.abs(np.linalg.eigvals(blocks[possible])).max(axis=1, initial=0.0)
            radii[alive] = np.maximum(radii[alive], largest)
            alive = alive[radii[alive] <= limit]
        if not len(alive):
            return None
        best = alive[radii[alive].argmin()]
        return sets[best], float(radii[best])


class _Neighbourhood:
    """A source of random sets that satisfy a question, and of the neighbours of a set. A set is a row of ranks [K].

    A row begins with the identity if the question prescribes it; single elements and then pairs of inverses follow. An
    atom is a single element or such a pair.
    """

    def __init__(self, question: Question, random: np.random.Generator):
        self.question, self.random = question, random
        self.atoms, self.doubled = question.atoms, question.weights == 2
        self.singles, self.doubles = np.flatnonzero(~self.doubled), np.flatnonzero(self.doubled)
        group = symmetric_group.elements(question.n)
        self.partner = symmetric_group.rank(symmetric_group.inverse(group)) if question.reversible else None

    def draw_sets(self, count: int) -> NDArray[np.int64]:
        """Draw random sets. [count, K]"""
        total = self.question.free_size
        # The possible numbers of pairs: enough single elements must exist for the rest of the set.
        choices = [k for k in range(min(len(self.doubles), total // 2) + 1) if total - 2 * k <= len(self.singles)]
        sets = []
        for pairs in self.random.choice(choices, count):
            alone = self.random.choice(self.singles, total - 2 * pairs, replace=False)
            together = self.random.choice(self.doubles, pairs, replace=False)
            sets.append(np.concatenate([self.atoms[alone, 0], self.atoms[together].ravel()]))
        return self._add_identity(np.array(sets, dtype=np.int64).reshape(count, total))

    def list_neighbours(self, ranks: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield the sets that differ from a set by one atom, in random order and in growing batches [b, K].

        When a pair replaces a single element, another random single element leaves the set too. When a single element
        replaces a pair, another random single element joins the set too.
        """
        row, alone = self._arrange_set(ranks)
        atom_starts = np.concatenate([np.arange(alone), np.arange(alone, len(row), 2)])  # the first index of each atom
        total = len(atom_starts) * len(self.atoms)
        order = self.random.permutation(total)[:NEIGHBOURS] if total else np.empty(0, dtype=np.int64)
        start, size = 0, FIRST_BATCH
        while start < len(order):
            chosen = order[start : start + size]
            start, size = start + size, min(2 * size, BATCH)
            sets = self._exchange_atoms(row, alone, atom_starts[chosen // len(self.atoms)], chosen % len(self.atoms))
            ascending = np.sort(sets, axis=1)
            proper = (np.diff(ascending, axis=1) > 0).all(axis=1) & (ascending != np.sort(ranks)).any(axis=1)
            yield sets[proper]

    def _exchange_atoms(
        self, row: NDArray[np.int64], alone: int, position: NDArray[np.int64], atom: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return copies of a set: in copy i, `atom[i]` replaces the atom at `position[i]`, where possible. [b, K]"""
        sets, which = np.repeat(row[None], len(position), axis=0), np.arange(len(position))
        from_pair, to_pair = position >= alone, self.doubled[atom]
        # Two single elements are replaced by a pair: the one at `position` and a random other one, `company`.
        company = (position + self.random.integers(1, max(alone, 2), len(position))) % max(alone, 1)
        possible = from_pair | ~to_pair | (alone >= 2)
        which, position, atom = which[possible], position[possible], atom[possible]
        from_pair, to_pair, company = from_pair[possible], to_pair[possible], company[possible]
        sets[which, position] = self.atoms[atom, 0]
        second = np.where(from_pair, position + 1, company)
        arrives = to_pair | from_pair
        extra = np.where(to_pair, self.atoms[atom, 1], self.atoms[self.random.choice(self.singles, len(atom)), 0])
        sets[which[arrives], second[arrives]] = extra[arrives]
        return self._add_identity(sets)

    def _arrange_set(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Return a set's elements, without a prescribed identity, and the number of single elements among them."""
        free = ranks[ranks != 0] if self.question.contains_identity else ranks
        if self.partner is None:
            return free, len(free)
        single = free[self.partner[free] == free]
        first = free[free < self.partner[free]]
        return np.concatenate([single, np.stack([first, self.partner[first]], axis=1).ravel()]), len(single)

    def _add_identity(self, sets: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.question.contains_identity:
            return sets
        return np.concatenate([np.zeros((len(sets), 1), dtype=np.int64), sets], axis=1)
