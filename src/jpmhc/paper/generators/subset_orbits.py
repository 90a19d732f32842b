"""Enumerate and count the orbits of the subsets of a finite set under a group of maps.

Every subset of two or more points contains pairs, and every pair lies in a numbered orbit of pairs. Take the
lowest-numbered orbit that has a pair of the subset, and the maps that send such a pair to this orbit's representative
P. The least image of the subset under these maps is its canonical form. Subsets with different P are never equivalent,
so the subsets of each P are a unit of work that needs no results of other units. The enumeration can therefore run in
parallel and be resumed.
"""

from collections import Counter
from collections.abc import Iterator
from math import comb

import numpy as np
from numpy.typing import NDArray

# The number of partial subsets that are extended at the same time, which bounds the memory (rows × points bytes).
FRONTIER = 2048


class SubsetOrbits:
    """The orbits, under a group of maps, of the subsets of the points 0, …, N − 1 with a given total weight.

    Args:
        action: All maps of the group, as permutations of the points. [maps, N]
        weight: The total weight of each subset.
        weights: The points' weights: positive integers, constant on the group's orbits; 1 each if None. [N]
    """

    def __init__(self, action: NDArray[np.integer], weight: int, weights: NDArray[np.int64] | None = None):
        self.action, self.weight = np.ascontiguousarray(action), weight
        self.order, self.points = action.shape
        self.weights = np.ones(self.points, dtype=np.int64) if weights is None else weights
        self._label_pairs()

    def _label_pairs(self) -> None:
        """Number the orbits of pairs, largest first, and store for each pair a map to its orbit's representative."""
        point_orbit = self.action.min(axis=0)  # the least image of a point names its orbit
        self.point_representatives = np.unique(point_orbit)
        label = np.full((self.points, self.points), -1, dtype=np.int32)
        self.transport = np.zeros((self.points, self.points), dtype=np.int32)
        inverse_of = self._inverses()
        representatives: list[tuple[int, int]] = []
        stabilisers: list[NDArray[np.int64]] = []
        for first in self.point_representatives.tolist():  # every orbit of pairs has a pair with one of these points
            for second in range(self.points):
                if second == first or label[first, second] >= 0:
                    continue
                i, j = self.action[:, first], self.action[:, second]
                label[i, j] = label[j, i] = len(representatives)
                self.transport[i, j] = self.transport[j, i] = inverse_of
                fixes = ((i == first) & (j == second)) | ((i == second) & (j == first))
                stabilisers.append(np.flatnonzero(fixes))
                representatives.append((first, second))
        # Largest orbits first: most subsets then contain a pair with a small stabiliser, which leaves few maps to try.
        ranking = np.argsort([len(s) for s in stabilisers], kind="stable")
        rank_of = np.empty(len(ranking) + 1, dtype=np.int32)
        rank_of[ranking], rank_of[-1] = np.arange(len(ranking)), -1
        self.pair_orbit = rank_of[label]  # [N, N]; −1 on the diagonal
        self.pairs = [representatives[k] for k in ranking]
        self.stabilisers = [stabilisers[k] for k in ranking]

    def _inverses(self) -> NDArray[np.int32]:
        """Return, for every map of the group, the index of its inverse. [maps]"""
        rows = np.ascontiguousarray(self.action.astype(np.int16))
        inverted = np.empty_like(rows)
        np.put_along_axis(inverted, rows.astype(np.int64), np.arange(self.points, dtype=np.int16)[None], axis=1)
        where = {row.tobytes(): k for k, row in enumerate(rows)}
        return np.array([where[row.tobytes()] for row in inverted], dtype=np.int32)

    def count_orbits(self) -> int:
        """Return the number of orbits, by Burnside's lemma, without listing them.

        The subsets that a map fixes are the unions of the map's cycles with the total weight `weight`.
        """
        types = Counter(_cycle_weights(row.astype(np.int64), self.weights) for row in self.action)
        return sum(maps * _count_choices(cycles, self.weight) for cycles, maps in types.items()) // self.order

    def count_subsets(self) -> int:
        """Return the number of all subsets."""
        return _count_choices(_cycle_weights(np.arange(self.points), self.weights), self.weight)

    def units(self) -> list[tuple[int, int]]:
        """Return the units of the enumeration.

        Each unit is a pair: the subset's number of points, and the number of its orbit of pairs; −1 below two points.
        """
        heaviest = int(self.weights.max())
        sizes = range(-(-self.weight // heaviest), self.weight + 1)
        return [(m, p) for m in sizes for p in (range(len(self.pairs)) if m >= 2 else (-1,))]

    def representatives(self, unit: tuple[int, int]) -> Iterator[tuple[NDArray, NDArray]]:
        """Yield one subset of each orbit in a unit, in batches: subsets [B, m] and their stabilisers' orders [B]."""
        size, pair = unit
        if size == 0:
            yield np.empty((1, 0), dtype=np.int64), np.array([self.order])
        elif size == 1:
            points = self.point_representatives[self.weights[self.point_representatives] == self.weight]
            yield points[:, None], (self.action[:, points] == points).sum(axis=0)
        else:
            for subsets in self._extend_pair(pair, size):
                keep, stabiliser = self._select_canonical(subsets, pair)
                yield subsets[keep], stabiliser

    def _extend_pair(self, pair: int, size: int) -> Iterator[NDArray]:
        """Yield subsets of `size` points in batches [b, size].

        The subsets contain the representative of the pair orbit numbered `pair`, and no pair of a lower-numbered orbit.
        """
        a, b = self.pairs[pair]
        allowed = np.flatnonzero((self.pair_orbit[a] >= pair) & (self.pair_orbit[b] >= pair))
        if size >= 4:  # a mask of the points that may follow a point, [A, A], upper triangular for ascending points
            joined = np.triu(self.pair_orbit[np.ix_(allowed, allowed)] >= pair, k=1)
        weights = self.weights[allowed]
        extremes = int(self.weights.min()), int(self.weights.max())

        def extend(rows: NDArray, mask: NDArray, left: NDArray) -> Iterator[NDArray]:
            missing = size - 2 - rows.shape[1]
            # The missing weight must be possible with the lightest and the heaviest points.
            ok = (missing * extremes[0] <= left) & (left <= missing * extremes[1])
            rows, mask, left = rows[ok], mask[ok], left[ok]
            if missing == 0:
                if len(rows):
                    head = np.broadcast_to(np.array([a, b]), (len(rows), 2))
                    yield np.concatenate([head, allowed[rows]], axis=1)
                return
            for start in range(0, len(rows), FRONTIER):
                part = slice(start, start + FRONTIER)
                parent, point = np.nonzero(mask[part])
                grown = np.concatenate([rows[part][parent], point[:, None]], axis=1)
                missing_weight = left[part][parent] - weights[point]
                if missing == 1:
                    yield from extend(grown, np.empty((len(grown), 0), dtype=bool), missing_weight)
                    continue
                for begin in range(0, len(grown), FRONTIER):
                    piece = slice(begin, begin + FRONTIER)
                    inner = mask[part][parent[piece]] & joined[point[piece]]
                    yield from extend(grown[piece], inner, missing_weight[piece])

        left = np.array([self.weight - self.weights[a] - self.weights[b]])
        yield from extend(np.empty((1, 0), dtype=np.int64), np.ones((1, len(allowed)), dtype=bool), left)

    def _select_canonical(self, subsets: NDArray, pair: int) -> tuple[NDArray, NDArray]:
        """Return the indices of the canonical subsets [k], and the orders of their stabilisers [k].

        A subset is canonical if it is least among its images under all maps that send one of its pairs in the orbit
        numbered `pair` to the orbit's representative.
        """
        size = subsets.shape[1]
        alive = np.arange(len(subsets))
        stabiliser = np.zeros(len(subsets), dtype=np.int64)
        for i in range(size):
            for j in range(i + 1, size):
                tied = np.flatnonzero(self.pair_orbit[subsets[alive, i], subsets[alive, j]] == pair)
                if not len(tied):
                    continue
                rows = subsets[alive[tied]]
                others = [k for k in range(size) if k not in (i, j)]
                moved = self.action[self.transport[rows[:, i], rows[:, j]][:, None], rows[:, others]]
                beaten = np.zeros(len(rows), dtype=bool)
                for fixing in self.stabilisers[pair]:
                    images = np.sort(self.action[fixing][moved], axis=1)
                    less, equal = _compare_rows(images, rows[:, 2:])
                    beaten |= less
                    stabiliser[alive[tied]] += equal
                alive = np.delete(alive, tied[beaten])
        return alive, stabiliser[alive]


def _compare_rows(left: NDArray, right: NDArray) -> tuple[NDArray, NDArray]:
    """Return two masks: rows of `left` lexicographically less than the rows of `right`, and equal rows."""
    less, equal = np.zeros(len(left), dtype=bool), np.ones(len(left), dtype=bool)
    for column in range(left.shape[1]):
        less |= equal & (left[:, column] < right[:, column])
        equal &= left[:, column] == right[:, column]
    return less, equal


def _count_choices(cycles: tuple[tuple[int, int], ...], weight: int) -> int:
    """Return the number of sets of cycles with a total weight, for cycles given as pairs (weight w, number m).

    The number is a coefficient of Π (1 + x^w)^m.
    """
    total = sum(w * m for w, m in cycles)
    if not 0 <= weight <= total:
        return 0
    weight = min(weight, total - weight)  # the complements of the sets have the other weight
    polynomial = {0: 1}
    for w, m in cycles:
        product: dict[int, int] = {}
        for power, coefficient in polynomial.items():
            for k in range(min(m, (weight - power) // w) + 1):
                product[power + w * k] = product.get(power + w * k, 0) + coefficient * comb(m, k)
        polynomial = product
    return polynomial.get(weight, 0)


def _cycle_weights(perm: NDArray[np.int64], weights: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return the cycles of a map as sorted pairs (total weight of a cycle, number of such cycles)."""
    least = np.arange(len(perm))
    jump = perm
    # Pointer doubling: after k rounds `least` is the minimum over 2^k steps along the cycle.
    for _ in range(len(perm).bit_length()):
        least = np.minimum(least, least[jump])
        jump = jump[jump]
    totals = np.bincount(least, weights=weights).astype(np.int64)
    values, repeats = np.unique(totals[totals > 0], return_counts=True)
    return tuple(zip(values.tolist(), repeats.tolist()))
