"""Evaluation of checkpoints after training: `jpmhc evaluate` scores answers, `jpmhc predict` writes them to a file.

Both commands load a checkpoint, rebuild its task, let the model answer the task's test rows, and write a file to the
run's folder. The file's name contains the options.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from jpmhc import checks, files
from jpmhc.checks import Count, Positive
from jpmhc.experiments.evaluation.scores import Answers, Metrics, RowScorer
from jpmhc.experiments.evaluation.votes import AnsweredTest
from jpmhc.experiments.models.losses import row_cross_entropy
from jpmhc.experiments.models.recursive import Prediction, RecursiveModel, refuse_device
from jpmhc.experiments.tasks import counter
from jpmhc.experiments.tasks.counter import Seed
from jpmhc.experiments.tasks.task import Batch, Task, TaskOptions, VotingTask
from jpmhc.experiments.training.checkpoint import Checkpoint, load_model, locate_checkpoint
from jpmhc.experiments.training.processes import ALONE, World, join_processes
from jpmhc.experiments.training.progress import Display
from jpmhc.files import explaining_write_errors, require_writable
from jpmhc.machine import use_threads

FORMAT = "jpmhc evaluation 1"
NOISE = 0.3  # standard deviation of the noise of --tries
VOTES = ".votes.json"  # suffix of the file with grids and votes that is written beside a submission


@dataclass(frozen=True)
class Choices:
    """The common options of evaluations and predictions: the test rows to answer, and how the model computes."""

    variants: Count | None = None
    """Number of randomly drawn variants of each puzzle to answer; None: all. Fewer variants are faster, with a sampling
    error that is reported."""
    sample_seed: Seed = 0  # Seed of the random choice of variants.
    batch: Count = 256  # Rows answered at a time on each process.
    weights: Literal["average", "last"] = "average"
    """Weights to use: the running average, or the weights of the last step."""
    tries: Count = 1
    """Tries per row: the first without noise, the others with noise in the model's states. The answer is the one that
    the halting head trusts most. Each try costs as much as an evaluation without noise."""
    noise: Positive | None = None  # Standard deviation of the noise of --tries, relative to the states; None: 0.3.
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device to compute on.
    compile: bool = False
    """Whether to compile the model, which takes half a minute and pays off in evaluations of several minutes."""
    task_options: TaskOptions = field(default_factory=dict)
    """Changed options of the run's task by name; the task's `changeable` has the options that may change."""

    def __post_init__(self) -> None:
        checks.fields(self)
        if self.noise is not None and self.tries == 1:
            raise ValueError("noise needs several tries, because the first try has no noise: add --tries 8")
        if self.sample_seed and self.variants is None:
            raise ValueError("sample_seed decides which variants are drawn: give their number with --variants")

    def words(self) -> list[str]:
        """Return the parts of the results file's name that describe the choices, such as `variants-20-0`.

        Choices that can change the results have different words, except for paths among the task's options.
        """
        words = [] if self.variants is None else [f"variants-{self.variants}-{self.sample_seed}"]
        words += [] if self.tries == 1 else [f"tries-{self.tries}-{self.noise or NOISE:g}"]
        words += [] if self.weights == "average" else [f"{self.weights}-weights"]
        return words + [f"{value}-tasks" for value in self.task_options.values() if not isinstance(value, Path)]


@dataclass(frozen=True)
class EvaluateConfig(Choices):
    """The settings of an evaluation."""

    runs: tuple[Path, ...] = ()  # Folders of checkpoints, or of runs, whose newest checkpoint is used.
    pool: bool = False  # Whether to score also the votes of all checkpoints together (ARC).
    out: Path | None = None
    """File for the results; None: a file in the run's folder, named after the step and the options."""


@dataclass(frozen=True)
class PredictConfig(Choices):
    """The settings of a prediction."""

    run: Path | None = None  # Folder of a checkpoint, or of a run, whose newest checkpoint is used.
    tasks: tuple[str, ...] = ()  # Names of the tasks to answer; empty: all tasks that the run tests.
    out: Path | None = None
    """File for the answers, in the format of ARC Prize; None: a file in the run's folder, named after the step and the
    options."""


def evaluate_checkpoints(config: EvaluateConfig, report: Callable[[str], None] = lambda line: None) -> Metrics:
    """Score every checkpoint and, with `config.pool`, all their votes together; the first process writes the results.

    Several processes (torchrun) divide the rows of each checkpoint among themselves. The first process calls `report`
    with a line about every checkpoint before it writes the file, so that a full disk loses no score.
    """
    if not config.runs:
        raise ValueError("name at least one folder of a run or of a checkpoint to evaluate")
    if len(config.runs) > 1 and config.out is None:
        raise ValueError("several checkpoints need a file for their results: give --out FILE")
    checkpoints = [locate_checkpoint(run) for run in config.runs]
    out = config.out or name_result_file(checkpoints[0], "evaluations", config.words())
    require_writable(out)
    results, scorers, lines = [], [], []
    with join_processes(config.device) as world, Display(world.rank == 0) as display:
        for checkpoint in checkpoints:
            refuse_device(checkpoint.config.model, world.device)
            if config.pool:
                require_votes(checkpoint, "no votes to pool")
                if checkpoint.fingerprint != checkpoints[0].fingerprint:
                    raise ValueError(
                        f"--pool needs checkpoints trained on the same data: {checkpoint.path} was trained on other "
                        f"data than {checkpoints[0].path}"
                    )
        for checkpoint in checkpoints:
            result, scorer = score_checkpoint(checkpoint, config, world, display)
            lines.append(f"{checkpoint.path}: {result['tests']}: {scorer.summarize(result['metrics'])}")
            results.append(result)
            scorers.append(scorer)
        pooled = None
        if config.pool:
            pooled = scorers[-1].result(pool=scorers[:-1])
            lines.append(f"all checkpoints pooled: {scorers[-1].summarize(pooled)}")
        evaluation = {
            "format": FORMAT,
            "choices": json.loads(json.dumps({**dataclasses.asdict(config), "out": out}, default=str)),
            "processes": world.size,
            "torch": torch.__version__,
            "results": results,
            "pooled": pooled,
        }
        if world.rank == 0:
            for line in lines:
                report(line)
            with explaining_write_errors(out):
                files.write_json(out, evaluation, indent=1)
    return evaluation


def predict_answers(config: PredictConfig) -> tuple[list[AnsweredTest], Path]:
    """Answer the chosen tests by vote and write the submission; unless `config.out` is set, write the votes, too.

    Only the first process writes files. Returns the answers and the path of the submission.
    """
    if config.run is None:
        raise ValueError("name the folder of a run or of a checkpoint to predict with")
    checkpoint = locate_checkpoint(config.run)
    require_votes(checkpoint, "no answers to hand in")
    out = config.out or name_result_file(checkpoint, "submissions", config.words(), config.tasks)
    require_writable(out)
    with join_processes(config.device) as world, Display(world.rank == 0) as display:
        refuse_device(checkpoint.config.model, world.device)
        task = rebuild_task(checkpoint, config, display)
        assert isinstance(task, VotingTask)
        rows = task.test_selection(config.variants, config.sample_seed)
        scorer = task.scorer(task.rows_of_puzzles(rows, config.tasks) if config.tasks else rows, keep_grids=True)
        answer_rows(scorer, task, checkpoint, config, world, display)
        answered = scorer.answered()
        if world.rank == 0:
            with explaining_write_errors(out):
                files.write_json(out, task.submission(answered))
                if config.out is None:
                    files.write_json(out.with_suffix(VOTES), list_votes(answered))
    return answered, out


def score_checkpoint(
    checkpoint: Checkpoint, choices: Choices, world: World, display: Display
) -> tuple[Metrics, RowScorer]:
    """Score one checkpoint; return its record for the results' file, and its filled scorer."""
    task = rebuild_task(checkpoint, choices, display)
    scorer = task.scorer(task.test_selection(choices.variants, choices.sample_seed))
    if not scorer.scorable:
        raise ValueError(f"no test of {checkpoint.path} has a known answer to score: jpmhc predict writes its answers")
    seconds = answer_rows(scorer, task, checkpoint, choices, world, display)
    result = {
        "tests": task.test_kind,
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "fingerprint": checkpoint.fingerprint,
        "seconds": seconds,
        "rows_per_second": len(scorer.rows) / seconds,
        "metrics": scorer.result(),
    }
    return result, scorer


def answer_rows(
    scorer: RowScorer, task: Task, checkpoint: Checkpoint, choices: Choices, world: World, display: Display
) -> float:
    """Fill a scorer with a checkpoint's answers, and return the seconds that the answers took."""
    model = load_model(checkpoint, task, ema=choices.weights == "average", device=world.device)
    if choices.compile:
        model.compile_prediction()
        display.say("compiling the model: half a minute or more before the first rows")
    start = time.monotonic()
    with use_threads(checkpoint.config.threads):
        fill_scorer(
            scorer,
            task,
            greedy_answers(model, choices.noise or NOISE, choices.tries),
            batch_size=choices.batch,
            world=world,
            progress=lambda done, total: display.show(f"{checkpoint.path}: rows", done, total),
        )
    return time.monotonic() - start


def fill_scorer(
    scorer: RowScorer,
    task: Task,
    answer: Callable[[Batch], Answers],
    *,
    batch_size: int,
    world: World = ALONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Answer the test rows of an empty scorer with the function `answer`, and record the answers in the scorer.

    The processes of `world` divide the rows among themselves; every process must call this function with the same rows,
    and has the complete scorer afterwards. The scorer's content does not depend on the number of processes, unless the
    answers do. Memory is bounded by one batch and the scorer's few bytes per row. `progress` is called with the number
    of finished rows and the number of all rows of this process, first with 0.
    """
    mine = scorer.rows[world.rank :: world.size]
    progress(0, len(mine))
    for start in range(0, len(mine), batch_size):
        part = mine[start : start + batch_size]
        batch = task.test_examples(part)
        scorer.update(part, batch.labels, answer(batch))
        progress(start + len(part), len(mine))
    for collected in world.collect(scorer.collected()):
        scorer.merge(collected)


def greedy_answers(model: RecursiveModel, noise: float = 0.0, tries: int = 1) -> Callable[[Batch], Answers]:
    """Return a function that answers batches with a model's most likely tokens after all its supervision steps.

    The model answers each row `tries` times. The first try has no noise; each other try adds normal noise with the
    standard deviation `noise` to the model's states. A row's answer is the try with the highest halting logit. The
    answers are on the CPU.
    """
    device = next(model.parameters()).device

    def answer(batch: Batch) -> Answers:
        batch = batch.to(device)
        best = model.predict(batch.inputs, batch.identifiers)
        for number in range(1, tries):
            other = model.predict(batch.inputs, batch.identifiers, RowNoise(batch, number, noise))
            trusted = other.q_halt > best.q_halt
            best = Prediction(
                torch.where(trusted[:, None, None], other.logits, best.logits),
                torch.where(trusted, other.q_halt, best.q_halt),
            )
        return Answers(
            tokens=best.logits.argmax(-1).cpu(),
            confidence=torch.sigmoid(best.q_halt.double()).cpu(),
            loss=row_cross_entropy(best.logits, batch.labels).cpu(),
        )

    return answer


class RowNoise:
    """Normal noise for the recursive model's states of a batch, in try number `number`.

    A row's noise depends on its inputs, its identifier and the try, but not on the other rows of its batch. The noise
    has the standard deviation `scale`; the states have root mean square one.
    """

    def __init__(self, batch: Batch, number: int, scale: float) -> None:
        self.scale, self.device = scale, batch.inputs.device
        contents = [zlib.crc32(row.tobytes()) for row in batch.inputs.cpu().numpy()]
        seeds = counter.bits(number, batch.identifiers.cpu().numpy(), contents)
        self.generators = [torch.Generator(self.device).manual_seed(int(seed >> 1)) for seed in seeds]

    def __call__(self, state: Tensor) -> Tensor:
        """Return a state with new noise. [B, ...]"""
        rows = [torch.randn(state.shape[1:], generator=one, device=self.device) for one in self.generators]
        return state + (self.scale * torch.stack(rows)).to(state.dtype)


def rebuild_task(checkpoint: Checkpoint, choices: Choices, display: Display) -> Task:
    """Build a checkpoint's task with the task options in `choices`.

    Raises a ValueError if the task's data differ from the data on which the checkpoint was trained.
    """
    if choices.variants is not None:
        require_votes(checkpoint, "no variants to choose")
    config = checkpoint.config.task.override(choices.task_options)
    with display.preparing("preparing the puzzles"):
        task = config.build()
    if task.fingerprint() != checkpoint.fingerprint:
        raise ValueError(
            f"{checkpoint.path} was trained on other data than its configuration gives now: the task's fingerprint is "
            f"{task.fingerprint()}, not {checkpoint.fingerprint}"
        )
    return task


def require_votes(checkpoint: Checkpoint, lack: str) -> None:
    """Raise a ValueError unless variants vote on the answers in the checkpoint's task.

    The message says that the checkpoint has `lack`, such as "no votes to pool".
    """
    if not checkpoint.config.task.votes:
        raise ValueError(f"{checkpoint.path} has {lack}: in its task, no variants vote on the answer")


def name_result_file(checkpoint: Checkpoint, folder: str, words: Sequence[str], puzzles: Sequence[str] = ()) -> Path:
    """Return the path of the results file in the subfolder `folder` of the checkpoint's run.

    The path contains `words` (see `Choices.words`) and the names of the answered puzzles (empty: all puzzles), so that
    different choices have different paths.
    """
    path = checkpoint.path if checkpoint.path.parent.name == "checkpoints" else checkpoint.path.resolve()
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    puzzles = list(dict.fromkeys(puzzles))
    names = "-".join(puzzles)
    chosen = [names if len(names) < 100 else f"{len(puzzles)}-tasks-{zlib.crc32(names.encode()):08x}"] if names else []
    return run / folder / f"{'-'.join([path.name, *words, *chosen])}.json"


def list_votes(answered: Sequence[AnsweredTest]) -> Mapping[str, object]:
    """Return all tests with their candidate grids and votes, ready for JSON; `jpmhc report` draws them."""
    tests = [
        {
            "task": one.puzzle,
            "test": one.test,
            "input": one.input.tolist(),
            "output": None if one.output is None else one.output.tolist(),
            "candidates": [{"grid": c.grid.tolist(), "votes": c.votes, "of": c.of} for c in one.candidates],
        }
        for one in answered
    ]
    return {"format": "jpmhc votes 1", "tests": tests}
