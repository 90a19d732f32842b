"""Runs that are killed at random moments: resumed as often as need be, they end with the bits of a run that was not.

A moment is a time, the k-th operation on a file (so that saves, renames and removals are hit between any two of them),
a point inside a step, or a point inside an evaluation. Several runs with different mixers and types are tried.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jpmhc.experiments.models.recursive import RecursiveConfig
from jpmhc.experiments.tasks.sudoku import SudokuConfig
from jpmhc.experiments.training import checkpoint, loop
from jpmhc.experiments.training.config import TrainConfig
from jpmhc.experiments.training.learner import Learner
from tests.campaign.forked import Running, make_folder, start_run
from tests.campaign.tally import Tally

ROUND = 10
SECONDS = 120.0  # after which a run counts as hanging

_RUN = TrainConfig(
    task=SudokuConfig(puzzles=8, test_puzzles=4),
    model=RecursiveConfig(dim=16, heads=2, inner_multiple=16, puzzle_slots=2, h_cycles=1, l_cycles=1, halt_max_steps=3),
    steps=8,
    batch=4,
    warmup=2,
    clip=1.0,
    ema=0.9,
    device="cpu",
    log_every=1,
    checkpoint_every=2,
    evaluate_every=3,
    evaluate_batch=2,
)
MODELS: list[dict[str, Any]] = [
    {},
    {"mixer": "cayley", "streams": 2},
    {"mixer": "grassmann", "streams": 2, "mixer_dynamic": False},
    {"mixer": "sinkhorn", "streams": 2, "compute": "bfloat16"},
]


def make_run(out: Path, model: dict[str, Any]) -> TrainConfig:
    """Make the configuration of a run of a second or so."""
    return dataclasses.replace(_RUN, out=out, model=dataclasses.replace(_RUN.model, **model))


def run(rng: np.random.Generator, size: int) -> Tally:
    """Kill runs `size` times; every run goes on until it is done, and is then compared with one that was not killed."""
    tally = Tally()
    with make_folder() as name:
        folder = Path(name)
        model = MODELS[rng.integers(len(MODELS))]
        whole = make_run(folder / "whole", model)
        if fault := finish(start_run(whole, folder / "output")):
            tally.fail(f"{model}: the run that is not killed: {fault}")
            return tally
        expected = read_state(whole.out)
        while tally.tried < size:
            killed = make_run(folder / "killed", model)
            kills, fault = kill_until_done(rng, killed, folder / "output", size - tally.tried)
            fault = fault or find_difference(read_state(folder / "killed"), expected)
            for _ in kills[1:] if fault else kills:
                tally.hold()
            if fault:
                tally.fail(f"{model}, killed {', '.join(kills)}: {fault}")
            shutil.rmtree(folder / "killed", ignore_errors=True)
    return tally


def kill_until_done(
    rng: np.random.Generator, config: TrainConfig, output: Path, most: int
) -> tuple[list[str], str | None]:
    """Start a run, kill it, go on with it and so on; returns the moments of the kills, and what went wrong."""
    kills: list[str] = []
    for _ in range(200):
        saved = checkpoint.list_folders(config.out)
        if not saved:
            shutil.rmtree(config.out, ignore_errors=True)
        going = dataclasses.replace(config, resume="latest" if saved else "no")
        if len(kills) >= most:
            return kills, finish(start_run(going, output))
        moment, prepare = draw_moment(rng)
        running = start_run(going, output, prepare)
        if moment.startswith("after") and running.wait(float(moment.split()[1])) is None:
            running.kill(signal.SIGKILL)
        status = running.wait(SECONDS)
        if status == -signal.SIGKILL:
            kills.append(moment)
        elif status != 0:
            return [*kills, moment], finish(running)
        elif kills:
            return kills, None
        else:
            shutil.rmtree(config.out)  # the moment came after the end: once more
    return kills, "the run is not done after 200 starts"


def draw_moment(rng: np.random.Generator) -> tuple[str, Callable[[], None]]:
    """Draw when a process is to be killed: what that is called, and what makes the process do it itself."""
    kind = rng.choice(["time", "file", "step", "evaluation"], p=[0.2, 0.5, 0.15, 0.15])
    if kind == "time":
        return f"after {rng.uniform(0, 3):.3f} s", lambda: None
    if kind == "file":
        count = int(rng.integers(1, 120))
        return f"at file operation {count}", lambda: die_at_file_operation(count)
    count, share = int(rng.integers(1, 5)), float(rng.random())
    owner, name = (Learner, "take_step") if kind == "step" else (loop, "fill_scorer")
    return f"in {kind} {count}, {share:.0%}", lambda: die_inside(owner, name, count, share)


def die() -> None:
    """End this process as a power failure would."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_file_operation(count: int) -> None:
    """Let this process die before its `count`-th operation that changes the folder of a run."""
    left = count

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree") or (
            event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        )
        if changes and "killed" in str(arguments[0]):
            left -= 1
            if left <= 0:
                die()

    sys.addaudithook(watch)


def die_inside(owner: Any, name: str, count: int, share: float) -> None:
    """Let this process die in the `count`-th call of a function of a class or module, after some of its operations."""
    whole, calls = getattr(owner, name), 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            left = int(share * 400)

            def watch(frame: Any, event: str, argument: Any) -> None:
                nonlocal left
                left -= 1
                if left <= 0:
                    die()

            sys.setprofile(watch)
        return whole(*arguments, **options)

    setattr(owner, name, dying)


def finish(running: Running) -> str | None:
    """Wait for a run to end; returns what went wrong, or None."""
    status = running.wait(SECONDS)
    if status is None:
        running.kill(signal.SIGKILL)
        return f"hung for {SECONDS:.0f} s"
    return None if status == 0 else f"ended with {status}: {running.said()[-300:]!r}"


def read_state(out: Path) -> dict[str, Any] | None:
    """Load all that a finished run has saved, and the losses in its log."""
    try:
        found = checkpoint.choose_checkpoint(out, "latest")
    except ValueError:
        return None
    return {"shared": found.shared(), "rank": found.rank(0), "step": found.step, "losses": read_losses(out)}


def read_losses(out: Path) -> list[tuple[int, float]]:
    """Read steps and losses from the log of a run."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def find_difference(one: Any, other: Any, where: str = "the checkpoint") -> str | None:
    """Say where two states differ in a bit, or return None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return None if same else f"{where} differs"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs: Any = ((one[key], other[key], f"{where}, {key}") for key in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = ((a, b, f"{where}, {place}") for place, (a, b) in enumerate(zip(one, other)))
    else:
        return None if type(one) is type(other) and one == other else f"{where} is {one!r:.60}, not {other!r:.60}"
    return next((fault for a, b, path in pairs if (fault := find_difference(a, b, path))), None)
