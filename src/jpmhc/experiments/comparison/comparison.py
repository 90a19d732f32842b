"""A comparison trains arms (mixers with options) with several learning rates and seeds, and compares their losses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

import torch

from jpmhc import checks
from jpmhc.checks import Count, Positive
from jpmhc.experiments.comparison import folder
from jpmhc.experiments.comparison.experiment import PLAIN, Experiment, Job, Run, Show, sort_options
from jpmhc.experiments.comparison.language import LanguageExperiment
from jpmhc.experiments.comparison.queue import Queue, work_alone, work_together
from jpmhc.experiments.comparison.statistics import ArmSummary, EqualMeans, compare_means, summarize
from jpmhc.experiments.tasks.counter import Seed
from jpmhc.experiments.training.run_folder import lock_folder
from jpmhc.files import explaining_write_errors
from jpmhc.mixers import MIXERS


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison: arms × learning rates × seeds on one experiment."""

    experiment: Experiment = field(default_factory=LanguageExperiment)  # The experiment that all runs repeat.
    arms: tuple[str, ...] = (PLAIN, *MIXERS)
    """Arms to train: plain, plain-wide, plain-long or a mixer, and options such as cayley:streams=2,read=sigmoid. More
    can be added later."""
    learning_rates: tuple[Positive, ...] = ()
    """Learning rates. The first seed is trained with all learning rates, the other seeds with the arm's best one. If
    none is named, the experiment's default is used."""
    seeds: tuple[Seed, ...] = (0,)  # Seeds of initial weights and of the order of the data. More can be added later.
    baselines: tuple[str, ...] = (PLAIN, "identity")
    """Arms whose losses are subtracted from the others' seed by seed; arms that were not trained are left out."""
    processes: Count = 1  # Number of runs trained at the same time, on the same GPU.
    minutes: Positive | None = None
    """Time limit of the command. No run is started that cannot end in time, and unfinished runs are saved for the next
    command."""
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device to train on.
    out: Path = Path("out/compare")  # Folder for comparison.json, .md, .png, .html. Finished runs are not repeated.
    runs: tuple[Path, ...] = ()  # Files comparison.json of other folders with the same settings; their runs are copied.

    def __post_init__(self) -> None:
        for name in ("arms", "baselines"):
            object.__setattr__(self, name, tuple(map(sort_options, getattr(self, name))))
        checks.fields(self)
        for name, values in (("arms", self.arms), ("seeds", self.seeds), ("learning rates", self.rates)):
            if not values or len(set(values)) < len(values):
                raise ValueError(
                    f"{name} must be one or more, each named once, not {' '.join(map(str, values)) or 'none'}"
                )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda was asked for, but PyTorch sees no CUDA device")
        self.experiment.check(self.arms)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates, or the experiment's default if none is named."""
        return self.learning_rates or (self.experiment.run.lr,)


class Result(TypedDict):
    """The content of `comparison.json`."""

    settings: dict[str, object]  # shared by all runs; `settings["task"]["kind"]` names the experiment
    summary: list[ArmSummary]
    equal_means: list[EqualMeans]
    runs: list[Run]


def compare(
    comparison: Comparison, show: Show = lambda job, progress: None, say: Callable[[str], None] = lambda line: None
) -> Result:
    """Train the runs that the comparison's folder lacks, and write the results to `comparison.json` after every run.

    `show` is called with a job and its progress, and `say` with a sentence about each finished run.
    """
    deadline = None if comparison.minutes is None else time.monotonic() + 60 * comparison.minutes
    out = comparison.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder for the comparison")
    with explaining_write_errors(out):
        folder.open_folder(out, comparison.experiment.settings())
    with lock_folder(out, new=False):
        for path in comparison.runs:
            folder.take_over_runs(out, path)
        losses = {folder.job_of(run): folder.loss_of(run) for run in folder.read_runs(out)}
        count_steps = comparison.experiment.count_steps
        queue = Queue(comparison.arms, comparison.rates, comparison.seeds, losses, count_steps, deadline)

        def ended(job: Job) -> None:
            run = folder.read_run(folder.run_path(out, job))
            say(_describe_run(run, sum(1 for _ in queue.missing())))
            folder.write_rounded(out / "comparison.json", collect(comparison))

        if any(True for _ in queue.missing()):
            cuda = comparison.device == "cuda" or (comparison.device == "auto" and torch.cuda.is_available())
            device = torch.device("cuda" if cuda else "cpu")
            if comparison.processes == 1:
                work_alone(queue, comparison.experiment.open(device), out, show, ended)
            else:
                work_together(queue, comparison.experiment, device, out, comparison.processes, show, ended)
        result = collect(comparison)
        folder.write_rounded(out / "comparison.json", result)
    if left := sum(1 for _ in queue.missing()):
        say(f"{left} runs are missing or not finished: the same command goes on with them")
    return result


def collect(comparison: Comparison) -> Result:
    """Summarize all runs in the comparison's folder: first the comparison's arms, then other arms in the folder."""
    runs = folder.read_runs(comparison.out)
    arms = tuple(dict.fromkeys([*comparison.arms, *sorted(run["arm"] for run in runs)]))
    return {
        "settings": folder.read_settings(comparison.out),
        "summary": summarize(runs, arms, comparison.baselines),
        "equal_means": compare_means(runs, arms),
        "runs": sorted(runs, key=lambda run: (arms.index(run["arm"]), run["learning_rate"], run["seed"])),
    }


def _describe_run(run: Run, left: int) -> str:
    """Return one line about a finished run; `left` is the number of runs not yet started."""
    loss = f"loss {run['final']['loss']:.4f}" if run["final"] else f"diverged at step {run['diverged']}"
    parts = [f"{folder.job_of(run)}: {loss}", f"{run['seconds']:.0f} s"]
    if (pace := run["step_seconds"]) is not None:
        parts.append(f"{1000 * pace:.1f} ms per step")
    if (speed := run["tokens_per_second"]) is not None:
        parts.append(f"{speed / 1e3:,.0f} thousand tokens per second")
    if (peak := run["peak_bytes"]) is not None:
        parts.append(f"{peak / 2**30:.1f} GiB")
    return f"{', '.join(parts)}; {left} runs not started"
