"""The machine: how many threads small matrices are worth, and how much memory is free."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads inside the context (None: as many as before), and with the user's number after it.

    Batches of matrices of a few rows gain little from a second thread. Where the cores are shared with other work they
    lose much: threads that wait for each other spin (docs/LOG.md has the times).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside the context."""
    with use_threads(1):
        yield


# What PyTorch's allocators on the host say, which raise a plain RuntimeError.
_HOST = ("can't allocate memory", "not enough memory")


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _HOST)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; on a host, cached files count as free, and the limit of a container holds."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    lines = known.read_text().splitlines() if known.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    free = available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(min(free, _free_in_container()))


_CONTAINER = Path("/sys/fs/cgroup")  # of the control group (version 2) that a container runs in


def _free_in_container() -> float:
    """Return the bytes that a container's limit leaves, cached files included; infinity without a limit."""
    try:
        limit, used = ((_CONTAINER / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (_CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except OSError:  # no container, or another kind
        return math.inf
    return math.inf if limit == "max" else int(limit) - int(used) + (int(cached[1]) if cached else 0)
