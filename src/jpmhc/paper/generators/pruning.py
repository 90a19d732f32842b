r"""Drops sets of permutations that provably have a larger |λ₂| than a limit, cheapest representation first.

Each block $M_\lambda$ has norm at most 1, being an average of orthogonal matrices, so that rounding is bounded in
absolute terms, and a set is dropped only on a proof:

- the sign representation is an integer divided by K;
- $|\mathrm{tr}\,M^k| \le d\,\rho(M)^k$ for every k;
- eigenvalues in floating point, allowing for how far a backward error η can have moved them. For d ≤ 6 that is at most
  $2^{1-1/d}\eta^{1/d}$ (Elsner 1985), however defective the block is; for larger blocks at most $2d\,\kappa(V)^2\eta$
  (Bauer and Fike 1960), V being the matrix of eigenvectors, which is of use where the block is not defective.
"""

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import representations, symmetric_group

# Backward error of an eigenvalue solver on a block of norm 1 (measured: below 2e-15) and of a power's trace.
BACKWARD_ERROR, TRACE_ERROR = 1e-14, 1e-11
# Largest block for which the allowance for any defect is small enough (8e-3) to be of use.
LARGEST_DEFECTIVE_BLOCK = 6
# Largest table of a representation that is kept; larger ones (n = 8) are formed for the sets at hand.
TABLE_ENTRIES = 10_000_000
SQUARINGS = 4  # powers up to 2 · 2⁴ = 32 are traced


class BlockPruner:
    """Drops sets of K permutations of n streams that cannot reach a limit on |λ₂|."""

    def __init__(self, n: int, size: int):
        self.n, self.size = n, size
        self.sign, *self.shapes = representations.nontrivial_partitions(n)
        self._odd = symmetric_group.is_odd(symmetric_group.elements(n))
        self._tables: dict[representations.Partition, NDArray[np.float64]] = {}
        self._formed: dict[representations.Partition, int] = {}

    def blocks(self, shape: representations.Partition, sets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the matrices M_λ [B, d, d] of sets of ranks [B, K]."""
        group, size = symmetric_group.elements(self.n), representations.dimension(shape)
        if shape not in self._tables:
            # Few sets are represented one by one; once those are as many as the table would hold, it pays.
            formed = self._formed[shape] = self._formed.get(shape, 0) + sets.size
            if formed < len(group) or len(group) * size**2 > TABLE_ENTRIES:
                return representations.represent(shape, group[sets]).mean(axis=1)
            self._tables[shape] = representations.represent(shape, group).reshape(len(group), -1) / self.size
        table = self._tables[shape]
        total = table[sets[:, 0]]
        for column in range(1, self.size):
            total += table[sets[:, column]]
        return total.reshape(-1, size, size)

    def select_survivors(
        self, sets: NDArray[np.int64], limit: float, pruned: dict[representations.Partition, int]
    ) -> NDArray[np.int64]:
        """Return the sets that are not proven to have |λ₂| > limit, and count the others in `pruned`."""
        imbalance = np.abs(self.size - 2 * self._odd[sets].sum(axis=1))
        keep = imbalance <= limit * self.size + 1e-9
        pruned[self.sign] = pruned.get(self.sign, 0) + int((~keep).sum())
        sets = sets[keep]
        for shape in self.shapes:
            if not len(sets):
                break
            keep = self._select_within(self.blocks(shape, sets), limit)
            pruned[shape] = pruned.get(shape, 0) + len(sets) - len(keep)
            sets = sets[keep]
        return sets

    def _select_within(self, blocks: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
        """Return the indices of the blocks that are not proven to have a spectral radius above the limit."""
        size = blocks.shape[1]
        keep = np.arange(len(blocks))

        def may_stay(trace: NDArray[np.float64], power: int) -> NDArray[np.bool_]:
            return np.abs(trace) / size <= limit**power + TRACE_ERROR

        ok = may_stay(np.einsum("bii->b", blocks), 1)
        keep, current = keep[ok], blocks[ok]
        exponent, half = 1, None
        for _ in range(SQUARINGS + 1):
            # Tr M^(2e) and, of the powers at hand, Tr M^(e + e/2): two phases of a complex pair rarely both vanish.
            ok = may_stay(np.einsum("bij,bji->b", current, current), 2 * exponent)
            if half is not None:
                ok &= may_stay(np.einsum("bij,bji->b", current, half), 3 * exponent // 2)
            keep, half = keep[ok], current[ok]
            current = half @ half
            exponent *= 2
        if not len(keep):
            return keep
        allowance: float | NDArray[np.float64]
        if size <= LARGEST_DEFECTIVE_BLOCK:
            eigenvalues = np.linalg.eigvals(blocks[keep])
            allowance = 2 ** (1 - 1 / size) * BACKWARD_ERROR ** (1 / size)
        else:
            eigenvalues, vectors = np.linalg.eig(blocks[keep])
            singular = np.linalg.svd(vectors, compute_uv=False)
            # Singular vectors make the condition infinite, and the allowance with it.
            with np.errstate(divide="ignore"):
                allowance = 2 * size * (singular[:, 0] / singular[:, -1]) ** 2 * BACKWARD_ERROR
        return keep[np.abs(eigenvalues).max(axis=1) <= limit + allowance]
