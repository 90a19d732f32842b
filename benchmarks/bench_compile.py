"""Seconds that the first call of a compiled GPT takes, for several depths, each in a process of its own.

    python benchmarks/bench_compile.py [--depths 6 12 24] [--models plain cayley] [--backends aot_eager inductor]

Each process is cold: nothing is in the caches of Inductor and Triton. A model of L layers has 2L connections. The
backend `aot_eager` only traces, forward and backward; `inductor` generates and compiles code as well. `cayley+each`
compiles each sublayer by itself instead of the whole model. The GPT is that of `bench_transformer.py`, at its size
`medium` on a GPU and `tiny` elsewhere.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from bench_transformer import DEVICE, SIZES, VOCABULARY, build
from harness import RESULTS, write_csv

FOUND = ("first_call_s", "first_call_cpu_s", "second_call_s", "graphs", "graph_breaks")


def time_first_call(depth: int, name: str, backend: str, size_name: str) -> dict[str, Any]:
    """Compile one model in this process; time the first forward and backward and the second, and count the graphs.

    The processor's time is this process's alone, without the compilers that Inductor starts beside it.
    """
    size = SIZES[size_name]._replace(layers=depth)
    tokens = torch.randint(VOCABULARY, (size.batch, size.length), device=DEVICE)
    model = build(size, name.removesuffix("+each"))
    if name.endswith("+each"):
        for block in model.blocks[0].connections:
            block.sublayer.compile(backend=backend)
    run = model if name.endswith("+each") else torch.compile(model, backend=backend)
    seconds = []
    for _ in range(2):
        start = time.perf_counter(), time.process_time()
        run(tokens).backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append([round(time.perf_counter() - start[0], 2), round(time.process_time() - start[1], 2)])
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return dict(zip(FOUND, [*seconds[0], seconds[1][0], graphs, breaks]))


def time_cold(depth: int, name: str, backend: str, size_name: str, limit: float) -> dict[str, Any]:
    """Time the first call in a new process with empty caches; its numbers are empty where it exceeds the limit."""
    row = {"model": name, "backend": backend, "size": size_name, "layers": depth, "connections": 2 * depth}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--once", str(depth), name, backend, size_name]
        try:
            done = subprocess.run(
                command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, timeout=limit, check=True
            )
        except subprocess.TimeoutExpired:
            found = dict.fromkeys(FOUND, "")
        else:
            found = json.loads(done.stdout.splitlines()[-1])
    return {**row, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", nargs="+", type=int, default=[6, 12, 24], help="layers; each has two connections")
    parser.add_argument("--models", nargs="+", default=["plain", "cayley"], help="plain or mixers, with +each or not")
    parser.add_argument("--backends", nargs="+", choices=("aot_eager", "inductor"), default=["aot_eager", "inductor"])
    parser.add_argument("--size", choices=SIZES, default="medium" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a process is given up")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSV file goes")
    parser.add_argument("--once", nargs=4, metavar=("DEPTH", "MODEL", "BACKEND", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        depth, *others = arguments.once
        print(json.dumps(time_first_call(int(depth), *others)))
        return
    rows = []
    for backend in arguments.backends:
        for name in arguments.models:
            for depth in arguments.depths:
                rows.append(time_cold(depth, name, backend, arguments.size, arguments.limit))
                print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    write_csv(f"compile_{DEVICE}", rows, DEVICE, arguments.folder)


if __name__ == "__main__":
    main()
