"""How many threads small matrices are worth."""

import os
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
    """Return the bytes that can be had on a device; what a host holds of files that it has read counts as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    lines = known.read_text().splitlines() if known.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
