"""The campaign: seeded attacks on runs, files, library and solver, each of which must end as documented.

    python -m tests.campaign --minutes 10 --groups kills damage --seed 0
    python -m tests.campaign --tries 2000 --groups damage --record out/campaign.jsonl
    python -m tests.campaign --tries 1000 --groups hostile-networks --processes 16
    python -m tests.campaign --tries 100 --groups transformers --suite ../transformers

A group makes its attacks in rounds, each of which depends on the seed, the group's name and the round's number alone:
`--round` repeats one. With `--record` every round is written to a file when it ends, and rounds that are there already
are counted and not made again, so that a long campaign can be ended and gone on with at any time. `--limit` keeps one
round that does not end from holding up those after it.
"""

import argparse
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from tests.campaign import transformers_suites
from tests.campaign.groups import GROUPS
from tests.campaign.tally import Tally


def run_group(
    name: str,
    seed: int,
    seconds: float,
    tries: int | None,
    record: Path | None,
    only: int | None,
    limit: int = 0,
    lane: int = 0,
    lanes: int = 1,
) -> Tally:
    """Make every `lanes`-th round of a group until its time is over or as many attacks were made as wanted.

    Args:
        name: The group.
        seed: Of the campaign.
        seconds: What the group may take, if `tries` is None; the round that is under way then is finished.
        tries: How many attacks to make.
        record: File of the rounds made so far.
        only: The number of the only round to make.
        limit: After how many seconds a round is given up, which is a failure; 0 for no limit.
        lane: The number of the first round; those between are made by other processes.
        lanes: How many processes make rounds.
    """
    group = importlib.import_module(GROUPS[name])
    known = _read_rounds(record, name, seed)
    total, started, number = Tally(), time.monotonic(), lane if only is None else only
    while total.tried < tries if tries is not None else time.monotonic() - started < seconds:
        if number in known:
            made = known[number]
        else:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
            made = _run_limited(group.run, rng, group.ROUND, limit) if limit else group.run(rng, group.ROUND)
            made.messages = [f"{name}, seed {seed}, round {number}: {message}" for message in made.messages]
            for message in made.messages:
                print(message, file=sys.stderr, flush=True)
            if record is not None:
                _append_round(record, name, seed, number, made)
        total.add(made)
        number += lanes
        if only is not None:
            break
    return total


def _run_limited(
    run: Callable[[np.random.Generator, int], Tally], rng: np.random.Generator, size: int, limit: int
) -> Tally:
    """Make one round, or count it as failed when it takes longer than the limit."""

    def give_up(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit)
    try:
        return run(rng, size)
    except _TooLong:
        made = Tally()
        made.fail(f"not ended after {limit} s")
        return made
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _TooLong(BaseException):
    """A round has taken longer than its limit; no group catches it as an error of what it attacks."""


def run_apart(name: str, processes: int, seed: int, seconds: float, tries: int | None, *others: Any) -> Tally:
    """Run a group in processes of its own: a crash is a failure, and those that fork need one that has not computed."""
    total, share = Tally(), None if tries is None else -(-tries // processes)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        lanes = [pool.submit(run_group, name, seed, seconds, share, *others, k, processes) for k in range(processes)]
        for lane in lanes:
            try:
                total.add(lane.result())
            except BrokenProcessPool:
                total.fail(f"{name}: a process of the group died")
    return total


def _read_rounds(record: Path | None, name: str, seed: int) -> dict[int, Tally]:
    if record is None or not record.exists():
        return {}
    found = {}
    for line in map(json.loads, record.read_text().splitlines()):
        if (line["group"], line["seed"]) == (name, seed):
            found[line["round"]] = Tally(**line["tally"])
    return found


def _append_round(record: Path, name: str, seed: int, number: int, made: Tally) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as file:
        line = {"group": name, "seed": seed, "round": number, "tally": dataclasses.asdict(made)}
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Run the groups that the command line names, print the table, and exit with 1 if any attack was not withstood."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all groups together; each gets an equal part")
    parser.add_argument("--tries", type=int, help="attacks of each group, however long they take")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), metavar="GROUP", help="all, if none is named")
    parser.add_argument("--suite", type=Path, help="checkout of transformers, or one test file of its models")
    parser.add_argument("--tests", default="", help="which tests of transformers' suites, as `pytest -k` takes it")
    parser.add_argument("--processes", type=int, default=1, help="how many make the rounds of a group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file of rounds made, which are not made again")
    parser.add_argument("--limit", type=int, default=0, help="seconds after which a round is given up as failed")
    parser.add_argument("--round", type=int, help="number of the only round to make")
    chosen = parser.parse_args()
    if chosen.suite is None and "transformers" in (chosen.groups or []):
        parser.error("the group transformers needs --suite, a checkout of transformers with its tests")
    transformers_suites.suite, transformers_suites.tests = chosen.suite, chosen.tests
    groups = chosen.groups or [name for name in GROUPS if name != "transformers" or chosen.suite is not None]
    processes = 1 if chosen.round is not None else max(1, chosen.processes)
    rows, started = [], time.monotonic()
    for place, name in enumerate(groups):
        begun = time.monotonic()
        left = chosen.minutes * 60 - (begun - started)  # what a group leaves over goes to those after it
        seconds = left / (len(groups) - place)
        others = chosen.record, chosen.round, chosen.limit
        made = run_apart(name, processes, chosen.seed, seconds, chosen.tries, *others)
        rows.append((name, made, time.monotonic() - begun))
        print(f"{name}: {made.held} of {made.tried} held", file=sys.stderr, flush=True)
    print(f"\n{'group':<20}{'tried':>8}{'held':>8}{'failed':>8}{'seconds':>9}")
    for name, made, took in rows:
        print(f"{name:<20}{made.tried:>8}{made.held:>8}{made.failed:>8}{took:>9.0f}")
    sys.exit(1 if any(made.failed for _, made, _ in rows) else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
