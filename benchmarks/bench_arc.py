"""Measure the full ARC set-up: time, memory and disk it takes, and how fast it makes batches.

    python benchmarks/bench_arc.py [--extra-tasks FOLDER] [--augmentations 1000]

Before anything is timed, the labels of all test rows are fed back as predictions, through every variant: anything but
pass@1 = 100 % stops the benchmark. So does a vote that changes when one cell of one row of every puzzle is spoilt.
"""

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from harness import milliseconds, write_csv
from jpmhc.experiments.evaluation.scores import Answers
from jpmhc.experiments.tasks.arc import Arc, ArcConfig

_MIB = 2**20


def resident_memory() -> float:
    """Return the memory of this process now, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / _MIB


def bytes_written() -> int:
    """Return how many bytes this process has had written to disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def score_labels(arc: Arc, spoil: bool) -> dict[str, float]:
    """Score the labels themselves; with `spoil`, one colour of the first row of every puzzle is changed."""
    rows = arc.test_selection()
    place = arc.locate_rows(rows)[0]
    first = set(rows[np.concatenate([[0], np.flatnonzero(np.diff(place)) + 1])].tolist()) if spoil else set()
    scorer = arc.scorer(rows)
    for start in track(range(0, len(rows), 1024), "labels as predictions"):
        part = rows[start : start + 1024]
        batch = arc.test_examples(part)
        tokens = batch.labels.clone()
        for k in [k for k, row in enumerate(part) if int(row) in first]:
            tokens[k, 0] = 2 + (tokens[k, 0] - 1) % 10
        scorer.update(part, batch.labels, Answers(tokens, torch.ones(len(part)), torch.zeros(len(part))))
    return scorer.result()


def measure(extra: Path | None, augmentations: int, check: bool) -> dict[str, float]:
    """Measure one set-up, in a process of its own so that its memory is its own."""
    disk, before, start = bytes_written(), resident_memory(), time.perf_counter()
    arc = ArcConfig(extra_tasks=extra, augmentations=augmentations).build()
    seconds, after = time.perf_counter() - start, resident_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    case: dict[str, float] = {
        "puzzles": len(arc.puzzles),
        "identifiers": arc.identifier_count,
        "epoch_rows": arc.epoch_length,
        "test_rows": arc.test_rows,
        "setup_seconds": round(seconds, 2),
        "setup_peak_mib": round(peak - before, 1),
        "kept_mib": round(after - before, 1),
        "disk_bytes": bytes_written() - disk,
    }
    for spoil in (False, True) if check else ():
        start = time.perf_counter()
        result = score_labels(arc, spoil)
        name = "oracle_spoilt" if spoil else "oracle"
        case |= {f"{name}_exact": result["exact_accuracy"], f"{name}_pass@1": result["pass@1"]}
        case[f"{name}_seconds"] = round(time.perf_counter() - start, 1)
        if result["pass@1"] != 1 or (result["exact_accuracy"] == 1) == spoil:
            raise SystemExit(f"wrong: {name} scores {result['pass@1']} pass@1, {result['exact_accuracy']} exact")
    position = iter(range(10**9))
    case["batch_768_ms"] = round(milliseconds(lambda: arc.examples(768 * next(position) + np.arange(768))), 1)
    case["peak_mib_in_all"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before, 1)
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra-tasks", type=Path, default=None, help="folder of further training tasks: ConceptARC")
    parser.add_argument("--augmentations", type=int, default=1000)
    options = parser.parse_args()
    folders = [None] if options.extra_tasks is None else [options.extra_tasks, None]
    cases = []
    for k, folder in enumerate(folders):  # the test rows are the same with and without: checked once
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            cases.append(pool.apply(measure, (folder, options.augmentations, k == 0)))
    cases = [{name: case.get(name, "") for name in cases[0]} for case in cases]
    for case in cases:
        Console().print(" · ".join(f"{name} {value}" for name, value in case.items() if value != ""))
    write_csv("arc", cases)


if __name__ == "__main__":
    main()
