"""How much memory is free, and how to tell that it ran out, on a GPU or on the host."""

import os
from pathlib import Path

import torch

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
