"""A comparison: every mixer is trained with every seed on one task, and the runs are set against each other."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from jpmhc import checks
from jpmhc.experiments.comparison import folder
from jpmhc.experiments.comparison.experiment import PLAIN, Experiment, Show
from jpmhc.experiments.comparison.language import LanguageExperiment
from jpmhc.experiments.comparison.statistics import summarize
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.training.run_folder import explaining_write_errors, lock_folder
from jpmhc.mixers import MIXERS

_SECONDS = 1.0  # between looks at what several processes have done


@dataclass(frozen=True)
class Comparison:
    """Mixers × seeds on one experiment."""

    experiment: Experiment = field(default_factory=LanguageExperiment)
    """What is trained."""
    mixers: tuple[str, ...] = (PLAIN, *MIXERS)
    """Mixers to train; plain is the model with plain residual connections. More can be added later."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of initial weights and of the order of the data. More can be added later."""
    baseline: str = PLAIN
    """The mixer that is subtracted from the others, seed by seed."""
    processes: int = 1
    """Runs trained at the same time; on one GPU they share it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    out: Path = Path("out/compare")
    """Folder of the comparison. Finished runs in it are not done again."""

    def __post_init__(self) -> None:
        checks.at_least_one(self.processes, "processes")
        known = (PLAIN, *MIXERS)
        for mixer in (*self.mixers, self.baseline):
            checks.choice(mixer, known, "mixer")
        for name, values in (("mixers", self.mixers), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(
                    f"{name} must be one or more, each named once, not {' '.join(map(str, values)) or 'none'}"
                )
        for seed in self.seeds:
            counter.refuse_seed(seed, "each seed")
        if self.baseline not in self.mixers:
            raise ValueError(
                f"the baseline {self.baseline} must be among the mixers, which are {', '.join(self.mixers)}"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda was asked for, but PyTorch sees no CUDA device")
        self.experiment.check(self.mixers)


def compare(comparison: Comparison, show: Show = lambda name, done, total: None) -> dict[str, Any]:
    """Train what is missing, and write everything to `comparison.json`.

    Args:
        comparison: What to compare, and where.
        show: Called with the name of a run and how far it is, or with "runs" and how many have ended.

    Returns:
        What the file holds, see `collect`.
    """
    out = comparison.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder for the comparison")
    with explaining_write_errors(out):
        folder.open_folder(out, describe_settings(comparison))
    with lock_folder(out, new=False):
        train_missing(comparison, show)
        result = collect(comparison)
        folder.write_json(out / "comparison.json", result)
    return result


def collect(comparison: Comparison) -> dict[str, Any]:
    """Read the runs of a comparison that have ended.

    Returns:
        - `settings`: `task` (its `kind` and options), `mixers`, `seeds`, `baseline`, and all else that was set;
        - `summary`: a dictionary for each mixer, see `statistics.summarize`;
        - `runs`: all runs, see `experiment`.
    """
    runs = list(folder.read_runs(comparison.out, comparison.mixers, comparison.seeds))
    chosen = {name: getattr(comparison, name) for name in ("mixers", "seeds", "baseline")}
    return {
        "settings": {**describe_settings(comparison), **chosen},
        "summary": summarize(runs, comparison.mixers, comparison.baseline),
        "runs": runs,
    }


def describe_settings(comparison: Comparison) -> dict[str, Any]:
    """Return what all runs of a folder must share; parameters are matched within one list of mixers."""
    settings = comparison.experiment.settings()
    matched = {"matched_with": comparison.mixers} if settings.get("match_parameters") else {}
    return {**settings, **matched}


def train_missing(comparison: Comparison, show: Show) -> None:
    """Train every mixer and seed that has no file yet, in this process or in several."""
    total = len(comparison.mixers) * len(comparison.seeds)
    parts = divide_work(comparison)
    if comparison.processes == 1 or len(parts) < 2:
        done = total - sum(len(seeds) for _, seeds in parts)
        for mixer, seeds in parts:
            show("runs", done, total)
            train_part(comparison, mixer, seeds, show)
            done += len(seeds)
        return
    count = min(comparison.processes, len(parts))
    threads = max(1, (os.cpu_count() or 1) // count)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting = {pool.submit(train_part, comparison, mixer, seeds) for mixer, seeds in parts}
        try:
            while waiting:
                ended, waiting = wait(waiting, _SECONDS, FIRST_EXCEPTION)
                for part in ended:
                    part.result()
                show("runs", total - sum(len(seeds) for _, seeds in divide_work(comparison)), total)
        except BrokenProcessPool:
            raise ValueError(
                "a process was killed while it trained, perhaps for want of memory: the same command with fewer "
                "processes goes on with the runs that are missing"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()  # those that still train, if this one stops early; their finished runs are kept


def divide_work(comparison: Comparison) -> list[tuple[str, tuple[int, ...]]]:
    """Group the runs that are missing: by mixer, which compiles once, and finer where that leaves processes idle."""
    parts = []
    cuts = -(-comparison.processes // len(comparison.mixers))
    for mixer in comparison.mixers:
        missing = [seed for seed in comparison.seeds if not folder.run_path(comparison.out, mixer, seed).exists()]
        size = -(-len(missing) // cuts)
        parts += [(mixer, tuple(missing[i : i + size])) for i in range(0, len(missing), max(1, size))]
    return parts


def train_part(
    comparison: Comparison, mixer: str, seeds: Sequence[int], show: Show = lambda name, done, total: None
) -> None:
    """Train one mixer with some seeds, and write each run when it has ended."""
    out = comparison.out
    cuda = comparison.device == "cuda" or (comparison.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    for run in comparison.experiment.train(mixer, comparison.mixers, seeds, out / "training", device, show):
        folder.write_json(folder.run_path(out, mixer, run["seed"]), run)
