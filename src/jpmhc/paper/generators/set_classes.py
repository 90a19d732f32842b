"""One set of permutations out of each class of equivalent ones: sets of a class have walks with the same spectrum."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.subset_orbits import SubsetOrbits


class SetClasses:
    """The classes of the sets that a question allows, for n ≤ 7.

    Two sets are equivalent if an automorphism of S_n, or inverting every element, turns one into the other.
    """

    def __init__(self, question: Question):
        self.question = question
        # Inversion moves no set that is closed under inverses.
        action = symmetric_group.symmetries(question.n, inversion=not question.reversible)
        atoms = question.atoms
        place = np.full(action.shape[1], -1, dtype=action.dtype)
        place[atoms[:, 0]] = np.arange(len(atoms))
        paired = atoms[:, 1] >= 0
        place[atoms[paired, 1]] = np.flatnonzero(paired)
        self.orbits = SubsetOrbits(place[action[:, atoms[:, 0]]], question.weights)

    def count_classes(self) -> int:
        """Return the number of classes, by Burnside's lemma."""
        return self.orbits.count_orbits(self.question.free_size)

    def count_sets(self) -> int:
        """Return the number of sets in all classes together."""
        return self.orbits.count_subsets(self.question.free_size)

    def units(self) -> list[tuple[int, int]]:
        """Return the independent parts of the enumeration, each a small tuple that `representatives` takes."""
        return self.orbits.units(self.question.free_size)

    def representatives(self, unit: tuple[int, int]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the sets of one unit in batches: ranks of their elements [B, K] and the size of each class [B]."""
        for atoms, stabiliser in self.orbits.representatives(self.question.free_size, unit):
            yield self.question.elements_of(atoms), self.orbits.order // stabiliser


@lru_cache(maxsize=1)
def find_classes(question: Question) -> SetClasses:
    """Return the classes of a question's sets; the tables of the last question are kept."""
    return SetClasses(question)
