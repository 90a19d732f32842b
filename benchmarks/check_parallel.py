"""Train one model in every way on 2, 4 and 8 processes, and compare each with one process.

Writes the table of docs/guides/many_gpus.md:

    OMP_NUM_THREADS=1 python benchmarks/check_parallel.py
"""

import sys
from pathlib import Path

from harness import write_table

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # for the tests, whose cases these are

from tests.connections import parallel_cases  # noqa: E402
from tests.connections.ranks import run_on  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "many_gpus.md"
KINDS = {"own": "connections of its own", "wrapped": "wrapped"}


def main() -> None:
    outcomes = {}
    for processes in (2, 4, 8):
        print(f"running on {processes} processes", flush=True)
        outcomes[processes] = run_on(processes, parallel_cases.run_all, timeout=200 * processes)[0]
    lines = [f"| way | processes | {' | '.join(KINDS.values())} |", "|---|---|---:|---:|"]
    for name, case in parallel_cases.CASES.items():
        differences = {
            kind: max(outcomes[processes][name, kind].difference for processes in case.processes) for kind in case.kinds
        }
        cells = [f"{differences[kind]:.0e}" if kind in differences else "–" for kind in KINDS]
        lines.append(f"| {name} | {', '.join(map(str, case.processes))} | {' | '.join(cells)} |")
    write_table(PAGE, "parallel", lines)


if __name__ == "__main__":
    main()
