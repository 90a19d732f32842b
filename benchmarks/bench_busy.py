"""What the package takes while every core is busy with something else, with its own threads and with one.

    python benchmarks/bench_busy.py [--idle] [--steps 200]

A process that does nothing but count runs on each core. Beside them, each case runs in a process of its own, once in
default settings and once with `OMP_NUM_THREADS=1`: `spectra.cauchy` (n = 4, 100 layers, 400 points) and steps of the
laptop preset. A ratio near one says that nobody has to set the number of threads; where threads wait for each other, it
is ten or more.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_spectra import Case, setup
from harness import RESULTS, write_csv
from jpmhc.experiments.training import loop
from jpmhc.experiments.training.presets import PRESETS


def run_cauchy(steps: int) -> None:
    """Solve for the Cauchy transform of a hundred orthogonal skips with noise."""
    setup(Case("orthogonal", 4, 100, 400), "cpu")


def run_laptop(steps: int) -> None:
    """Train the laptop preset for some steps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        loop.train(dataclasses.replace(PRESETS["laptop"], steps=steps, evaluate_every=0, out=out))


CASES = {"cauchy": run_cauchy, "laptop": run_laptop}


def count_for_ever() -> None:
    while True:
        pass


def time_case(name: str, steps: int, threads: int | None) -> dict[str, float]:
    """Run a case in a process of its own, and return its seconds by the clock and of the processor."""
    own = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment = own if threads is None else own | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--once", name, "--steps", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the laptop preset")
    parser.add_argument("--idle", action="store_true", help="start no busy processes")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSV file goes")
    parser.add_argument("--once", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        start = time.perf_counter(), time.process_time()
        CASES[arguments.once](arguments.steps)
        print(json.dumps({"s": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1]}))
        return
    busy = 0 if arguments.idle else os.cpu_count() or 1
    others = [multiprocessing.Process(target=count_for_ever, daemon=True) for _ in range(busy)]
    for process in others:
        process.start()
    rows = []
    try:
        for name in CASES:
            one, default = time_case(name, arguments.steps, 1), time_case(name, arguments.steps, None)
            row = {"case": name, "busy_processes": busy, "cores": os.cpu_count()}
            row |= {f"default_{key}": round(value, 2) for key, value in default.items()}
            row |= {f"one_thread_{key}": round(value, 2) for key, value in one.items()}
            rows.append({**row, "ratio": round(default["s"] / one["s"], 2)})
            print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    finally:
        for process in others:
            process.terminate()
    write_csv("idle" if arguments.idle else "busy", rows, folder=arguments.folder)


if __name__ == "__main__":
    main()
