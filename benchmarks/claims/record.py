"""What is known of one claim of the paper, and the list of all of them.

A claim's text, verdict and stored numbers stand at the function that computes them: `docs/claims.md` is written
from here, and the check compares with what is written here, so that page and check cannot differ.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc

VERDICTS = ("true", "true if", "in part", "false", "open")
Numbers = tuple[float, ...]
Measure = Callable[[], float | Numbers]
# How far a number may lie from the stored one, as a share of it; or between which two numbers it must lie.
Allowed = float | tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    number: int  # its place in the list
    says: str
    where: str  # section, equation, table or figure, by the paper's labels
    # one of `VERDICTS`; "in part": the sentence as a whole stands and a detail is wrong; "open": it cannot be checked
    # here
    verdict: str
    why: str = ""  # condition of a "true if", the wrong detail, the truth instead of a "false", or why a claim is open
    shows: str = ""  # our numbers in words, with a place `{}` for each stored number
    stored: Numbers = ()  # numbers on which the verdict rests, as they were when it was given
    allowed: tuple[Allowed, ...] = ()  # for each of them, or for all, how far a new one may be away
    measure: Measure | None = None  # function that computes them; None where there is nothing to compute
    source: str = ""  # command that made the results which `measure` reads, or that would decide an open claim

    def show(self, numbers: Numbers | None = None) -> str:
        """Return the claim's numbers in words, by default the stored ones."""
        return self.shows.format(*(self.stored if numbers is None else numbers))

    def holds(self, numbers: Numbers) -> bool:
        """Return whether every number is as near to the stored one as it has to be."""
        return len(numbers) == len(self.stored) and all(map(_is_near, numbers, self.stored, self.allowed))


CLAIMS: dict[int, Claim] = {}


def claim(
    number: int,
    where: str,
    verdict: str,
    *,
    stored: float | Numbers,
    allowed: Allowed | list[Allowed] = 0.01,
    source: str = "",
) -> Callable[[Measure], Measure]:
    """Register a claim; a decorator of the function that computes its numbers.

    The function's docstring is what the paper says, perhaps a paragraph "Why:", and a paragraph "Shows:".
    """
    numbers = stored if isinstance(stored, tuple) else (stored,)
    limits = tuple(allowed) if isinstance(allowed, list) else (allowed,) * len(numbers)

    def register(measure: Measure) -> Measure:
        says, _, rest = cleandoc(measure.__doc__ or "").partition("\n\n")
        parts = re.split(r"^(Why|Shows): ", rest, flags=re.MULTILINE)
        words = {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2])}
        why, shows = words.get("Why", ""), words["Shows"]
        _add(Claim(number, " ".join(says.split()), where, verdict, why, shows, numbers, limits, measure, source))
        return measure

    return register


def claim_open(number: int, where: str, says: str, why: str, source: str = "") -> None:
    """Register a claim that cannot be checked here."""
    _add(Claim(number, says, where, "open", why, source=source))


def _add(item: Claim) -> None:
    unexplained = item.verdict != "true" and not item.why
    if item.number in CLAIMS or item.verdict not in VERDICTS or len(item.allowed) != len(item.stored) or unexplained:
        raise ValueError(f"claim {item.number} is recorded twice, or without verdict, reason or limits")
    CLAIMS[item.number] = item


def run(item: Claim) -> Numbers:
    """Compute a claim's numbers."""
    assert item.measure is not None
    found = item.measure()
    return found if isinstance(found, tuple) else (found,)


def _is_near(number: float, stored: float, allowed: Allowed) -> bool:
    if isinstance(allowed, tuple):
        return allowed[0] <= number <= allowed[1]
    return abs(number - stored) <= allowed * abs(stored)
