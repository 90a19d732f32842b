"""Processes that die, stop or hang are named by the others."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from jpmhc.experiments.training import processes
from jpmhc.experiments.training.checkpoint import verify_checkpoint
from jpmhc.experiments.training.processes import LostProcess, Pulse, join_processes, name_ranks, naming_lost_processes
from tests.experiments.training.small_run import losses, small, trained


@pytest.fixture
def store(monkeypatch):
    """A store such as torchrun has, and seconds that are shorter."""
    monkeypatch.setattr(processes, "_BEAT", 0.02)
    monkeypatch.setattr(processes, "_SILENCE", 0.2)
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


@pytest.fixture
def pulses(store):
    """Three processes that live."""
    with contextlib.ExitStack() as end:
        made = [Pulse(rank, 3) for rank in range(3)]
        for pulse in made:
            end.callback(pulse.end)
        yield made


def kill(pulse):
    """Let a process be as one that was killed: its number stays what it was."""
    pulse.end()
    pulse.store.set(f"pulse {pulse.rank}", "5")


def test_a_process_without_pulse_is_lost(pulses):
    assert pulses[1].find_silent() == []
    kill(pulses[2])
    assert pulses[1].find_silent() == [2]
    assert pulses[0].find_lost() == [2]


def test_a_process_that_left_is_lost_only_to_those_that_still_need_it(pulses):
    pulses[2].end()
    assert pulses[1].find_silent() == []
    pulses[0].waits = True
    assert pulses[1].find_lost() == [2]


def test_a_process_that_lives_and_does_not_give_up_hangs(pulses):
    pulses[0].waits = True
    assert pulses[1].find_lost() == [2]


def test_errors_of_the_transport_become_a_sentence_and_others_stay(pulses):
    kill(pulses[0])
    pulses[1].describe = lambda: "after step 7"
    naming = partial(naming_lost_processes, pulses[1])
    with pytest.raises(LostProcess, match=r"^rank 0 was lost after step 7$"), naming():
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes differ"), naming():
        raise RuntimeError("shapes differ")


def test_a_process_that_waits_elsewhere_ends_itself(pulses, monkeypatch, capfd):
    """Its main thread waits in a library; the thread of the pulse ends it, but not for one that left."""
    ended = threading.Event()
    monkeypatch.setattr(processes.os, "_exit", lambda status: (ended.set(), pulses[1].ended.set()))
    pulses[1].describe = lambda: "after step 7"
    pulses[0].end()
    pulses[1].patience = 0.1
    assert not ended.wait(0.8)
    kill(pulses[2])
    assert ended.wait(5)
    assert capfd.readouterr().err == "jpmhc: rank 2 was lost after step 7\n"


def test_a_process_ends_itself_when_the_store_does_not_answer(monkeypatch, capfd):
    """The first process has the store and is stopped; the main thread of the second one waits in a library."""
    for name, seconds in (("_BEAT", 0.02), ("_SILENCE", 0.1), ("_GRACE", 0.1)):
        monkeypatch.setattr(processes, name, seconds)
    port, made = os.pipe()
    first = os.fork()
    if first == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(made, str(store.port).encode())
        signal.pause()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", os.read(port, 20).decode())
    ended = threading.Event()
    monkeypatch.setattr(processes.os, "_exit", lambda status: (ended.set(), second.ended.set()))
    try:
        second = Pulse(1, 2, patience=0.2)
        second.describe = lambda: "after step 7"
        second.store.set("pulse 0", "left")  # or else its pulse would be missed
        assert not ended.wait(0.8)
        os.kill(first, signal.SIGSTOP)
        assert ended.wait(5)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    assert capfd.readouterr().err.startswith("jpmhc: rank 0 was lost after step 7\n")


def test_ranks_are_the_subject_of_a_sentence():
    assert [name_ranks(ranks) for ranks in ([], [1], [0, 2], [0, 2, 3])] == [
        "the connection between the processes was",
        "rank 1 was",
        "ranks 0 and 2 were",
        "ranks 0, 2 and 3 were",
    ]


def test_a_run_names_the_rank_that_dies_or_hangs(tmp_path):
    """Three runs of two real processes: one of them dies in its fourth step, hangs, or is stopped with the store."""
    script = f"""
import os, signal, time
from pathlib import Path
from jpmhc.experiments.training import processes
from jpmhc.experiments.training.learner import Learner
from tests.campaign.forked import find_port, start_run
from tests.experiments.training.small_run import small

processes._SILENCE = processes._GRACE = 0.5

def fail(how):
    step = Learner.take_step
    def failing(learner, *arguments, **options):
        if learner.step == 3:
            if how == "hangs":
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return step(learner, *arguments, **options)
    Learner.take_step = failing

folder, running = Path({str(tmp_path)!r}), []
for how in ("dies", "hangs", "stops"):
    port, config = find_port(), small(folder / f"run-{{how}}", steps=9, checkpoint_every=2, patience=1.0)
    lost = 0 if how == "stops" else 1
    failing = start_run(config, folder / "lost", lambda: fail(how), rank=lost, size=2, port=port)
    running.append((start_run(config, folder / how, rank=1 - lost, size=2, port=port), failing))
for left, failing in running:
    left.wait(60)
    for process in (left, failing):
        process.kill(signal.SIGKILL)
    with left.output.open("a") as file:
        print(left.wait(5), file=file)
"""
    subprocess.run([sys.executable, "-c", script], timeout=150, check=True)
    for how, lost in (("dies", 1), ("hangs", 1), ("stops", 0)):
        said = (tmp_path / how).read_text()
        assert "Traceback" not in said  # a busy machine adds warnings of PyTorch's store
        assert said.splitlines()[-2:] == [
            f"jpmhc: rank {lost} was lost after step 3; --resume latest goes on from step-00000002",
            "2",
        ]
        assert verify_checkpoint(tmp_path / f"run-{how}" / "checkpoints" / "step-00000002").step == 2


def test_restarts_with_the_addresses_of_lost_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ValueError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"), join_processes("cpu"):
        pass


@pytest.mark.distributed
def test_torchrun_restarts_a_run_before_and_after_its_first_checkpoint(tmp_path):
    """One of two processes dies in the second step, and after the restart in the fourth."""
    script = f"""
import os, signal
from pathlib import Path
from jpmhc.experiments.training.learner import Learner
from jpmhc.experiments.training.loop import train
from tests.experiments.training.small_run import small

step = Learner.take_step
def dying(learner, *arguments, **options):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], learner.step) in {{("0", 1), ("1", 3)}} and learner.world.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(learner, *arguments, **options)
Learner.take_step = dying
train(small(Path({str(tmp_path)!r}) / "run", checkpoint_every=2, threads=1, resume="auto"))
"""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launch, "--max-restarts", "2", "--no-python", sys.executable, "-c", script]
    subprocess.run(words, timeout=150, check=True, env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    trained(small(tmp_path / "whole", accumulate=2))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
