"""Scores of an ARC decoder, which answers each test in many variants; the answers vote."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jpmhc import files
from jpmhc.experiments.evaluation.checkpoints import VOTES, EvaluateConfig, list_votes
from jpmhc.experiments.evaluation.scores import Answers, Metrics
from jpmhc.experiments.evaluation.votes import AnsweredTest, VoteScorer
from jpmhc.experiments.models.arc_decoder import ArcDecoder
from jpmhc.experiments.models.generation import (
    LONGEST_ANSWER,
    Generator,
    WrittenTokens,
    measure_losses,
    prepare_answering,
)
from jpmhc.experiments.tasks.arc.dataset import Arc
from jpmhc.experiments.tasks.arc.sequences import read_answers, write_sequences
from jpmhc.experiments.training.arc_decoder import CHECKPOINT, load_decoder
from jpmhc.experiments.training.processes import join_processes
from jpmhc.experiments.training.progress import Display
from jpmhc.files import explaining_write_errors, require_writable
from jpmhc.machine import use_threads

SUBMISSIONS = "submissions"  # folder for a run's answers
_ROWS = 2048  # answers scored at a time
_ROUNDS = 10_000  # resamplings of the bootstrap over tasks


@dataclass(frozen=True)
class Score:
    """The scores of a decoder's answers."""

    metrics: Metrics
    intervals: dict[str, tuple[float, float]]  # 95 % intervals of the bootstrap over tasks, by metric
    answers: int
    tokens: int
    tokens_per_second: float
    seconds: float  # for answers, losses and scores together
    answered: list[AnsweredTest]  # every test with its two best grids

    def to_json(self) -> files.JsonObject:
        """Return the score without grids, ready for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "answered"}

    def write(self, path: Path, answers: Path) -> None:
        """Write the score to `path`, and the answers to `answers` in the format of ARC Prize.

        The grids with their votes, from which `jpmhc report` draws pictures, go to a file beside the answers.
        """
        files.write_json(answers, Arc.submission(self.answered))
        files.write_json(answers.with_suffix(VOTES), list_votes(self.answered))
        files.write_json(path, self.to_json(), indent=1)

    def summarize(self) -> str:
        """Return the main numbers in one line."""
        parts = []
        for name, (low, high) in self.intervals.items():
            parts.append(f"{name} {100 * self.metrics[name]:.1f} % ({100 * low:.1f} to {100 * high:.1f})")
        loss = self.metrics["lm_loss"]
        return (
            f"{', '.join(parts)}, loss {loss:.4f}; {self.answers} answers of {self.tokens} tokens in "
            f"{self.seconds:.0f} s, {self.tokens_per_second:,.0f} tokens per second"
        )


def score_decoder(
    model: ArcDecoder,
    arc: Arc,
    variants: int | None,
    seed: int,
    slots: int,
    display: Display,
    stop: Callable[[], bool] = lambda: False,
) -> Score | None:
    """Let a decoder answer `variants` variants of each test (None: all), and return the score of the votes.

    `seed` decides the random choice of variants, `slots` is the number of answers that are written at the same time.
    `stop` is called while answers are written; if it returns True, the function returns None.
    """
    scorer = arc.scorer(arc.test_selection(variants, seed), keep_grids=True)
    if not scorer.scorable:
        raise ValueError("no test has a known answer to score")
    start = time.monotonic()
    written = fill_with_answers(scorer, model, arc, slots, display, stop)
    if written is None:
        return None
    metrics = scorer.result()
    seconds = time.monotonic() - start
    intervals = {name: bootstrap(metrics, k) for k, name in ((1, "pass@1"), (2, "pass@2"))}
    tokens = int(written.counts.sum())
    answered = scorer.answered()
    return Score(metrics, intervals, len(scorer.rows), tokens, written.tokens_per_second, seconds, answered)


def fill_with_answers(
    scorer: VoteScorer, model: ArcDecoder, arc: Arc, slots: int, display: Display, stop: Callable[[], bool]
) -> WrittenTokens | None:
    """Let a decoder answer the scorer's rows, record the answers in the scorer, and return the written tokens.

    The decoder writes `slots` answers at the same time. Returns None if `stop` returned True and interrupted it.
    """
    model = prepare_answering(model)
    rows = scorer.rows
    _, variant, pair = arc.locate_rows(rows)
    prompts = write_sequences(arc, variant, pair, outputs=False)
    capacity = int(prompts.lengths.max()) + LONGEST_ANSWER
    generator = Generator(model, min(slots, len(rows)), capacity)
    written = generator.answer(prompts, lambda done, total: display.show("answers", done, total), stop)
    del generator
    display.finish("answers")
    if written is None:
        return None
    losses = measure_losses(model, write_sequences(arc, variant, pair))
    for first in range(0, len(rows), _ROWS):
        part = slice(first, first + _ROWS)
        squares = read_answers(written.tokens[part], written.counts[part], arc.config.side)
        answers = Answers(
            tokens=torch.from_numpy(squares),
            confidence=torch.from_numpy(written.confidence[part]),
            loss=torch.from_numpy(losses[part]),
        )
        scorer.update(rows[part], arc.test_examples(rows[part]).labels, answers)
    return written


def bootstrap(metrics: Metrics, k: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of pass@k over tasks, from the metrics of a `VoteScorer`.

    >>> bootstrap({"per_task": {"a": [{"rank": 1}], "b": [{"rank": 1}]}}, 1)
    (1.0, 1.0)
    """
    tasks = metrics["per_task"].values()
    return bootstrap_mean(
        np.array([np.mean([t["rank"] is not None and t["rank"] <= k for t in tests]) for tests in tasks])
    )


def bootstrap_mean(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean: 2.5 and 97.5 percentiles of the means of resampled values."""
    drawn = np.random.default_rng(0).integers(0, len(values), (_ROUNDS, len(values)))
    low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5])
    return float(low), float(high)


def find_decoder(run: Path) -> Path | None:
    """Return the path of an ARC decoder's checkpoint, given the checkpoint or its run's folder; else None."""
    path = run / CHECKPOINT
    return path if path.is_file() else run if run.name == CHECKPOINT else None


def evaluate_decoder(
    path: Path, config: EvaluateConfig, report: Callable[[str], None] = lambda line: None
) -> tuple[Score, Path]:
    """Score the checkpoint `path` of an ARC decoder, write the score to a file, and return the score and the file.

    The options `pool`, `weights`, `compile`, `batch`, `tries` and `noise` must have their default values. `report`
    is called with a line about the score before the file is written.
    """
    usual = EvaluateConfig(runs=config.runs)
    for name in ("pool", "weights", "compile", "batch", "tries", "noise"):
        if getattr(config, name) != getattr(usual, name):
            raise ValueError(f"{path} is an ARC decoder, whose evaluation has no option {name}: leave it out")
    run, model, fingerprint = load_decoder(path)
    task = run.task.override(config.task_options)
    words = "-".join(["score", *config.words()])
    out = config.out or path.parent / f"{words}.json"
    require_writable(out)
    with use_threads(run.threads), join_processes(config.device) as world, Display(world.rank == 0) as display:
        with display.preparing("preparing the puzzles"):
            arc = task.build()
        if arc.fingerprint() != fingerprint:
            raise ValueError(f"{path} was trained on other puzzles than its configuration gives now")
        variants = config.variants or run.evaluate_variants
        if variants is not None and variants > task.augmentations + 1:
            raise ValueError(f"{path} has {task.augmentations + 1} variants of a puzzle, fewer than {variants}")
        seed = config.sample_seed if config.variants else run.seed
        score = score_decoder(model.to(world.device), arc, variants, seed, run.slots, display)
        assert score is not None  # no `stop` was passed
    report(score.summarize())
    with explaining_write_errors(out):
        score.write(out, out.parent / SUBMISSIONS / out.name)
    return score, out
