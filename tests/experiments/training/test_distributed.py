"""Two real processes (gloo) give the losses of one: replicas and all ZeRO stages."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.learner import refuse_other_run
from jpmhc.experiments.training.loop import Trainer
from jpmhc.experiments.training.processes import World
from tests.experiments.training.shared_run import STEPS, STRATEGIES, configuration, float64, precise

HERE = Path(__file__).parent
ALONE = World(0, 1, torch.device("cpu"))


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
    Trainer(configuration(folder / "single"), ALONE).run()
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
    alone = checkpoint.choose_checkpoint(runs / "single", "latest").shared()
    shared = checkpoint.choose_checkpoint(runs / run, "latest").shared()
    assert shared["core"].keys() == alone["core"].keys()
    frames = [name for name in alone["core"] if name.endswith(".frame")]
    assert len(frames) == 4
    for part in ("core", "average"):
        for name, tensor in alone[part].items():
            # Logits do not change the loss along directions that a softmax forgets; what moves them there is rounding.
            if not name.endswith("map.bias"):
                close = 1e-6 if name in frames else 2e-4
                torch.testing.assert_close(shared[part][name], tensor, rtol=0, atol=close, msg=f"{part} {name}")
    assert max((alone["core"][name] - alone["core"][frames[0]]).abs().max() for name in frames) > 1e-3  # they moved
    touched = alone["puzzles"]["weight"].abs().sum(1) > 0
    assert 0 < touched.sum() < len(touched)
    torch.testing.assert_close(shared["puzzles"]["weight"], alone["puzzles"]["weight"], rtol=0, atol=1e-6)


def test_replicas_are_one_process_that_takes_its_rows_in_two_parts(runs):
    """The same sums in the same order: equal to the bit after fifty steps, whatever the run does to differences."""
    Trainer(dataclasses.replace(configuration(runs / "parts"), accumulate=2), ALONE).run()
    parts, shared = records(runs / "parts", "train"), records(runs / "ddp", "train")
    assert [r["loss"] for r in shared.values()] == [r["loss"] for r in parts.values()]
    one, two = (checkpoint.choose_checkpoint(runs / run, "latest").shared() for run in ("parts", "ddp"))
    for part in ("core", "average", "puzzles"):
        for name, tensor in one[part].items():
            assert torch.equal(two[part][name], tensor), f"{part} {name}"


def test_in_float64_differences_are_rounding(runs):
    """In float32 this run ends 2e-2 apart, which says nothing; a fault would stay in float64, rounding goes."""
    with float64():
        Trainer(precise(runs / "precise-single"), ALONE).run()
    alone, shared = records(runs / "precise-single", "train"), records(runs / "precise", "train")
    assert len(shared) == STEPS
    for step, record in shared.items():
        assert record["loss"] == pytest.approx(alone[step]["loss"], abs=1e-14 if step <= 10 else 1e-9, rel=0), step
        assert record["gradient_norm"] == pytest.approx(alone[step]["gradient_norm"], rel=1e-8), step


def test_a_run_of_two_processes_goes_on_with_one(runs):
    """Replicas resume on any number of processes: the rows in flight are dealt out again."""
    found = checkpoint.verify_checkpoint(runs / "ddp" / "checkpoints" / "step-00000030")
    assert found.ranks == 2
    Trainer(configuration(runs / "fewer"), ALONE, found).run()
    alone, fewer = records(runs / "single", "train"), records(runs / "fewer", "train")
    for step, record in fewer.items():
        assert record["loss"] == pytest.approx(alone[step]["loss"], abs=1e-6, rel=0), step


def test_what_sharding_cannot_do_is_refused(tmp_path):
    config = dataclasses.replace(configuration(tmp_path), strategy="zero1")
    with pytest.raises(ValueError, match="torchrun"):
        Trainer(config, ALONE)


@pytest.mark.parametrize("here", STRATEGIES)
@pytest.mark.parametrize("there", STRATEGIES)
def test_checkpoints_go_from_one_strategy_to_another_only_where_the_optimisers_shards_are_the_same(here, there):
    config = configuration(Path("run"))
    written = dataclasses.replace(config, strategy=there)
    found = checkpoint.Checkpoint(Path("run/checkpoints/step-00000030"), 30, 2, written, "")
    two = World(0, 2, torch.device("cpu"))
    if here == there or {here, there} == {"zero1", "zero2"}:
        refuse_other_run(dataclasses.replace(config, strategy=here), two, found)
        return
    with pytest.raises(ValueError, match=rf"--strategy {there}; .* not fit --strategy {here}: go on with {there[:4]}"):
        refuse_other_run(dataclasses.replace(config, strategy=here), two, found)
