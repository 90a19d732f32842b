"""Compute the spectra that `jpmhc explore` shows, with one process a core, and write them as one file.

    python benchmarks/compute_atlas.py --out src/jpmhc/report/atlas.npz

About 1600 networks of two and four streams, a second or two each on one core; those of eight streams, which `AXES`
leaves out, would be 720 more of three seconds each. Choices whose theory a former file has are kept.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from jpmhc.spectra.atlas import MISSING, Choice, assemble_atlas, compute_choice, list_choices, read_atlas, write_atlas


def compute(choice: Choice) -> tuple[Choice, tuple[np.ndarray, np.ndarray], float]:
    torch.set_num_threads(1)
    start = time.perf_counter()
    return choice, compute_choice(choice), time.perf_counter() - start


def known(path: Path) -> dict[Choice, tuple[np.ndarray, np.ndarray]]:
    """Return the spectra that a former file has."""
    if not path.exists():
        return {}
    atlas, found = read_atlas(path), {}
    for choice in list_choices():
        if any(value not in values for values, value in zip(atlas.axes.values(), choice)):
            continue  # an axis has grown since
        place = tuple(values.index(value) for values, value in zip(atlas.axes.values(), choice))
        if atlas.theory[place][0] != MISSING:  # what the theory refused is tried again
            found[choice] = (atlas.theory[place], atlas.sampled[place])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("src/jpmhc/report/atlas.npz"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="what it may take; the rest stays missing")
    parser.add_argument("--every", type=int, default=1, help="compute every so many choices alone, to try it")
    options = parser.parse_args()
    begun, found, slow = time.monotonic(), known(options.out), []
    left = [choice for choice in list_choices() if choice not in found][:: options.every]
    left.sort(key=lambda choice: choice[1] * choice[2])  # the dear ones last: many streams and layers
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    try:
        for task in as_completed([pool.submit(compute, choice) for choice in left], timeout=options.seconds):
            if task.exception() is not None:
                print(f"failed: {task.exception()}", flush=True)
                continue
            choice, result, seconds = task.result()
            found[choice] = result
            slow.append((seconds, choice))
            if len(slow) % 100 == 0:
                print(f"{len(slow)} of {len(left)}, {time.monotonic() - begun:.0f} s", flush=True)
    except TimeoutError:
        print("out of time", flush=True)
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    missing = [choice for choice, (mine, _) in found.items() if mine[0] == MISSING]
    print(f"{len(found)} spectra, {len(missing)} without theory: {missing[:10]}")
    print("slowest:", sorted(slow, key=lambda pair: -pair[0])[:10])
    print(f"mean {np.mean([seconds for seconds, _ in slow]):.2f} s")
    print("wrote", write_atlas(assemble_atlas(found), options.out))
    for worker in workers:  # those that are still at work when the time is over
        worker.kill()


if __name__ == "__main__":
    main()
