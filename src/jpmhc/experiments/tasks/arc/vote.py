r"""The votes of a puzzle's variants on what the answer is: the grids voted for, ranked, and the place of the true one.

Every variant of a puzzle casts one vote for each of its tests: the grid that the model wrote, with the variant undone.
Grids are represented by 64-bit digests. Candidates are ranked by (votes, mean confidence).
"""

import hashlib
from math import comb

import numpy as np

PASS_AT = (1, 2, 5, 10, 100, 1000)


def hash_grid(grid: np.ndarray) -> np.uint64:
    """Hash a grid's shape and cells to 64 bits (BLAKE2)."""
    shape = bytes(grid.shape)  # sides are below 256
    cells = np.ascontiguousarray(grid, np.uint8).tobytes()
    return np.uint64(int.from_bytes(hashlib.blake2b(shape + cells, digest_size=8).digest(), "little"))


def rank_candidates(votes: np.ndarray, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank the distinct candidates, best first, and count the votes each got.

    Args:
        votes: digests voted for, [N].
        confidence: of each vote, [N].

    Returns:
        Digests and counts, sorted by (count, mean confidence); equals are ordered by digest, so that the result does
        not depend on the order of the votes.
    """
    candidates, which, counts = np.unique(votes, return_inverse=True, return_counts=True)
    mean = np.bincount(which, confidence) / counts
    order = np.lexsort((candidates, -mean, -counts))
    return candidates[order], counts[order]


def rank_of(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray) -> int | None:
    """Find the place of the truth among the candidates, 1 being first; None where no vote is right."""
    at = np.flatnonzero(rank_candidates(votes, confidence)[0] == truth)
    return int(at[0]) + 1 if len(at) else None


def iid_pass(samples: int, right: int, k: int) -> float:
    """Estimate the chance that at least one of k independent answers is right, from `samples` with `right` right ones.

    This is the unbiased estimator `1 − C(N − c, k) / C(N, k)`. It is not defined for k above N, where the value at
    k = N is returned: 1 if any answer is right, else 0.
    """
    k = min(k, samples)
    return 1 - comb(samples - right, k) / comb(samples, k)


def resampled_ranks(truth: np.uint64, votes: np.ndarray, confidence: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Find the truth's place under many resamplings of the votes.

    Args:
        truth: digest of the right grid.
        votes: [N].
        confidence: [N].
        chosen: which votes each resampling takes, [R, N'].

    Returns:
        Places, [R] floats, infinite where no chosen vote is right.
    """
    candidates, which = np.unique(votes, return_inverse=True)
    rounds, width = len(chosen), len(candidates)
    cell = (np.arange(rounds)[:, None] * width + which[chosen]).reshape(-1)
    counts = np.bincount(cell, minlength=rounds * width).reshape(rounds, width)
    total = np.bincount(cell, confidence[chosen].reshape(-1), minlength=rounds * width).reshape(rounds, width)
    mean = total / np.maximum(counts, 1)
    right = np.flatnonzero(candidates == truth)
    if not len(right):
        return np.full(rounds, np.inf)
    own, own_mean = counts[:, right], mean[:, right]
    ahead = (counts > own) | ((counts == own) & (mean > own_mean))
    ahead |= (counts == own) & (mean == own_mean) & (np.arange(width) < right)
    return np.where(own[:, 0] > 0, 1 + ahead.sum(1), np.inf)
