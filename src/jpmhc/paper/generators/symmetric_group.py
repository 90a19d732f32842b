"""The symmetric group S_n as arrays: elements, products, automorphisms, and a test for generating sets."""

import itertools
from functools import lru_cache
from math import factorial

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_DEGREE = 8


def check_degree(n: int) -> None:
    """Raise ValueError unless the number of streams is from 2 to 8."""
    if not 2 <= n <= MAX_DEGREE:
        raise ValueError(f"the number of streams must be between 2 and {MAX_DEGREE}, not {n}")


def as_permutations(perms: ArrayLike) -> NDArray[np.int64]:
    """Return permutations as an integer array [K, n]; raise ValueError unless they are valid and distinct."""
    array = np.asarray(perms)
    if array.ndim != 2 or array.shape[0] < 1:
        raise ValueError(f"permutations must be an array of shape [K, n] with K ≥ 1, not {list(array.shape)}")
    check_degree(array.shape[1])
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"permutations must hold integers, not {array.dtype}")
    array = array.astype(np.int64)
    wrong = (np.sort(array, axis=1) != np.arange(array.shape[1])).any(axis=1)
    if wrong.any():
        row = array[np.argmax(wrong)].tolist()
        raise ValueError(f"{row} is not a permutation of 0..{array.shape[1] - 1}")
    if len(np.unique(array, axis=0)) != len(array):
        raise ValueError("the same permutation appears twice: a generating set lists each element once")
    return array


@lru_cache
def elements(n: int) -> NDArray[np.int64]:
    """Return all n! permutations in lexicographic order; row 0 is the identity. [n!, n]"""
    table = np.array(list(itertools.permutations(range(n))), dtype=np.int64)  # [n!, n]
    table.flags.writeable = False
    return table


def rank(perms: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the row number of each permutation [..., n] in `elements(n)`, from its Lehmer code. [...]"""
    n = perms.shape[-1]
    position = np.zeros(perms.shape[:-1], dtype=np.int64)
    for i in range(n - 1):
        smaller_after = (perms[..., i + 1 :] < perms[..., i : i + 1]).sum(-1)
        position += smaller_after * factorial(n - 1 - i)
    return position


def compose(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the product (στ)(i) = σ(τ(i)) of σ = `first` and τ = `second`; leading axes are broadcast."""
    shape = np.broadcast_shapes(first.shape, second.shape)
    return np.take_along_axis(np.broadcast_to(first, shape), np.broadcast_to(second, shape), axis=-1)


def inverse(perms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the inverse of every permutation [..., n]."""
    return np.argsort(perms, axis=-1)


def is_odd(perms: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the odd permutations, which have an odd number of inversions. [..., n] -> [...]"""
    n = perms.shape[-1]
    inversions = sum((perms[..., i + 1 :] < perms[..., i : i + 1]).sum(-1) for i in range(n - 1))
    return np.asarray(inversions % 2 == 1)


def cycle_notation(perm: ArrayLike) -> str:
    """Return a permutation as a product of disjoint cycles, such as "(0 1)(2 3)", or "e" for the identity."""
    image = np.asarray(perm).tolist()
    cycles, seen = [], set()
    for start in range(len(image)):
        cycle = []
        while start not in seen:
            seen.add(start)
            cycle.append(start)
            start = image[start]
        if len(cycle) > 1:
            cycles.append("(" + " ".join(map(str, cycle)) + ")")
    return "".join(cycles) or "e"


@lru_cache
def outer_automorphism() -> NDArray[np.int64]:
    """Return the outer automorphism of S_6, as the rank of the image of each of the 720 elements. [720]

    The fifteen synthemes (splittings of six points into three pairs) form six totals (sets of five disjoint
    synthemes with all fifteen pairs). S_6 permutes the totals, and this action is the automorphism.
    """
    pairs = list(itertools.combinations(range(6), 2))
    synthemes = [s for s in itertools.combinations(pairs, 3) if len(set(sum(s, ()))) == 6]
    totals = [
        frozenset(map(frozenset, t))
        for t in itertools.combinations(synthemes, 5)
        if len(set(itertools.chain(*t))) == 15
    ]
    images = np.empty((720, 6), dtype=np.int64)
    for g, perm in enumerate(elements(6).tolist()):
        for k, total in enumerate(totals):
            moved = frozenset(frozenset(tuple(sorted((perm[i], perm[j]))) for i, j in s) for s in total)
            images[g, k] = totals.index(moved)
    return rank(images)


@lru_cache
def symmetries(n: int, inversion: bool = True) -> NDArray[np.int16]:
    """Return the maps of S_n, n ≤ 7, that keep the spectrum of a set's walk, as ranks of images. [maps, n!]

    The maps are the conjugations, for n = 6 also their products with the outer automorphism, and with `inversion` also
    all of these maps followed by g ↦ g⁻¹. Every map is listed once.
    """
    group = elements(n)
    conjugations = np.empty((len(group), len(group)), dtype=np.int16)
    for h, h_inverse, row in zip(group, inverse(group), conjugations):
        row[:] = rank(h[group[:, h_inverse]])
    table = conjugations
    if n == 6:
        table = np.concatenate([table, table[:, outer_automorphism()]])
    if inversion:
        table = np.concatenate([table, table[:, rank(inverse(group))]])
    if n == 2:  # abelian: conjugation and inversion are the identity map
        table = table[:1]
    table.flags.writeable = False
    return table


def generates(perms: ArrayLike) -> bool:
    """Return whether the permutations generate all of S_n, by forming their products from the identity on."""
    perms = as_permutations(perms)
    group = elements(perms.shape[1])
    reached, frontier = np.zeros(len(group), dtype=bool), np.zeros(1, dtype=np.int64)
    while len(frontier) and 2 * reached.sum() <= len(group):  # a subgroup with more than half of S_n is S_n
        reached[frontier] = True
        products = np.unique(rank(compose(perms[:, None], group[frontier])))
        frontier = products[~reached[products]]
    return bool(2 * reached.sum() > len(group))
