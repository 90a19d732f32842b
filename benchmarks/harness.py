"""What every benchmark shares: timing, memory, and results as CSV with device, versions and commit."""

import csv
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import jpmhc
from jpmhc.experiments.training.log import find_commit

RESULTS = Path(__file__).parent / "results"


def milliseconds(run: Callable[[], Any], repeats: int = 20, warm_up: int = 3, device: str = "cpu") -> float:
    """Median time of one call."""
    return interleaved({"": run}, repeats, warm_up, device)[""]


def interleaved(
    runs: dict[str, Callable[[], Any]],
    repeats: int = 20,
    warm_up: int = 3,
    device: str = "cpu",
    summarise: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Median time of each, taken in turns so that a drifting machine is unfair to none."""
    for run in runs.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_once(run, device))
    return {name: summarise(found) for name, found in times.items()}


def _once(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def captured(run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """The run as a CUDA graph, and what it returned: replays cost no time on the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for the backward pass of one call, each storage counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()  # the result stays alive, so that no address is used twice
    del kept
    return sum(storages.values())


def environment(device: str = "cpu") -> dict[str, Any]:
    """Where and with what a number was obtained."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        # where there is no git, GIT_COMMIT names the commit
        "commit": os.environ.get("GIT_COMMIT") or find_commit(Path(jpmhc.__file__).parent) or "unknown",
    }


def read_csv(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Read the rows that `write_csv` wrote; none if there is no such file."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(name: str, rows: Sequence[dict[str, Any]], device: str = "cpu", folder: Path = RESULTS) -> Path:
    """Write rows with the environment beside each number, and say where; rows that were read keep their own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    here = environment(device)
    rows = [{**row, **here, **row} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
    return path


def write_table(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between the comments `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]))
    print(f"wrote the table {name} of {page}")
