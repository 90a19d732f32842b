"""What is known of one claim of the paper, and the list of all of them.

A claim's text, verdict and stored numbers stand beside the function that computes them: `docs/claims.md` is written
from here, and the check compares with what is written here, so that page and check cannot differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    says: str,
    where: str,
    verdict: str,
    why: str = "",
    *,
    shows: str = "",
    stored: float | Numbers = (),
    allowed: Allowed | list[Allowed] = 0.01,
    source: str = "",
) -> Callable[[Measure], Measure]:
    """Register a claim; as a decorator, with the function that computes its numbers."""
    numbers = stored if isinstance(stored, tuple) else (stored,)
    limits = tuple(allowed) if isinstance(allowed, list) else (allowed,) * len(numbers)
    if verdict not in VERDICTS or number in CLAIMS or len(limits) != len(numbers) or (verdict != "true" and not why):
        raise ValueError(f"claim {number} is recorded twice, or without verdict, reason or limits")
    CLAIMS[number] = Claim(number, says, where, verdict, why, shows, numbers, limits, None, source)

    def register(measure: Measure) -> Measure:
        CLAIMS[number] = replace(CLAIMS[number], measure=measure)
        return measure

    return register


def run(item: Claim) -> Numbers:
    """Compute a claim's numbers."""
    assert item.measure is not None
    found = item.measure()
    return found if isinstance(found, tuple) else (found,)


def _is_near(number: float, stored: float, allowed: Allowed) -> bool:
    if isinstance(allowed, tuple):
        return allowed[0] <= number <= allowed[1]
    return abs(number - stored) <= allowed * abs(stored)
