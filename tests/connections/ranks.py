"""Run a function on several gloo processes, and collect what it returns on each."""

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on(processes: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Run a function of a module on so many processes of one group, and return its results by rank.

    A process that raises an error ends all, and its error is raised here; so does the time, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run, (processes, folder, function, args), nprocs=processes, join=False, start_method="spawn"
        )
        assert context is not None
        end = time.monotonic() + timeout
        while not context.join(timeout=1):
            if time.monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} on {processes} processes took longer than {timeout} s")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(processes)]


def _run(rank: int, processes: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch 2.13 sometimes aborts while Python takes such a process down
