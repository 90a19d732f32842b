"""Write docs/claims.md from the recorded claims."""

import re
from collections import Counter
from collections.abc import Iterable

from record import VERDICTS, Claim

GROUPS = {"Spectral theory": range(1, 31), "Manifolds and cost": range(31, 61), "Training": range(61, 70)}
WORDS = {"true": "true", "true if": "true if", "false": "false", "open": "cannot be checked here"}
HEAD = """# The paper's claims, one by one

What the paper says, whether it holds, the number it rests on, and the command that computes the number again. Sections,
equations and tables are named by the paper's labels ([equations.md](equations.md) has their numbers).

    make claims                          # all of them: a few minutes on two cores
    python benchmarks/claims --only 34   # one of them

Both compare with the numbers below and fail if one has left its tolerance. A row names its own command where that
command made the results from which the number is read, or would decide what is open. The texts and numbers stand beside
the functions, in `benchmarks/claims/`; `python benchmarks/claims --write-page` writes this page from them.

"""


def render(claims: Iterable[Claim]) -> str:
    """Return the page."""
    claims = sorted(claims, key=lambda item: item.number)
    parts = [HEAD, count_verdicts(claims) + ".\n"]
    for title, numbers in GROUPS.items():
        parts.append(f"\n## {title}\n\n| | the paper says | verdict | our number | command |\n|---|---|---|---|---|\n")
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
    command = f"`--only {item.number}`" if item.measure is not None else ""
    if item.source:
        command += ("; " if command else "") + f"`{item.source}`"
    cells = (str(item.number), f"{item.says} ({item.where})", verdict, item.show() or "–", command or "–")
    row = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return re.sub(r"docs/((?:\w+/)*(\w+\.md))", r"[\2](\1)", row)
