"""Set the number of CPU threads, measure a device's free memory, and record CUDA graphs."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads inside the context, and restore it afterwards. None changes nothing.

    Batches of small matrices gain little from a second thread. If other programs use the cores too, a second thread
    costs much, because threads that wait for each other spin (docs/LOG.md has the times).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Words in the plain RuntimeError that PyTorch raises when the CPU's memory runs out.
_HOST = ("can't allocate memory", "not enough memory")


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _HOST)


def free_memory(device: torch.device) -> int:
    """Return a device's free bytes, including memory that PyTorch has reserved on a GPU but does not use.

    On a CPU, cached files count as free, and a container's limit applies.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    known = Path("/proc/meminfo")
    lines = known.read_text().splitlines() if known.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    free = available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return int(min(free, _free_in_container()))


_CONTAINER = Path("/sys/fs/cgroup")  # the control group (version 2) of a container


def _free_in_container() -> float:
    """Return the free bytes within a container's memory limit, or infinity without one; cached files are free."""
    try:
        limit, used = ((_CONTAINER / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (_CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except OSError:  # no container, or one without these files
        return math.inf
    return math.inf if limit == "max" else int(limit) - int(used) + (int(cached[1]) if cached else 0)


def record_graph(
    run: Callable[[], Result], list_tensors: Callable[[], Mapping[Any, Tensor]], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record the GPU's operations in one call of `run` as a CUDA graph; return the graph and the result of `run`.

    Before recording, `run` is called three times to compile and choose kernels. Changes of the tensors that
    `list_tensors` returns by name are then undone, and listed tensors that these calls create are set to zero.
    """
    before = {name: tensor.clone() for name, tensor in list_tensors().items()}
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.no_grad():
        for name, tensor in list_tensors().items():
            tensor.copy_(before[name]) if name in before else tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, run()
