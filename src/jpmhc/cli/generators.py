"""The command `jpmhc generators`."""

from pathlib import Path

from jpmhc.cli.command import make_main, options_of
from jpmhc.files import require_writable, write_json
from jpmhc.paper.generators.question import Question
from jpmhc.paper.generators.random_walk import plain_spectral_gap
from jpmhc.paper.generators.search import best_generating_set, prepare_search, run_search
from jpmhc.report.generating_sets import as_record, describe_cost, print_result


def generators(
    conditions: options_of(best_generating_set, "contains_identity", "reversible"),  # type: ignore[valid-type]
    options: options_of(best_generating_set, "method", "workers", "moves", "seed", "state"),  # type: ignore[valid-type]
    streams: int = 4,
    size: int = 6,
    json: Path | None = None,
) -> None:
    """Find the sets of permutations whose random walk has the largest spectral gap.

    Example: jpmhc generators --streams 5 --size 4 --json out/generators/n5-k4.json

    The result's entry `perms` is a basis for the permutation mixer. With --state, an interrupted search continues.

    Args:
        streams: Number of streams n, 2 to 8.
        size: Number of permutations in a set.
        json: File for the result.
    """
    from jpmhc.experiments.training.progress import Display

    if json is not None and json.is_dir():
        raise ValueError(f"--json names a file for the result, and {json} is a folder")
    if json is not None:
        require_writable(json, "--json")
    question = Question(streams, size, **conditions)
    search = prepare_search(question, **options)
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
