"""The output of `jpmhc generators`, a search for sets of permutations: the search's cost and its result.

The gap of a set is the spectral gap of the random walk whose steps are the set's permutations.
"""

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from jpmhc.files import JsonObject
from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.search import GeneratingSet, Search
from jpmhc.paper.generators.symmetric_group import cycle_notation

# The most classes that a table lists; the file lists all classes.
SHOWN = 10


def describe_question(question: Question) -> str:
    """Return a phrase that describes the sets of a search, such as "sets of 4 permutations of 5 streams"."""
    plural = "s" if question.size > 1 else ""
    words = f"sets of {question.size} permutation{plural} of {question.n} streams"
    limits = []
    if question.contains_identity:
        limits.append("hold the identity")
    if question.reversible:
        limits.append("are closed under inverses")
    return words + (" that " + " and ".join(limits) if limits else "")


def describe_cost(search: Search) -> str:
    """Return a sentence on the number of sets that a search checks, and on its duration if that is long."""
    counted = ""
    if search.classes is not None and search.subsets is not None:
        counted = f"{_number(search.subsets)} {describe_question(search.question)} in {_number(search.classes)} classes"
    if search.exhaustive:
        seconds = search.estimate_seconds() or 0
        if seconds < 2:
            return f"{counted}; looking at every class."
        return f"{counted}; looking at every class takes {_duration(seconds)} on {search.workers} cores."
    if not counted:
        counted = describe_question(search.question).capitalize()
    return f"{counted}; a local search looks at {search.work:,} of them, which proves nothing but a bound."


def _duration(seconds: int) -> str:
    for unit, length in (("years", 31_556_952), ("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"about {_number(seconds // length).removeprefix('about ')} {unit}"
    return f"about {seconds} seconds"


def _number(value: int) -> str:
    """Write a number below 10¹⁵ with all digits, and a larger number as a power of ten."""
    return f"{value:,}" if value < 10**15 else f"about 10^{len(str(value)) - 1}"


def print_result(result: GeneratingSet, plain_gap: float | None) -> None:
    """Print the best set, other sets with the same gap, and the numbers of checked and dropped sets.

    `plain_gap` is the best set's gap, computed from the n! × n! matrix of the walk on all permutations; None if it was
    not computed.
    """
    console = Console(soft_wrap=True)
    table = Table("permutation", "cycles", title=f"Spectral gap {result.gap:.10f}", title_justify="left")
    for perm in result.perms.tolist():
        table.add_row(" ".join(map(str, perm)), cycle_notation(perm))
    console.print(table)
    console.print(f"|λ₂| {1 - result.gap:.10f}; gap on the streams {result.stream_gap:.10f}.")
    if result.gap == 0:
        console.print("The walk is periodic: every such set that generates the group has odd permutations only.")
    console.print(f"No such set has a gap above {result.bound:.10f}, by theory.")
    if plain_gap is not None:
        difference = abs(plain_gap - result.gap)
        console.print(f"By the plain matrix the gap is {plain_gap:.10f} (difference {difference:.0e}).")
    if result.exhaustive:
        console.print(
            f"Looked at {result.examined:,} classes ({result.classes:,} by Burnside's lemma) that stand for "
            f"{result.covered:,} sets ({result.subsets:,} in all), in {result.seconds:.1f} s."
        )
        dropped = ", ".join(f"{_shape(shape)} {count:,}" for shape, count in result.pruned.items() if count)
        exact = result.examined - sum(result.pruned.values())
        console.print(f"Dropped by representation: {dropped or 'none'}; compared exactly: {exact:,}.")
        others = len(result.ties) - 1
        if others > 0:
            console.print(f"Classes with the same gap: {len(result.ties):,}.")
            for perms in result.ties[:SHOWN].tolist():
                console.print("  " + ", ".join(map(cycle_notation, perms)))
            if len(result.ties) > SHOWN:
                console.print(f"  … and {len(result.ties) - SHOWN:,} more (all are in the file that --json names)")
    else:
        console.print(f"Looked at {result.examined:,} sets in {result.seconds:.1f} s; a better one may exist.")


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def as_record(result: GeneratingSet, plain_gap: float | None) -> JsonObject:
    """Return a result and `plain_gap` (see `print_result`) as a dict for JSON.

    The entry `perms` can be the argument `basis` of the permutation mixer.
    """
    return {
        **asdict(result.question),
        "perms": result.perms.tolist(),
        "gap": result.gap,
        "plain_gap": plain_gap,
        "stream_gap": result.stream_gap,
        "bound": result.bound,
        "exhaustive": result.exhaustive,
        "examined": result.examined,
        "classes": result.classes,
        "covered": result.covered,
        "subsets": result.subsets,
        "pruned": {_shape(shape): count for shape, count in result.pruned.items()},
        "seconds": result.seconds,
        "ties": result.ties.tolist(),
    }
