"""Runs of two processes of which one is killed: the other names it, and resumed they end with the same bits."""

import dataclasses
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np

from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.config import TrainConfig
from tests.campaign.forked import Running, find_port, make_folder, start_run
from tests.campaign.kills import MODELS, SECONDS, draw_moment, find_difference, finish, make_run, read_losses
from tests.campaign.tally import Tally

ROUND = 3
STRATEGIES = ("ddp", "ddp", "zero1", "zero2", "zero3")
_LOST = r"jpmhc: (rank|ranks) .*lost (after step \d+; (--resume latest goes on from step-\d+|nothing was saved)|before)"


def run(rng: np.random.Generator, size: int) -> Tally:
    """Kill one of two processes `size` times."""
    tally = Tally()
    strategy = STRATEGIES[rng.integers(len(STRATEGIES))]
    model = MODELS[rng.integers(3)]
    if strategy != "ddp":
        import deepspeed  # noqa: F401 - so that the processes need not
    with make_folder() as name:
        folder = Path(name)
        whole = make_pair(folder / "whole", model, strategy)
        fault = next(filter(None, map(finish, start_pair(whole, folder))), None)
        if fault:
            tally.fail(f"{strategy} {model}: the run that is not killed: {fault}")
            return tally
        expected = read_pair(whole.out)
        while tally.tried < size:
            config = make_pair(folder / "killed", model, strategy)
            kills, fault = kill_one_until_done(rng, config, folder, size - tally.tried)
            fault = fault or find_difference(read_pair(config.out), expected)
            for _ in kills[1:] if fault else kills:
                tally.hold()
            if fault:
                tally.fail(f"{strategy} {model}, killed {', '.join(kills)}: {fault}")
            shutil.rmtree(config.out, ignore_errors=True)
    return tally


def make_pair(out: Path, model: dict[str, Any], strategy: str) -> TrainConfig:
    """Make the configuration of a short run of two processes."""
    return dataclasses.replace(make_run(out, model), steps=6, strategy=strategy, patience=30.0)


def start_pair(config: TrainConfig, folder: Path, prepare: Any = lambda: None, which: int = 0) -> list[Running]:
    """Start two processes, of which one is prepared."""
    port = find_port()
    return [
        start_run(config, folder / f"output-{rank}", *[prepare] * (rank == which), rank=rank, size=2, port=port)
        for rank in (0, 1)
    ]


def kill_one_until_done(
    rng: np.random.Generator, config: TrainConfig, folder: Path, most: int
) -> tuple[list[str], str | None]:
    """Start a run, kill one of its processes, go on and so on; returns the kills, and what went wrong if anything."""
    kills: list[str] = []
    for _ in range(100):
        saved = checkpoint.list_folders(config.out)
        if not saved:
            shutil.rmtree(config.out, ignore_errors=True)
        going = dataclasses.replace(config, resume="latest" if saved else "no")
        if len(kills) >= most:
            return kills, next(filter(None, map(finish, start_pair(going, folder))), None)
        which, (moment, prepare) = int(rng.integers(2)), draw_moment(rng)
        pair = start_pair(going, folder, prepare, which)
        if moment.startswith("after") and pair[which].wait(float(moment.split()[1])) is None:
            pair[which].kill(signal.SIGKILL)
        status, rest = pair[which].wait(SECONDS), pair[1 - which].wait(SECONDS)
        if status == 0 and rest == 0:
            if kills:
                return kills, None
            shutil.rmtree(config.out)  # the moment came after the end: once more
            continue
        kills.append(f"rank {which} {moment}")
        if fault := judge_survivor(pair[1 - which], rest, which):
            for process in pair:
                process.kill(signal.SIGKILL)
            return kills, f"{fault} (rank {which} ended with {status})"
    return kills, "the run is not done after 100 starts"


def judge_survivor(survivor: Running, status: int | None, lost: int) -> str | None:
    """Say what is wrong about how the process that was not killed ended, or return None."""
    said = survivor.said()
    if status == 0:
        return None  # it was done when the other one was killed
    if status is None or "Traceback" in said:
        return f"the other one {'hung' if status is None else 'ended'}: {said[-300:]!r}"
    found = re.search(_LOST, said) or re.search("jpmhc: the processes did not meet", said)
    named = found is None or not found[0].startswith("jpmhc: rank") or str(lost) in found[0].partition("lost")[0]
    return None if found and named else f"the other one did not name rank {lost}: {said[-300:]!r}"


def read_pair(out: Path) -> dict[str, Any] | None:
    """Load all that a finished run of two processes has saved."""
    try:
        found = checkpoint.choose_checkpoint(out, "latest")
    except ValueError:
        return None
    return {"shared": found.shared(), "ranks": [found.rank(0), found.rank(1)], "losses": read_losses(out)}
