"""Check the paper's claims: compute every number again, and compare it with the one that the verdict rests on.

Examples:
    python benchmarks/claims
    python benchmarks/claims --only 34 35
    python benchmarks/claims --write-page
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for harness.py, beside this folder

import cost  # noqa: F401
import equations  # noqa: F401
import methods  # noqa: F401
import training  # noqa: F401
from page import WORDS, count_verdicts, render
from record import CLAIMS, Claim, run

import manifolds  # noqa: F401
import spectra  # noqa: F401

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"


def check(item: Claim) -> bool:
    """Compute a claim's numbers, print them, and return whether they are the stored ones."""
    start = time.perf_counter()
    try:
        numbers = run(item)
    except ValueError as error:
        print(f"{item.number:3d} NOT COMPUTED: {error}", flush=True)
        return False
    holds = item.holds(numbers)
    seconds = time.perf_counter() - start
    print(f"{item.number:3d} {WORDS[item.verdict]:12s} {seconds:5.1f} s  {item.show(numbers)}", flush=True)
    if not holds:
        print(f"    NO LONGER: the verdict rests on: {item.show()} (allowed: {item.allowed})", flush=True)
    return holds


def main() -> None:
    """Check all claims or some, or write the page."""
    parser = argparse.ArgumentParser(prog="claims", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of claims to check")
    parser.add_argument("--write-page", action="store_true", help=f"write {PAGE.name} and check nothing")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(CLAIMS)
    if unknown:
        sys.exit(f"there is no claim {min(unknown)}: they are numbered 1 to {max(CLAIMS)}")
    if options.write_page:
        PAGE.write_text(render(CLAIMS.values()))
        print(f"wrote {PAGE}")
        return
    start = time.perf_counter()
    asked = [CLAIMS[number] for number in sorted(options.only or CLAIMS)]
    failed = [item.number for item in asked if item.measure is not None and not check(item)]
    for item in asked:
        if item.measure is None:
            print(f"{item.number:3d} {WORDS[item.verdict]}: {item.why}")
    print(f"{count_verdicts(asked)}; {time.perf_counter() - start:.0f} s")
    if failed:
        sys.exit(f"no longer as stored: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
