"""The local search: improve random sets of permutations one exchange at a time, where there are too many for all."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import representations, symmetric_group
from jpmhc.paper.generators.pruning import BlockPruner
from jpmhc.paper.generators.question import Question

# Sets looked at together: few while most changes improve a set, many when few do.
FIRST_BATCH, BATCH = 32, 4096
# Changes of a set that are tried, in random order, before it counts as a local optimum.
NEIGHBOURS = 6000
# A set replaces another only if its |λ₂| is smaller by more than rounding.
ROUNDING = 1e-9
SQUARINGS = 6  # powers up to 2⁷ = 128 are traced


def search_locally(
    question: Question, moves: int, seed: int, progress: Callable[[int, float], None]
) -> tuple[list[int], float]:
    """Find a set with a small |λ₂|.

    From a random set, exchange one atom (an element, or an element and its inverse) for the one of many that makes
    |λ₂| smallest, until none does; then from another random set.

    Args:
        question: What is searched for.
        moves: Sets to look at.
        seed: Seed of the random choices.
        progress: Called with the sets looked at and the smallest |λ₂| so far.

    Returns:
        The ranks of the set's permutations in ascending order, and its |λ₂|; an arbitrary set and 1 where none with
        a gap was found.
    """
    neighbourhood, radii = _Neighbourhood(question, np.random.default_rng(seed)), _RadiusTable(question)
    best, smallest, looked = neighbourhood.draw_sets(1)[0], 1.0, 0

    def find_better(batches: Iterator[NDArray[np.int64]], radius: float) -> tuple[NDArray[np.int64], float] | None:
        """Return the best set of the first batch with a smaller |λ₂|, or None if there is none."""
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


class _RadiusTable:
    """Finds the set with the smallest |λ₂| among many, cheapest representation first."""

    def __init__(self, question: Question):
        self.pruner = BlockPruner(question.n, question.size)
        _, *self.shapes = representations.nontrivial_partitions(question.n)
        self.sign = 1 - 2 * symmetric_group.is_odd(symmetric_group.elements(question.n)).astype(np.int64)

    def find_smallest(self, sets: NDArray[np.int64], limit: float) -> tuple[NDArray[np.int64], float] | None:
        """Return the set with the smallest |λ₂| and that |λ₂|, or None if it is above the limit."""
        radii = np.abs(self.sign[sets].mean(axis=1))
        alive = np.flatnonzero(radii <= limit)
        for shape in self.shapes:
            if not len(alive):
                return None
            blocks = self.pruner.blocks(shape, sets[alive])
            possible = _select_not_above(blocks, limit)
            alive = alive[possible]
            radii[alive] = np.maximum(
                radii[alive], np.abs(np.linalg.eigvals(blocks[possible])).max(axis=1, initial=0.0)
            )
            alive = alive[radii[alive] <= limit]
        if not len(alive):
            return None
        best = alive[radii[alive].argmin()]
        return sets[best], float(radii[best])


def _select_not_above(blocks: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
    r"""Return the indices of the blocks whose traces of powers allow a spectral radius within the limit.

    $|\mathrm{tr}\,M^k| \le d\,\rho(M)^k$: by k = 128 a real eigenvalue of a few per cent too much is seen, at a tenth
    of the cost of all eigenvalues. Unlike `BlockPruner.select_survivors` this proves nothing, because of rounding, but
    the winner of a local search is verified in the end.
    """
    size, possible = blocks.shape[1], np.arange(len(blocks))
    power, half = blocks / limit, None
    for _ in range(SQUARINGS + 1):
        ok = np.abs(np.einsum("bij,bji->b", power, power)) <= size * (1 + ROUNDING)
        if half is not None:
            # A complex pair may have its phase turned away from one power, rarely from two.
            ok &= np.abs(np.einsum("bij,bji->b", power, half)) <= size * (1 + ROUNDING)
        possible, half = possible[ok], power[ok]
        power = half @ half
    return possible


class _Neighbourhood:
    """Draws random sets that satisfy a question, and lists what one exchange makes of a set, a row of ranks [K].

    In a row the identity comes first where it is prescribed, then elements that stand alone, then pairs of inverses.
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
        # Numbers of pairs that leave as many elements as can stand alone.
        choices = [k for k in range(min(len(self.doubles), total // 2) + 1) if total - 2 * k <= len(self.singles)]
        sets = []
        for pairs in self.random.choice(choices, count):
            alone = self.random.choice(self.singles, total - 2 * pairs, replace=False)
            together = self.random.choice(self.doubles, pairs, replace=False)
            sets.append(np.concatenate([self.atoms[alone, 0], self.atoms[together].ravel()]))
        return self._add_identity(np.array(sets, dtype=np.int64).reshape(count, total))

    def list_neighbours(self, ranks: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield the sets that differ from one by an atom, in random order and in growing batches [b, K].

        Where an element that stands alone is exchanged for a pair, a second one leaves with it, and where a pair is for
        one that stands alone, a second one comes with it, both at random.
        """
        row, alone = self._arrange_set(ranks)
        places = np.concatenate([np.arange(alone), np.arange(alone, len(row), 2)])  # where each atom of the set begins
        total = len(places) * len(self.atoms)
        order = self.random.permutation(total)[:NEIGHBOURS] if total else np.empty(0, dtype=np.int64)
        start, size = 0, FIRST_BATCH
        while start < len(order):
            chosen = order[start : start + size]
            start, size = start + size, min(2 * size, BATCH)
            sets = self._exchange_atoms(row, alone, places[chosen // len(self.atoms)], chosen % len(self.atoms))
            ascending = np.sort(sets, axis=1)
            proper = (np.diff(ascending, axis=1) > 0).all(axis=1) & (ascending != np.sort(ranks)).any(axis=1)
            yield sets[proper]

    def _exchange_atoms(
        self, row: NDArray[np.int64], alone: int, position: NDArray[np.int64], atom: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Exchange the atom at each place for another, and leave the set as it is where that is impossible."""
        sets, which = np.repeat(row[None], len(position), axis=0), np.arange(len(position))
        from_pair, to_pair = position >= alone, self.doubled[atom]
        # A single needs company to become a pair: another single, the next or the one before at random.
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
        """Return the elements of a set without a prescribed identity, and how many of them stand alone."""
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
