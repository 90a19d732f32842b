"""Evaluate the checkpoints of a run, apart from training: load, rebuild the task, ask, score, write."""

import dataclasses
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from jpmhc import checks
from jpmhc.trm.model import RecursiveModel
from jpmhc.trm.model.device import refuse_device
from jpmhc.trm.tasks import counter
from jpmhc.trm.tasks.arc import Arc, ArcConfig, vote
from jpmhc.trm.tasks.arc.scores import ArcScorer, Candidate
from jpmhc.trm.tasks.batch import Scorer, Task
from jpmhc.trm.tasks.evaluate import answers_of, evaluate
from jpmhc.trm.training.checkpoint import Checkpoint, load_model, locate
from jpmhc.trm.training.distributed import World, join
from jpmhc.trm.training.progress import Display

FORMAT = "jpmhc evaluation 1"


@dataclass(frozen=True)
class Choices:
    """What checkpoints are asked, and how."""

    variants: int | None = None
    """Variants of each puzzle that are asked about, drawn at random; None: all. Fewer are faster and bring an error,
    which is reported."""
    sample_seed: int = 0
    """Decides which variants are drawn."""
    batch: int = 256
    """Rows asked about at a time, on each process."""
    weights: Literal["average", "last"] = "average"
    """The running average of the weights, or the weights of the last step."""
    test_on: Literal["evaluation", "training"] | None = None
    """Whose tests are asked about (ARC); None: as the run was configured."""
    extra_tasks: Path | None = None
    """Where the run's extra tasks lie now, if they have moved (ARC)."""
    evaluation_tasks: Path | None = None
    """Where the run's evaluation tasks lie now, if they have moved (ARC)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    compile: bool = False
    """Compile the model first: half a minute at the start, for evaluations that take longer than a few."""

    def __post_init__(self) -> None:
        checks.at_least_one(self.variants, "variants")
        checks.at_least_one(self.batch, "batch")
        counter.refuse_seed(self.sample_seed, "sample_seed")


@dataclass(frozen=True)
class EvaluateConfig(Choices):
    """An evaluation."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs, whose newest checkpoints are taken, or of checkpoints."""
    pool: bool = False
    """Also count the votes of all checkpoints together (ARC)."""
    out: Path | None = None
    """File for the results; None: in the run's folder, named after the step and the choices above."""


@dataclass(frozen=True)
class PredictConfig(Choices):
    """A prediction."""

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of a run, whose newest checkpoint is taken, or of a checkpoint."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks to answer; empty: all that the run tests."""
    out: Path | None = None
    """File for the answers, in the form that ARC Prize takes; None: in the run's folder, named after the step and the
    choices above."""


def evaluate_checkpoints(
    config: EvaluateConfig, report: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Score every checkpoint and, where asked, all of them together; the first process writes the file.

    Several processes (torchrun) share the rows of each checkpoint.

    Args:
        config: The evaluation.
        report: Told what was found, on the first process, before the file is written: a full disk costs no score.
    """
    if not config.runs:
        raise ValueError("name at least one folder of a run or of a checkpoint to evaluate.")
    if len(config.runs) > 1 and config.out is None:
        raise ValueError("name a file for the results of several checkpoints with --out.")
    checkpoints = [locate(run) for run in config.runs]
    out = config.out or default_out(checkpoints[0], "evaluations", config)
    _require_writable(out)
    results, scorers, prints = [], [], set()
    with join(config.device) as world, Display(world.rank == 0) as display:
        for checkpoint in checkpoints:
            refuse_device(checkpoint.config.model, world.device)
        for checkpoint in checkpoints:
            task = rebuild(checkpoint, config, display)
            prints.add(task.fingerprint())
            if config.pool and not isinstance(task, Arc):
                raise ValueError(f"{checkpoint.path} has no votes to pool: pooling is for ARC.")
            if config.pool and len(prints) > 1:
                raise ValueError(f"{checkpoint.path} was trained on other data than those before it: no pooling.")
            model = load_model(checkpoint, ema=config.weights == "average", device=world.device)
            scorer = task.scorer(task.test_selection(config.variants, config.sample_seed))
            if not scorer.scorable:
                raise ValueError(
                    f"no test of {checkpoint.path} has a known answer to score: jpmhc predict writes its answers."
                )
            seconds = _ask(task, scorer, model, config, world, display, str(checkpoint.path))
            result = _described(checkpoint, scorer.result(), seconds, len(scorer.rows))
            results.append({"tests": tested(task), **result})
            scorers.append(scorer)
        pooled = None
        if config.pool:
            votes = [scorer for scorer in scorers if isinstance(scorer, ArcScorer)]
            pooled = votes[-1].result(pool=votes[:-1])
        found = {
            "format": FORMAT,
            "choices": json.loads(json.dumps({**dataclasses.asdict(config), "out": out}, default=str)),
            "processes": world.size,
            "torch": torch.__version__,
            "results": results,
            "pooled": pooled,
        }
        if world.rank == 0:
            if report is not None:
                report(found)
            _write(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def summary(metrics: dict[str, Any]) -> str:
    """The main numbers of a result in one line, with the error of having taken some of the variants."""
    errors = metrics.get("standard_error") or {}
    names = ["exact_accuracy", "token_accuracy", "lm_loss"]
    if "per_task" in metrics:  # of k attempts there are no more than votes; two are what ARC Prize allows
        votes = max(test["votes"] for tests in metrics["per_task"].values() for test in tests)
        names += [f"pass@{k}" for k in vote.PASS_AT if k <= max(2, votes)]
    parts = []
    for name in names:
        if name in metrics:
            value = f"{metrics[name]:.4f}" if name == "lm_loss" else f"{100 * metrics[name]:.2f} %"
            error = errors.get(name, 0.0)
            spread = f" ± {error:.4f}" if name == "lm_loss" else f" ± {100 * error:.2f}"
            parts.append(f"{name.replace('_', ' ')} {value}{spread if error else ''}")
    return f"{metrics['rows']} rows: " + ", ".join(parts)


def tested(task: Task) -> str:
    """What kind of rows a task tests: an evaluation on rows that training showed is one of memory."""
    return "tests seen in training" if isinstance(task, Arc) and task.config.test_on == "training" else "held out"


@dataclass(frozen=True)
class Answered:
    """A test and the grids voted for most."""

    task: str
    test: int
    input: np.ndarray
    output: np.ndarray | None
    candidates: list[Candidate]


def predict(config: PredictConfig) -> tuple[list[Answered], Path]:
    """Answer tests of a run's tasks by vote; the first process writes the submission, two attempts a test.

    Returns:
        The answers, and the file that the submission is in.
    """
    if config.run is None:
        raise ValueError("name the folder of a run or of a checkpoint to predict with.")
    checkpoint = locate(config.run)
    out = config.out or default_out(checkpoint, "submissions", config, config.tasks)
    _require_writable(out)
    with join(config.device) as world, Display(world.rank == 0) as display:
        if not isinstance(checkpoint.config.task, ArcConfig):
            raise ValueError(f"{config.run} is not a run on ARC: a submission holds ARC grids.")
        refuse_device(checkpoint.config.model, world.device)
        task = rebuild(checkpoint, config, display)
        assert isinstance(task, Arc)
        tested = {task.puzzles[p].name: p for p in task.tested}
        for name in config.tasks:
            if name not in tested:
                some = ", ".join(list(tested)[:5]) + (", …" if len(tested) > 5 else "")
                raise ValueError(f"task {name} is not among the {len(tested)} that {config.run} tests ({some}).")
        rows = task.test_selection(config.variants, config.sample_seed)
        if config.tasks:
            wanted = [tested[name] for name in config.tasks]
            rows = rows[np.isin(task.tested[task.locate(rows)[0]], wanted)]
        scorer = ArcScorer(task, rows, keep_grids=True)
        model = load_model(checkpoint, ema=config.weights == "average", device=world.device)
        _ask(task, scorer, model, config, world, display, str(checkpoint.path))
        answered = []
        for name, tests in scorer.answers().items():
            for k, (pair, candidates) in enumerate(zip(task.puzzles[tested[name]].tests, tests, strict=True)):
                answered.append(Answered(name, k, pair.input, pair.output, candidates))
        if world.rank == 0:
            _write(out, json.dumps(submission(answered)) + "\n")
    return answered, out


def submission(answered: list[Answered]) -> dict[str, list[dict[str, list[list[int]]]]]:
    """Answers in the form that ARC Prize takes: for every test of a task two attempts.

    Where only one grid was voted for it is both attempts; where none was, an attempt is one black cell.
    """
    found: dict[str, list[dict[str, list[list[int]]]]] = {}
    for answer in answered:
        grids = [candidate.grid.tolist() for candidate in answer.candidates] or [[[0]]]
        attempts = {"attempt_1": grids[0], "attempt_2": grids[min(1, len(grids) - 1)]}
        found.setdefault(answer.task, []).append(attempts)
    return found


def rebuild(checkpoint: Checkpoint, choices: Choices, display: Display) -> Task:
    """The task that a checkpoint was trained on, refused where its data are not the same."""
    if choices.sample_seed and choices.variants is None:
        raise ValueError("sample_seed decides which variants are drawn: say how many with --variants.")
    config = checkpoint.config.task
    changes = {
        name: value
        for name in ("variants", "test_on", "extra_tasks", "evaluation_tasks")
        if (value := getattr(choices, name)) is not None
    }
    if changes and not isinstance(config, ArcConfig):
        raise ValueError(f"{checkpoint.path} is not a run on ARC: {', '.join(changes)} cannot be chosen.")
    changes.pop("variants", None)  # asked of the task, not part of it
    for name in ("extra_tasks", "evaluation_tasks"):
        if name in changes and getattr(config, name) is None:
            raise ValueError(
                f"{checkpoint.path} was trained without {name.replace('_', ' ')}, so that none can have moved: "
                f"leave out --{name.replace('_', '-')}."
            )
    if isinstance(config, ArcConfig):
        config = dataclasses.replace(config, **changes)
    with display.preparing("preparing the puzzles"):
        task: Task = config.build()
    if task.fingerprint() != checkpoint.fingerprint:
        raise ValueError(
            f"{checkpoint.path} was trained on other data than its configuration gives now: the task's fingerprint is "
            f"{task.fingerprint()}, not {checkpoint.fingerprint}."
        )
    return task


def default_out(checkpoint: Checkpoint, folder: str, choices: Choices, tasks: tuple[str, ...] = ()) -> Path:
    """A file in the checkpoint's run whose name tells evaluations apart that may give different results."""
    path = checkpoint.path if checkpoint.path.parent.name == "checkpoints" else checkpoint.path.resolve()
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    words = [path.name]
    words += [] if choices.variants is None else [f"variants-{choices.variants}-{choices.sample_seed}"]
    words += [] if choices.weights == "average" else [f"{choices.weights}-weights"]
    words += [] if choices.test_on is None else [f"{choices.test_on}-tasks"]
    tasks = tuple(dict.fromkeys(tasks))
    names = "-".join(tasks)
    words += [names if len(names) < 100 else f"{len(tasks)}-tasks-{zlib.crc32(names.encode()):08x}"] if tasks else []
    return run / folder / f"{'-'.join(words)}.json"


def _require_writable(path: Path) -> None:
    """Refuse a place that cannot be written to before the work is done rather than after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        path.open("a").close()
        if not known:
            path.unlink(missing_ok=True)  # another process may have been first
    except OSError as refusal:
        raise ValueError(f"{path} cannot be written to ({refusal.strerror}): name another --out.") from refusal


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as refusal:
        if path.is_file():
            path.unlink()  # half a result is none
        raise OSError(f"{path} cannot be written to ({refusal.strerror}): name another --out.") from refusal


def _ask(
    task: Task, scorer: Scorer, model: RecursiveModel, choices: Choices, world: World, display: Display, name: str
) -> float:
    start = time.monotonic()
    if choices.compile:
        model.compile_prediction()
    evaluate(
        task,
        scorer,
        answers_of(model),
        batch_size=choices.batch,
        rank=world.rank,
        world=world.size,
        gather=world.collect,
        progress=lambda done, total: display.show(f"{name}: rows", done, total),
    )
    return time.monotonic() - start


def _described(checkpoint: Checkpoint, result: dict[str, Any], seconds: float, rows: int) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "fingerprint": checkpoint.fingerprint,
        "seconds": seconds,
        "rows_per_second": rows / seconds,
        "metrics": result,
    }
