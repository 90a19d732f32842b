"""Train one model in every way on 2, 4 and 8 processes, and compare each with one process.

Writes benchmarks/results/parallel.csv, which docs/guides/many_gpus.md sums up:

    OMP_NUM_THREADS=1 python benchmarks/check_parallel.py
"""

import sys
from pathlib import Path

from harness import write_csv

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # for the tests, whose cases these are

from tests.connections import parallel_cases  # noqa: E402
from tests.connections.ranks import run_on  # noqa: E402


def main() -> None:
    rows = []
    for processes in (2, 4, 8):
        print(f"running on {processes} processes", flush=True)
        outcomes = run_on(processes, parallel_cases.run_all, timeout=200 * processes)[0]
        for (way, model), outcome in outcomes.items():
            rows.append({"way": way, "model": model, "processes": processes, **vars(outcome)})
    write_csv("parallel", rows)


if __name__ == "__main__":
    main()
