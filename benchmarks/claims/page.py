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
WORDS = {
    "true": "true",
    "true if": "true if",
    "in part": "true in part",
    "false": "false",
    "open": "cannot be checked here",
}
HEAD = """# Is what the paper says true?

Each claim of the paper, our verdict, the number it rests on. Sections, equations and tables have the paper's labels
([equations.md](equations.md) has their numbers).

    make claims                          # compute all numbers again: a few minutes on two cores
    python benchmarks/claims --only 34   # one of them

"True in part": the sentence stands and a detail of it is wrong. Both commands fail if a number has left its tolerance.
A command in the last column made the results from which the number is read, or would decide a claim that is open.
`python benchmarks/claims --write-page` writes this page from `benchmarks/claims/`.

"""


def render(claims: Iterable[Claim]) -> str:
    """Return the page."""
    claims = sorted(claims, key=lambda item: item.number)
    parts = [HEAD, count_verdicts(claims) + ".\n"]
    for title, numbers in GROUPS.items():
        parts.append(f"\n## {title}\n\n| | the paper says | verdict | our number |\n|---|---|---|---|\n")
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
    cells = (str(item.number), f"{item.says} ({item.where})", verdict, number)
    row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return re.sub(r"docs/((?:\w+/)*(\w+\.md))", r"[\2](\1)", row)
