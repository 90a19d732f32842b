"""The question of a search: the size and conditions of the wanted sets, and the classes of equivalent sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import factorial

import numpy as np
from numpy.typing import NDArray

from jpmhc import checks
from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.subset_orbits import SubsetOrbits


@dataclass(frozen=True)
class Question:
    """The size of the wanted sets of permutations of n streams, and the conditions that the sets must satisfy."""

    n: int  # number of streams, 2 to 8
    size: int  # number of permutations in a set, K
    # whether sets must contain the identity, for mixers that start as the plain residual
    contains_identity: bool = False
    # whether sets must contain the inverse of each element, so that the walk has real eigenvalues
    reversible: bool = False

    def __post_init__(self) -> None:
        checks.whole_number(self.n, "the number of streams")
        checks.whole_number(self.size, "the size of a set")
        symmetric_group.check_degree(self.n)
        if self.size > factorial(self.n):
            raise ValueError(
                f"the size of a set of permutations of {self.n} must be 1 to {factorial(self.n)}, not {self.size}"
            )

    @cached_property
    def free_size(self) -> int:
        """The number of permutations to choose, not counting a prescribed identity."""
        return self.size - self.contains_identity

    @cached_property
    def atoms(self) -> NDArray[np.int64]:
        """The atoms that form sets, as ranks [A, 2]: a permutation and −1, or a permutation and its inverse."""
        group = symmetric_group.elements(self.n)
        ranks = np.arange(len(group))
        partner = symmetric_group.rank(symmetric_group.inverse(group)) if self.reversible else ranks
        atoms = np.stack([ranks, np.where(partner == ranks, -1, partner)], axis=1)
        return atoms[(partner >= ranks) & ~((ranks == 0) & self.contains_identity)]

    @cached_property
    def weights(self) -> NDArray[np.int64]:
        """The number of permutations in each atom."""
        return 1 + (self.atoms[:, 1] >= 0)

    def elements_of(self, atoms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ranks [B, K] of the permutations in B sets, with a prescribed identity first.

        Each set consists of the rows `atoms` [B, m] of `self.atoms`.
        """
        pairs = self.atoms[atoms].reshape(len(atoms), 2 * atoms.shape[1])
        ranks = pairs[pairs >= 0].reshape(len(atoms), self.free_size)
        if self.contains_identity:
            ranks = np.concatenate([np.zeros((len(ranks), 1), dtype=np.int64), ranks], axis=1)
        return ranks


class SetClasses(SubsetOrbits):
    """The classes of equivalent sets among the sets that a question allows, for n ≤ 7.

    Two sets are equivalent if automorphisms of S_n and inversion of all elements map one set to the other. The walks of
    equivalent sets have the same spectrum. A class is an orbit of subsets of `Question.atoms`.
    """

    def __init__(self, question: Question):
        self.question = question
        # Inversion maps each set that is closed under inverses to itself.
        action = symmetric_group.symmetries(question.n, inversion=not question.reversible)
        atoms = question.atoms
        atom_of = np.full(action.shape[1], -1, dtype=action.dtype)
        atom_of[atoms[:, 0]] = np.arange(len(atoms))
        paired = atoms[:, 1] >= 0
        atom_of[atoms[paired, 1]] = np.flatnonzero(paired)
        super().__init__(atom_of[action[:, atoms[:, 0]]], question.free_size, question.weights)

    def list_sets(self, unit: tuple[int, int]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield one set of each class in a unit, in batches: the sets' ranks [B, K] and the classes' sizes [B]."""
        for atoms, stabiliser in self.representatives(unit):
            yield self.question.elements_of(atoms), self.order // stabiliser


@lru_cache(maxsize=1)
def find_classes(question: Question) -> SetClasses:
    """Return the classes of a question's sets; the result for the last question is cached."""
    return SetClasses(question)
