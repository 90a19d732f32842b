r"""Drop sets of permutations that provably have a larger |λ₂| than a limit, with the cheapest representation first.

Each block $M_\lambda$ of a walk (random_walk.py), a d × d matrix with spectral radius $\rho(M)$, is an average of K
orthogonal matrices and has norm at most 1, so that rounding errors have a known bound. A set is dropped only if one of
three tests proves that it is above the limit:

- the sign representation, an integer divided by K;
- the bound $|\mathrm{tr}\,M^k| \le d\,\rho(M)^k$ for powers k;
- the eigenvalues in floating point, minus the largest possible effect of a backward error η. The effect is at most
  $2^{1-1/d}\eta^{1/d}$ (Elsner 1985), which is used for d ≤ 6 and holds for every block. For larger blocks the bound
  $2d\,\kappa(V)^2\eta$ (Bauer and Fike 1960) is used, where V is the matrix of eigenvectors; it is useful only if the
  block is not defective.
"""

import numpy as np
from numpy.typing import NDArray

from jpmhc.paper.generators import representations, symmetric_group

# Bounds on the backward error of eigenvalues for a block of norm 1 (measured: below 2e-15) and on the error of a trace.
BACKWARD_ERROR, TRACE_ERROR = 1e-14, 1e-11
# The largest block for which Elsner's bound is small enough (8e-3) to be useful.
LARGEST_DEFECTIVE_BLOCK = 6
# The largest number of entries in a stored table; larger representations (n = 8) are computed for each batch of sets.
TABLE_ENTRIES = 10_000_000
SQUARINGS = 4  # powers up to 2 · 2⁴ = 32 are traced


class BlockPruner:
    """A filter for sets of K permutations of n streams, which drops sets whose |λ₂| is provably above a limit."""

    def __init__(self, n: int, size: int):
        self.n, self.size = n, size
        self.sign, *self.shapes = representations.nontrivial_partitions(n)
        self.odd = symmetric_group.is_odd(symmetric_group.elements(n))
        self._tables: dict[representations.Partition, NDArray[np.float64]] = {}
        self._formed: dict[representations.Partition, int] = {}

    def blocks(self, shape: representations.Partition, sets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the blocks M_λ [B, d, d] of sets of permutations, given as ranks [B, K]; `shape` is λ."""
        group, size = symmetric_group.elements(self.n), representations.dimension(shape)
        if shape not in self._tables:
            # A table is computed once the represented permutations are as many as its rows.
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
        """Return the sets that are not proven to have |λ₂| > limit, and count the others in `pruned`.

        `pruned` has, for each representation, the number of sets that it proved to be above the limit.
        """
        imbalance = np.abs(self.size - 2 * self.odd[sets].sum(axis=1))
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
        keep = select_by_traces(blocks, limit, SQUARINGS, absolute=TRACE_ERROR)
        if not len(keep):
            return keep
        allowance: float | NDArray[np.float64]
        if size <= LARGEST_DEFECTIVE_BLOCK:
            eigenvalues = np.linalg.eigvals(blocks[keep])
            allowance = 2 ** (1 - 1 / size) * BACKWARD_ERROR ** (1 / size)
        else:
            eigenvalues, vectors = np.linalg.eig(blocks[keep])
            singular = np.linalg.svd(vectors, compute_uv=False)
            # A singular matrix of eigenvectors makes the condition number, and so the allowance, infinite.
            with np.errstate(divide="ignore"):
                allowance = 2 * size * (singular[:, 0] / singular[:, -1]) ** 2 * BACKWARD_ERROR
        return keep[np.abs(eigenvalues).max(axis=1) <= limit + allowance]


def select_by_traces(
    blocks: NDArray[np.float64], limit: float, squarings: int, absolute: float = 0.0, relative: float = 0.0
) -> NDArray[np.int64]:
    r"""Return the indices of the blocks [B, d, d] whose traces of powers allow a spectral radius of at most the limit.

    The condition is $|\mathrm{tr}\,M^k| \le d\,\rho(M)^k$ for k = 1, 2, 3, 4, 6, 8, 12, …, 2 · 2^squarings. The
    largest error of a trace divided by d is `absolute`, and the largest relative error of a power of the limit is
    `relative`.
    """
    size, keep = blocks.shape[1], np.arange(len(blocks))

    def allow(trace: NDArray[np.float64], power: int) -> NDArray[np.bool_]:
        return np.abs(trace) / size <= limit**power * (1 + relative) + absolute

    ok = allow(np.einsum("bii->b", blocks), 1)
    keep, current, half, exponent = keep[ok], blocks[ok], None, 1
    for _ in range(squarings + 1):
        # Both traces come from known powers. One of them may vanish by the phases of a complex pair, both rarely do.
        ok = allow(np.einsum("bij,bji->b", current, current), 2 * exponent)
        if half is not None:
            ok &= allow(np.einsum("bij,bji->b", current, half), 3 * exponent // 2)
        keep, half = keep[ok], current[ok]
        current, exponent = half @ half, 2 * exponent
    return keep
