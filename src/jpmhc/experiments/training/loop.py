"""The training loop: steps, log, checkpoints, evaluations, and the end of a run."""

import contextlib
import dataclasses
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

from jpmhc.experiments.evaluation.checkpoints import fill_scorer, greedy_answers
from jpmhc.experiments.evaluation.scores import Metrics, NonFiniteAnswers, RowScorer
from jpmhc.experiments.models.recursive import refuse_device
from jpmhc.experiments.tasks.task import Batch
from jpmhc.experiments.training import checkpoint, run_folder
from jpmhc.experiments.training.checkpoint import Checkpoint
from jpmhc.experiments.training.config import TrainConfig, list_changes
from jpmhc.experiments.training.learner import Learner, NonFiniteLoss, describe_step, refuse_other_run
from jpmhc.experiments.training.log import Log, describe_environment
from jpmhc.experiments.training.memory import refuse_memory
from jpmhc.experiments.training.mixing import mixing_statistics
from jpmhc.experiments.training.prefetch import make_batch, prefetch_batches
from jpmhc.experiments.training.processes import (
    LostProcess,
    World,
    handling_signals,
    join_processes,
    name_ranks,
    naming_lost_processes,
)
from jpmhc.experiments.training.progress import Display
from jpmhc.experiments.training.run_folder import FolderGone
from jpmhc.experiments.training.strategies import refuse_strategy
from jpmhc.files import JsonObject, explaining_write_errors, write_file
from jpmhc.machine import use_threads


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    step: int  # number of finished steps
    stopped: signal.Signals | None  # signal that ended the run early; None if the run was finished
    checkpoint: Path | None  # last checkpoint; None if the run ended before its first step
    metrics: Metrics  # the last evaluation's metrics; empty if the run was stopped, or if no test has a known answer


class Stopped(BaseException):
    """Raised to end a run after a signal; no finished step is lost. Not an Exception, because it is not an error."""


def train(config: TrainConfig) -> Outcome:
    """Train to the last step; on SIGTERM or Ctrl-C, save a checkpoint and stop."""
    if config.resume == "no":
        run_folder.refuse_used_folder(config.out)
    else:
        run_folder.refuse_busy_folder(config.out)
    with (
        use_threads(config.threads),
        join_processes(config.device, config.patience) as world,
        Display(world.rank == 0) as display,
    ):
        resumed = checkpoint.choose_checkpoint(config.out, config.resume)
        return Trainer(config, world, resumed, display).run()


class Trainer:
    """A training run with its log, checkpoints and evaluations."""

    def __init__(
        self, config: TrainConfig, world: World, resume: Checkpoint | None = None, display: Display | None = None
    ) -> None:
        self.config, self.world, self.display = config, world, display or Display(False)
        refuse_strategy(config, world)
        refuse_device(config.model, world.device)
        if resume is not None:
            refuse_other_run(config, world, resume)
        if config.model.unmixed and resume is None:
            self.display.say(
                f"{config.model.streams} streams and the mixer {config.model.mixer}: sublayers read and write all "
                f"streams, but this mixer does not mix the streams on the skip: choose another with --mixer"
            )
        with self.display.preparing("preparing the puzzles"):
            self.task = config.task.build()
        refuse_memory(config, self.task, world)
        self.learner = Learner(config, world, self.task, resume)
        self.resumed = resume
        self.saved = None if resume is None else resume.path
        self.scores = self._make_scorer().scorable
        self.stop: signal.Signals | None = None
        self.require_folder: Callable[[], None] = lambda: None
        self.evaluating, self.compiling = False, False
        self.metrics: Metrics = {}

    def run(self) -> Outcome:
        """Train to the last step, or until a signal stops the run."""
        out, chief = self.config.out, self.world.rank == 0
        new = self.resumed is None and self.config.resume == "no"
        lock = run_folder.lock_folder(out, new) if chief else contextlib.nullcontext(lambda: None)
        with lock as self.require_folder:
            if chief:
                with explaining_write_errors(out):
                    self._prepare_folder()
            self.world.wait()
            with (
                handling_signals(self._request_stop),
                self._explaining_ends(),
                naming_lost_processes(self.world.pulse),
                Log(out, self.learner.step, chief, self.require_folder) as log,
            ):
                self._log_start(log)
                self._train_steps(log)
        return Outcome(self.learner.step, self.stop, self.saved, {} if self.stop else self.metrics)

    def _prepare_folder(self) -> None:
        """Write the configuration, and rename checkpoints that are newer than the resumed one."""
        out, resumed = self.config.out, self.resumed
        if resumed is not None:
            if changed := list_changes(resumed.config, self.config):
                former = out / f"config-until-step-{resumed.step:08d}.json"
                write_file(former, resumed.config.to_json() + "\n")
            settings = ", ".join(map(str, changed)) or "no setting changed"
            self.display.say(f"going on from {resumed.path}, step {resumed.step}: {settings}")
        write_file(out / "config.json", self.config.to_json() + "\n")
        for sentence in checkpoint.set_newer_aside(out, self.learner.step):
            self.display.say(sentence)

    def _log_start(self, log: Log) -> None:
        step, resumed = self.learner.step, self.resumed
        if self.world.rank == 0:
            log.write("start", step, describe_environment(self.world))
        if log.damaged:
            lines = "a line" if log.damaged == 1 else f"{log.damaged} lines"
            self.display.say(f"{self.config.out / 'log.jsonl'}: left out {lines} that could not be read")
        if resumed is not None:
            changes = [
                {"name": c.name, "there": c.saved, "here": c.present} for c in list_changes(resumed.config, self.config)
            ]
            log.write("resume", step, {"checkpoint": str(resumed.path), "changes": changes})

    def _train_steps(self, log: Log) -> None:
        config, learner, last, device = self.config, self.learner, self.config.last_step, self.world.device
        if learner.step == last:
            self.display.say(f"{self.saved} has done all {last} steps: nothing is left to train")
        if not self.scores:
            self.display.say("no test has a known answer: nothing is scored; jpmhc predict writes the answers")
        kind = "evaluate" if self.scores else "mixing"
        evaluated = any(self.world.collect((kind, learner.step) in log.known))  # the first process knows
        if learner.step and self._evaluates(learner.step) and not evaluated:
            # The resumed run ended during this evaluation: repeat it.
            self._report(log, make_batch(self.task, config, learner.rows, learner.step - 1)[0].to(device))
        first, started = learner.step, time.monotonic()
        for step, rows, minimum in prefetch_batches(self.task, config, learner.rows, device, range(first, last)):
            logs = (step + 1) % config.log_every == 0 or step + 1 == last
            with self._compiling(config.compile and step == first):
                sums, norms = learner.take_step(rows, minimum, logs=logs, stop=self.stop is not None)
            detail = None
            if logs:
                speed = (learner.step - first) / (time.monotonic() - started)
                values = describe_step(learner, sums, norms)
                values["sequences_per_second"] = speed * config.batch
                values["eta_seconds"] = (last - learner.step) / speed
                log.write("train", learner.step, values)
                detail = _summarize_step(values)
            self.display.show("step", learner.step, last, detail)
            evaluates = self._evaluates(learner.step)
            # Save before an evaluation, which may take long, so that no training is lost.
            if evaluates or sums.stop or learner.step % config.checkpoint_every == 0:
                self.require_folder()  # otherwise a removed folder would be created again
                self.saved = learner.save(config.out)
            if sums.stop:
                raise Stopped
            if evaluates:
                paused = time.monotonic()
                self._report(log, rows)
                started += time.monotonic() - paused  # the speed leaves evaluations out

    @contextlib.contextmanager
    def _compiling(self, compiles: bool) -> Iterator[None]:
        """If `compiles`, show that the step is being compiled; SIGTERM and Ctrl-C end the compilation at once."""
        if not compiles:
            yield
            return
        with self.display.preparing("compiling the step: a minute or so on a GPU, longer on a CPU"):
            self.compiling = True
            yield
            self.compiling = False

    def _evaluates(self, step: int) -> bool:
        every = self.config.evaluate_every
        return step == self.config.last_step or bool(every and step % every == 0)

    def _report(self, log: Log, rows: Batch) -> None:
        """Log an evaluation, if test answers are known, and statistics of the mixers on a few of the step's rows."""
        step = self.learner.step
        if self.scores:
            self.metrics, line = self.evaluate()
            log.write("evaluate", step, self.metrics)
            self.display.say(f"step {step}: {self.task.test_kind}: {line}")
        mixing = self.measure_mixing(rows)
        if mixing:
            log.write("mixing", step, mixing)

    def evaluate(self) -> tuple[Metrics, str]:
        """Score the averaged weights on test rows; SIGTERM and Ctrl-C end the evaluation at once.

        Returns the metrics, equal on every process, and a line with the main metrics.
        """
        name = f"evaluating step {self.learner.step}: rows"
        self.evaluating = True
        try:
            if self.stop:  # a signal came while the checkpoint was being written
                raise Stopped
            model = self.learner.snapshot()
            if self.config.compile:
                model.compile_prediction()
            scorer = self._make_scorer()
            fill_scorer(
                scorer,
                self.task,
                greedy_answers(model),
                batch_size=self.config.evaluate_batch,
                world=self.world,
                progress=lambda done, total: self.display.show(name, done, total),
            )
            metrics = scorer.result()
            return metrics, scorer.summarize(metrics)
        except NonFiniteAnswers as refusal:
            raise NonFiniteLoss(
                f"after step {self.learner.step} the model answers with numbers that are not finite; "
                f"its weights are in {self.saved}"
            ) from refusal
        finally:
            self.evaluating = False
            self.display.finish(name)

    def _make_scorer(self) -> RowScorer:
        return self.task.scorer(self.task.test_selection(self.config.evaluate_variants, self.config.seed))

    def measure_mixing(self, rows: Batch, count: int = 4) -> JsonObject:
        """Return statistics of the averaged model's mixing matrices on the first `count` rows."""
        model = self.learner.snapshot()
        inputs, core = rows.inputs[:count], model.core
        with torch.no_grad():
            puzzle = model.puzzles(rows.identifiers[:count])
            states = core.initial_states(len(inputs))
        return mixing_statistics(core, lambda: core.run_supervision_step(puzzle, inputs, *states))

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        waits = not (self.evaluating or self.compiling)
        if number == signal.SIGINT and self.stop and waits:
            raise KeyboardInterrupt  # the second Ctrl-C ends the run at once, without a checkpoint
        self.stop = signal.Signals(number)  # the sums of the next step tell every process
        if not waits:
            raise Stopped

    @contextlib.contextmanager
    def _explaining_ends(self) -> Iterator[None]:
        """End a stopped run without an error, and explain other ends.

        Messages about failed writes and lost processes get the current step and the newest checkpoint.
        """
        out, pulse = self.config.out, self.world.pulse
        if pulse is not None:
            pulse.describe = self._describe_state
        try:
            yield
        except Stopped:
            self.stop = self.stop or signal.SIGTERM  # if another process got the signal
            if pulse is not None and (lost := pulse.find_silent()):
                raise LostProcess(f"{name_ranks(lost)} lost {self._describe_state()}") from None
            if self.saved is None and self.world.rank == 0:  # stopped before the first step: remove the run's files
                for name in ("config.json", "log.jsonl"):
                    (out / name).unlink()
        except LostProcess:
            raise
        except FolderGone as gone:
            step = self.learner.step
            raise FolderGone(
                f"{gone}, after step {step}: if it was renamed, give its new name with --out, and --resume latest"
            ) from None
        except OSError as refusal:
            reason = refusal.strerror or refusal
            if self.world.rank == 0:  # remove the unfinished checkpoint, in case the disk is full
                shutil.rmtree(checkpoint.unfinished_folder(out, self.learner.step), ignore_errors=True)
            raise OSError(f"cannot write to {out} ({reason}) {self._describe_state()}") from refusal

    def _describe_state(self) -> str:
        """Return the current step and the newest checkpoint as the end of a sentence."""
        saved = checkpoint.list_folders(self.config.out)  # another process may have finished a newer one
        rest = f"--resume latest goes on from {saved[-1].name}" if saved else "nothing was saved"
        return f"after step {self.learner.step}; {rest}"


def _summarize_step(values: JsonObject) -> str:
    return (
        f"loss {values['loss']:.4f} · exact {values['exact_accuracy']:.1%} · gradient {values['gradient_norm']:.3g} "
        f"(largest {values['largest_layer_gradient_norm']:.3g} in {values['largest_layer']}) · "
        f"{values['sequences_per_second']:.0f} sequences/s"
    )
