"""Simulated annealing over sets of permutations, for where there are too many to look at all of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from jpmhc.manifolds import symmetric_group, young
from jpmhc.manifolds.block_pruning import BlockPruner
from jpmhc.manifolds.generator_candidates import Question

# Differences in |λ₂| accepted at the start and at the end, and how many sets are annealed side by side.
HOT, COLD, CHAINS = 0.03, 0.01, 16


class _Radii:
    """|λ₂| of many sets at once, each as far as its own limit."""

    def __init__(self, question: Question):
        self.pruner = BlockPruner(question.n, question.size)
        self.shapes = young.nontrivial(question.n)

    def __call__(self, sets: NDArray[np.int64], limits: NDArray[np.float64]) -> NDArray[np.float64]:
        """|λ₂| of each set if it is at most its limit, and otherwise the first number found above the limit."""
        radii = np.zeros(len(sets))
        alive = np.arange(len(sets))
        for shape in self.shapes:
            eigenvalues = np.linalg.eigvals(self.pruner.blocks(shape, sets[alive]))
            radii[alive] = np.maximum(radii[alive], np.abs(eigenvalues).max(axis=1))
            alive = alive[radii[alive] <= limits[alive]]
            if not len(alive):
                break
        return radii


def anneal(
    question: Question, moves: int, seed: int, progress: Callable[[int, float], None]
) -> tuple[list[int], float]:
    """A set with a small |λ₂|, as ranks of its permutations, and that |λ₂|.

    Sets are changed one atom at a time (an element, or an element and its inverse). Whether a change is accepted is
    drawn before it is evaluated: the draw gives a limit on |λ₂|, and the first representation to exceed it ends the
    evaluation.

    Args:
        question: What is searched for.
        moves: Changes to try, shared among independent chains.
        seed: Seed of the random choices.
        progress: Called with the moves made and the smallest |λ₂| so far.
    """
    walk, evaluate = _Walk(question, np.random.default_rng(seed)), _Radii(question)
    chains = [walk.start() for _ in range(min(CHAINS, moves))]
    radii = evaluate(walk.ranks(chains), np.full(len(chains), 2.0))
    best = int(radii.argmin())
    best_set, best_radius = chains[best], radii[best]
    made = 0
    while made < moves:
        temperature = HOT * (COLD / HOT) ** (made / moves)
        limits = radii + temperature * walk.random.exponential(size=len(chains))
        proposals = [walk.change(atoms) for atoms in chains]
        proposed = evaluate(walk.ranks(proposals), limits)
        for k in np.flatnonzero(proposed <= limits):
            chains[k], radii[k] = proposals[k], proposed[k]
        best = int(radii.argmin())
        if radii[best] < best_radius:
            best_set, best_radius = chains[best], radii[best]
        made += len(chains)
        progress(min(made, moves), float(best_radius))
    return walk.ranks([best_set])[0].tolist(), float(best_radius)


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

    def ranks(self, chains: list[list[int]]) -> NDArray[np.int64]:
        """Ranks [B, K] of the permutations in each set, ascending."""
        rows = [self.question.elements_of(np.array([atoms], dtype=np.int64))[0] for atoms in chains]
        return np.sort(np.stack(rows), axis=1)

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
