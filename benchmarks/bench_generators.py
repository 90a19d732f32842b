"""Time the search for generating sets, beside the paper's plain algorithm where that is possible.

Run `python benchmarks/bench_generators.py`; about a minute. The plain algorithm is timed in full at n ≤ 4 and on a
sample of the subsets at n = 5, from which its whole time is extrapolated (and marked so).
"""

import itertools
import time

import numpy as np

from harness import write_csv
from jpmhc.paper.generators import symmetric_group
from jpmhc.paper.generators.random_walk import plain_spectral_gap
from jpmhc.paper.generators.search import available_cores, best_generating_set

CASES = [(3, 4), (4, 4), (4, 6), (5, 4), (5, 5), (5, 6), (6, 2), (6, 3), (6, 4)]
PLAIN = [(3, 4), (4, 4)]
SAMPLED = [(5, 4)]
SAMPLE = 200


def plain_search(n: int, size: int) -> float:
    """Algorithm spectral-gap-search as printed: every subset, a test of generation, the n! × n! matrix."""
    group = symmetric_group.elements(n)
    best = 0.0
    for subset in itertools.combinations(range(len(group)), size):
        perms = group[list(subset)]
        if symmetric_group.generates(perms):
            best = max(best, plain_spectral_gap(perms))
    return best


def plain_sample(n: int, size: int, subsets: int) -> float:
    """Seconds the plain algorithm would take, from random subsets."""
    group, random = symmetric_group.elements(n), np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(SAMPLE):
        perms = group[random.choice(len(group), size, replace=False)]
        if symmetric_group.generates(perms):
            plain_spectral_gap(perms)
    return (time.perf_counter() - start) / SAMPLE * subsets


def main() -> None:
    """Time every case and write the results."""
    rows = []
    for n, size in CASES:
        start = time.perf_counter()
        found = best_generating_set(n, size)
        seconds = time.perf_counter() - start
        row = {"n": n, "size": size, "gap": found.gap, "classes": found.examined, "subsets": found.subsets}
        rows.append({**row, "method": "classes", "seconds": seconds, "extrapolated": False, "cores": available_cores()})
        if (n, size) in PLAIN:
            start = time.perf_counter()
            gap = plain_search(n, size)
            if abs(gap - found.gap) > 1e-6:
                raise ArithmeticError(f"the plain algorithm finds a gap of {gap}, the search {found.gap}")
            seconds = time.perf_counter() - start
            rows.append({**row, "method": "plain", "seconds": seconds, "extrapolated": False, "cores": 1})
        if (n, size) in SAMPLED:
            assert found.subsets is not None
            seconds = plain_sample(n, size, found.subsets)
            rows.append({**row, "method": "plain", "seconds": seconds, "extrapolated": True, "cores": 1})
        print(rows[-1], flush=True)
    write_csv("generators", rows)


if __name__ == "__main__":
    main()
