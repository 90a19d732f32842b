"""The command `jpmhc generators`."""

from contextlib import nullcontext
from pathlib import Path

from jpmhc.cli.command import make_main, result_folder
from jpmhc.files import write_json
from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.random_walk import plain_spectral_gap
from jpmhc.paper.generators.search import Method, prepare_search, run_search
from jpmhc.report.generating_sets import as_record, describe_cost, print_result


def generators(
    streams: int = 4,
    size: int = 6,
    contains_identity: bool = False,
    reversible: bool = False,
    method: Method = "auto",
    workers: int | None = None,
    moves: int | None = None,
    seed: int | None = None,
    state: Path | None = None,
    json: Path | None = None,
) -> None:
    """Find the sets of permutations whose random walk has the largest spectral gap.

    Example: jpmhc generators --streams 5 --size 4 --json out/generators/n5-k4.json

    The result's entry `perms` is a basis for the permutation mixer. With --state, an interrupted search continues.

    Args:
        streams: Number of streams n, 2 to 8.
        size: Number of permutations in a set.
        contains_identity: Only sets with the identity, which a mixer that starts as the plain residual needs.
        reversible: Only sets that contain the inverse of each of their elements.
        method: exhaustive checks one set of every class of equivalent sets (n up to 7); local searches locally; auto
            chooses by the number of classes.
        workers: Number of processes of an exhaustive search; by default one per core.
        moves: Number of sets that a local search checks; 500,000 by default.
        seed: Seed of a local search; 0 by default.
        state: File in which an exhaustive search saves its progress.
        json: File for the result.
    """
    from jpmhc.experiments.training.progress import Display

    if json is not None and json.is_dir():
        raise ValueError(f"--json names a file for the result, and {json} is a folder")
    with nullcontext() if json is None else result_folder(json.parent):
        question = Question(streams, size, contains_identity, reversible)
        search = prepare_search(question, method, workers=workers, state=state, moves=moves, seed=seed)
        print(describe_cost(search))
        with Display() as display:
            result = run_search(
                search, lambda done, total, gap: display.show("search", done, total, f"best gap {max(gap, 0.0):.6f}")
            )
    plain = plain_spectral_gap(result.perms) if streams <= 6 else None
    print_result(result, plain)
    if json is not None:
        print(f"wrote {write_json(json, as_record(result, plain), indent=1)}")


main = make_main(generators)
