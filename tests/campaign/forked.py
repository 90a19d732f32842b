"""Training runs in forked processes: importing torch is paid for once, so that a run that is killed costs little more.

The process that forks must not have used autograd or a thread pool of torch itself.
"""

import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # optimisers and TensorBoard import these when they are first used: in every process anew
import torch.utils.tensorboard

from jpmhc.cli.train import run_training
from jpmhc.experiments.training.config import TrainConfig


@dataclass
class Running:
    """A forked process, and the file that it writes its output to."""

    pid: int
    output: Path
    status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, negative for a signal."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process; returns its status, or None if it has not ended in time."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.status

    def kill(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def said(self) -> str:
        """Return what the process has written so far."""
        return self.output.read_text()


def start_run(
    config: TrainConfig,
    output: Path,
    prepare: Callable[[], None] = lambda: None,
    *,
    rank: int = 0,
    size: int = 1,
    port: int = 0,
) -> Running:
    """Fork a process that trains as `jpmhc train` does.

    Args:
        config: The run.
        output: File for what the process writes.
        prepare: Called in the new process before anything else.
        rank: Number of the process in its group.
        size: Processes of the group.
        port: Where the group meets.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Running(pid, output)
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        torch.set_num_threads(1)
        where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in where.items()})
        prepare()
        run_training(config)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except (ValueError, OSError) as refusal:
        print(f"jpmhc: {refusal}", file=sys.stderr)
        status = 2
    except BaseException:  # noqa: BLE001 - the process ends here, and not in what the fork copied
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder, in memory where that is possible: what a kill leaves does not depend on the disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
