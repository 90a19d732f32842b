r"""The irreducible representations of S_n as orthogonal matrices, by Young's orthogonal form.

A representation is labelled by a partition of n, its shape. Its basis is the set of standard tableaux of this shape.
The adjacent transposition $s_i = (i\;i{+}1)$ acts on a tableau t by

.. math:: s_i\, t = \tfrac1r\, t + \sqrt{1 - 1/r^2}\; s_i t,

where r is the axial distance: the content (column minus row) of i + 1 minus the content of i. The matrices are
orthogonal.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Partition = tuple[int, ...]


@lru_cache
def partitions(n: int, largest: int | None = None) -> list[Partition]:
    """Return the partitions of n into parts of at most `largest`, in reverse lexicographic order."""
    if n == 0:
        return [()]
    largest = n if largest is None else min(largest, n)
    return [(part, *rest) for part in range(largest, 0, -1) for rest in partitions(n - part, part)]


@lru_cache
def standard_tableaux(shape: Partition) -> list[Partition]:
    """Return the standard tableaux of a shape, each as the list of the row numbers of the entries 0, 1, …, n − 1."""
    if sum(shape) == 0:
        return [()]
    tableaux = []
    for row, length in enumerate(shape):
        below = shape[row + 1] if row + 1 < len(shape) else 0
        if length > below:  # the last cell of this row is a corner, which the largest entry may take
            smaller = (*shape[:row], length - 1, *shape[row + 1 :])
            tableaux += [(*t, row) for t in standard_tableaux(smaller)]
    return tableaux


@lru_cache
def dimension(shape: Partition) -> int:
    """Return the dimension of a representation, which is the number of its standard tableaux."""
    return len(standard_tableaux(shape))


@lru_cache
def _adjacent_transpositions(shape: Partition) -> list[tuple[NDArray, NDArray, NDArray]]:
    """Return the entries 1/r and √(1 − 1/r²) and the tableaux' images of each transposition (i i+1). [d] each"""
    tableaux = standard_tableaux(shape)
    index = {t: k for k, t in enumerate(tableaux)}
    n, actions = sum(shape), []
    contents = np.array([[t[:m].count(t[m]) - t[m] for m in range(n)] for t in tableaux])  # column less row, [d, n]
    for i in range(n - 1):
        diagonal = 1.0 / (contents[:, i + 1] - contents[:, i])
        swapped = [index.get((*t[:i], t[i + 1], t[i], *t[i + 2 :]), k) for k, t in enumerate(tableaux)]
        # If i and i + 1 share a row or column, r = ±1: the off-diagonal entry is zero, and the index does not matter.
        actions.append((diagonal, np.sqrt(1.0 - diagonal**2), np.array(swapped)))
    return actions


def represent(shape: Partition, perms: NDArray[np.int64]) -> NDArray[np.float64]:
    r"""Return the matrices $\rho(\sigma)$ [..., d, d] of permutations σ [..., n] in the representation of a shape."""
    size = dimension(shape)
    flat = perms.reshape(-1, perms.shape[-1]).copy()
    matrices = np.broadcast_to(np.eye(size), (len(flat), size, size)).copy()
    actions = _adjacent_transpositions(shape)
    # Bubble sort writes σ s_{i1} s_{i2} … = e, so σ = … s_{i2} s_{i1}: each swap multiplies from the left.
    for last in range(flat.shape[1] - 1, 0, -1):
        for i in range(last):
            swap = flat[:, i] > flat[:, i + 1]
            flat[swap, i], flat[swap, i + 1] = flat[swap, i + 1], flat[swap, i]
            diagonal, off_diagonal, target = actions[i]
            old = matrices[swap]
            matrices[swap] = diagonal[:, None] * old + off_diagonal[:, None] * old[:, target]
    return matrices.reshape(*perms.shape[:-1], size, size)


def nontrivial_partitions(n: int) -> list[Partition]:
    """Return all partitions of n except (n), sorted by the representation's dimension; the sign (1, …, 1) is first."""
    return sorted((p for p in partitions(n) if p != (n,)), key=lambda p: (dimension(p), tuple(-x for x in p)))
