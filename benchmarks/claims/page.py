"""Write docs/claims.md from the recorded claims."""

import re
from collections import Counter
from collections.abc import Iterable

from record import VERDICTS, Claim

GROUPS = {
    "Spectral theory": (*range(1, 31), 70),
    "Manifolds and cost": (*range(31, 61), 71, 73, 75),
    "Training": (*range(61, 70), 72, 74),
}
WORDS = {"true": "true", "true if": "true if", "in part": "true in part", "false": "false", "open": "open"}
HEAD = """# Is what the paper says true?

Each claim of the paper, our verdict, and the numbers behind it. Labels are the paper's ([equations.md](equations.md)
has their numbers). "Error" is relative to the exact answer; "of G": at x + 0.05i, five x from 0.05 to 1.5, with n = 4
and Lσ² = 0.05 where the claim names nothing else. "Below 0.1" is the share of singular values below 0.1, "scale" the
standard deviation of normal logits.

    make claims                          # compute all numbers again: one to two minutes
    python benchmarks/claims --only 34   # one of them

Both commands fail if a number has left its tolerance. "True in part": a detail is wrong. "Open": not to be
checked here. A command in the last column made the results that are read, or would decide the claim.

"""


def render(claims: Iterable[Claim]) -> str:
    """Return the page."""
    claims = sorted(claims, key=lambda item: item.number)
    parts = [HEAD, count_verdicts(claims) + ".\n"]
    for title, numbers in GROUPS.items():
        parts.append(f"\n## {title}\n\n| the paper says | verdict | our number |\n|---|---|---|\n")
        parts.extend(_row(item) for item in claims if item.number in numbers)
    return "".join(parts)


def count_verdicts(claims: Iterable[Claim]) -> str:
    """Return how many claims have each verdict, in words."""
    counts = Counter(item.verdict for item in claims)
    return f"{sum(counts.values())} claims: " + ", ".join(f"{counts[name]} {WORDS[name]}" for name in VERDICTS)


def _row(item: Claim) -> str:
    verdict = f"**{WORDS[item.verdict]}**"
    if item.why:
        verdict += (" " if item.verdict == "true if" else ": ") + item.why
    number = item.show() or "–"
    if item.source:
        number += f" (`{item.source}`)"
    where = re.sub(r"\bsections? ", "§", item.where)
    cells = (f"{item.number}. {item.says} ({where})", verdict, number)
    row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return re.sub(r"docs/((?:\w+/)*(\w+\.md))", r"[\2](\1)", row)
