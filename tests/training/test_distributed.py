"""Two real processes (gloo) give the losses of one: replicas and all ZeRO stages."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_run import STEPS, STRATEGIES, configuration

from jpmhc.training import checkpoint
from jpmhc.training.distributed import World
from jpmhc.training.loop import Trainer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder with one run per strategy on two processes, and "single" on one."""
    folder = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "shared_run.py"), str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    Trainer(configuration(folder / "single"), World(0, 1, torch.device("cpu"))).run()
    return folder


def records(folder, kind):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r for r in lines if r["kind"] == kind}


@pytest.mark.parametrize("run", [*STRATEGIES, "zero3-resumed"])
def test_losses_are_those_of_one_process(runs, run):
    alone, shared = records(runs / "single", "train"), records(runs / run, "train")
    assert sorted(shared) == list(range(31 if run.endswith("resumed") else 1, STEPS + 1))
    for step, record in shared.items():
        assert record["loss"] == pytest.approx(alone[step]["loss"], abs=1e-6, rel=0), step
        assert record["gradient_norm"] == pytest.approx(alone[step]["gradient_norm"], rel=1e-4), step
        assert record["halted"] == alone[step]["halted"], step
    assert len({round(record["loss"], 3) for record in shared.values()}) > 10  # it does train


@pytest.mark.parametrize("run", [*STRATEGIES, "zero3-resumed"])
def test_weights_frames_rows_and_averages_are_those_of_one_process(runs, run):
    alone = checkpoint.find(runs / "single", "latest").shared()
    shared = checkpoint.find(runs / run, "latest").shared()
    assert shared["core"].keys() == alone["core"].keys()
    frames = [name for name in alone["core"] if name.endswith(".frame")]
    assert len(frames) == 4
    for part in ("core", "average"):
        for name, tensor in alone[part].items():
            # Logits do not change the loss along directions that a softmax forgets; what moves them there is rounding.
            if not name.endswith("map.logits"):
                close = 1e-6 if name in frames else 2e-4
                torch.testing.assert_close(shared[part][name], tensor, rtol=0, atol=close, msg=f"{part} {name}")
    assert max((alone["core"][name] - alone["core"][frames[0]]).abs().max() for name in frames) > 1e-3  # they moved
    touched = alone["puzzles"]["weight"].abs().sum(1) > 0
    assert 0 < touched.sum() < len(touched)
    torch.testing.assert_close(shared["puzzles"]["weight"], alone["puzzles"]["weight"], rtol=0, atol=1e-6)


def test_a_run_of_two_processes_goes_on_with_one(runs):
    """Replicas resume on any number of processes: the rows in flight are dealt out again."""
    found = checkpoint.verify(runs / "ddp" / "checkpoints" / "step-00000030")
    assert found.ranks == 2
    Trainer(configuration(runs / "fewer"), World(0, 1, torch.device("cpu")), found).run()
    alone, fewer = records(runs / "single", "train"), records(runs / "fewer", "train")
    for step, record in fewer.items():
        assert record["loss"] == pytest.approx(alone[step]["loss"], abs=1e-6, rel=0), step


def test_what_sharding_cannot_do_is_refused(tmp_path):
    import dataclasses

    config = dataclasses.replace(configuration(tmp_path), strategy="zero1")
    with pytest.raises(ValueError, match="torchrun"):
        Trainer(config, World(0, 1, torch.device("cpu")))
