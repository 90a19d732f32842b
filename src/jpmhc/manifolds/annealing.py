"""Simulated annealing over sets of permutations, for where there are too many to look at all of them."""

from collections.abc import Callable
from functools import lru_cache
from math import log

import numpy as np
from numpy.typing import NDArray

from jpmhc.manifolds import symmetric_group, young
from jpmhc.manifolds.generator_candidates import Question
from jpmhc.manifolds.walk_spectrum import float_radius

# Differences in |λ₂| accepted at the start and at the end of a run, and how many runs share the moves.
HOT, COLD, RUNS = 0.05, 0.001, 4
# Every so many moves the caller hears of it.
REPORT = 100


@lru_cache(maxsize=8192)
def _matrix(shape: young.Partition, n: int, rank: int) -> NDArray[np.float64]:
    return young.represent(shape, symmetric_group.elements(n)[rank])


def _radius(n: int, ranks: list[int], limit: float) -> float:
    """|λ₂| of a set if it is at most the limit, and otherwise the first number found above the limit."""
    worst = 0.0
    for shape in young.nontrivial(n):
        worst = max(worst, float_radius(np.mean([_matrix(shape, n, g) for g in ranks], axis=0)))
        if worst > limit:
            break
    return worst


def anneal(
    question: Question, moves: int, seed: int, progress: Callable[[int, float], None]
) -> tuple[list[int], float]:
    """A set with a small |λ₂|, as ranks of its permutations, and that |λ₂|.

    Sets are changed one atom at a time (an element, or an element and its inverse). Whether a change is accepted is
    drawn before it is evaluated: the draw gives a limit on |λ₂|, and the first representation to exceed it ends the
    evaluation.

    Args:
        question: What is searched for.
        moves: Changes to try, shared among independent runs.
        seed: Seed of the random choices.
        progress: Called with the moves made and the smallest |λ₂| so far.
    """
    walk = _Walk(question, np.random.default_rng(seed))
    best, best_radius, made = walk.start(), 2.0, 0
    for run in range(RUNS):
        length = moves // RUNS + (run < moves % RUNS)
        if length == 0:
            continue
        current = walk.start()
        radius = _radius(question.n, walk.ranks(current), 2.0)
        for step in range(length):
            if radius < best_radius:
                best, best_radius = current, radius
            temperature = HOT * (COLD / HOT) ** (step / length)
            limit = radius - temperature * log(walk.random.uniform(1e-12, 1))
            proposal = walk.change(current)
            new = _radius(question.n, walk.ranks(proposal), limit)
            if new <= limit:
                current, radius = proposal, new
            made += 1
            if made % REPORT == 0:
                progress(made, best_radius)
        if radius < best_radius:
            best, best_radius = current, radius
    return walk.ranks(best), best_radius


class _Walk:
    """Random sets that satisfy a question, and random changes of them; a set is a list of atoms."""

    def __init__(self, question: Question, random: np.random.Generator):
        self.question, self.random = question, random
        self.group = symmetric_group.elements(question.n)
        self.by_weight = {w: np.flatnonzero(question.weights == w) for w in (1, 2)}
        self.atom_of = np.full(len(self.group), -1)
        for column in (0, 1):
            members = question.atoms[:, column]
            self.atom_of[members[members >= 0]] = np.flatnonzero(members >= 0)

    def ranks(self, atoms: list[int]) -> list[int]:
        return sorted(self.question.elements_of(np.array([atoms], dtype=np.int64).reshape(1, -1))[0].tolist())

    def start(self) -> list[int]:
        """A random set."""
        singles, pairs = len(self.by_weight[1]), len(self.by_weight[2])
        # Numbers of two-element atoms that leave enough one-element ones.
        total = self.question.free_size
        choices = [k for k in range(min(pairs, total // 2) + 1) if total - 2 * k <= singles]
        doubles = int(self.random.choice(choices))
        return [
            *self.random.choice(self.by_weight[2], doubles, replace=False).tolist(),
            *self.random.choice(self.by_weight[1], total - 2 * doubles, replace=False).tolist(),
        ]

    def change(self, atoms: list[int]) -> list[int]:
        """A set that differs by one atom, or by two one-element atoms against one two-element atom."""
        weights = self.question.weights
        singles = [a for a in atoms if weights[a] == 1]
        doubles = [a for a in atoms if weights[a] == 2]
        if len(self.by_weight[2]) and self.random.random() < 0.2:
            if len(singles) >= 2 and self.random.random() < 0.5:
                gone = self.random.choice(singles, 2, replace=False).tolist()
                return self._with(atoms, gone, self.random.choice(self.by_weight[2], 1).tolist())
            if doubles:
                gone = [int(self.random.choice(doubles))]
                return self._with(atoms, gone, self.random.choice(self.by_weight[1], 2, replace=False).tolist())
        if not atoms:
            return atoms
        old = int(self.random.choice(atoms))
        new = int(self.random.choice(self.by_weight[int(weights[old])]))
        if self.random.random() < 0.5:  # a neighbour instead: the product with a transposition
            perm = self.group[self.question.atoms[old, 0]].copy()
            i, j = self.random.choice(self.question.n, 2, replace=False)
            perm[[i, j]] = perm[[j, i]]
            near = int(self.atom_of[symmetric_group.rank(perm)])
            if near >= 0 and weights[near] == weights[old]:
                new = near
        return self._with(atoms, [old], [new])

    @staticmethod
    def _with(atoms: list[int], gone: list[int], new: list[int]) -> list[int]:
        """The atoms after an exchange, or as they were where it would repeat one."""
        kept = [a for a in atoms if a not in gone]
        return atoms if set(kept) & set(new) else kept + new
