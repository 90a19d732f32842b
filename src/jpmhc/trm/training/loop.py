"""The training loop: steps, log, checkpoints, evaluation, and what stops it."""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from jpmhc.trm.model.device import refuse_device
from jpmhc.trm.tasks.batch import Batch, Scorer, Task
from jpmhc.trm.tasks.evaluate import answers_of, evaluate
from jpmhc.trm.tasks.row_scores import SpoiltAnswers
from jpmhc.trm.training import checkpoint, folder
from jpmhc.trm.training.changes import changes
from jpmhc.trm.training.checkpoint import Checkpoint
from jpmhc.trm.training.config import TrainConfig
from jpmhc.trm.training.distributed import World, join, refuse_sharing
from jpmhc.trm.training.evaluation import summary, tested
from jpmhc.trm.training.log import Log
from jpmhc.trm.training.mixing import mixing_statistics
from jpmhc.trm.training.progress import Display
from jpmhc.trm.training.state import State, refuse_other_run
from jpmhc.trm.training.step import NonFiniteLoss, advance, described
from jpmhc.trm.training.stream import Stream


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps done."""
    stopped: signal.Signals | None
    """The signal that ended it early."""
    checkpoint: Path
    """The last checkpoint."""
    metrics: dict[str, Any]
    """The last evaluation; empty when stopped, or where no test has a known answer."""


class Stopped(BaseException):
    """Asked to stop while all that was trained is saved. Not an Exception: nobody shall take it for an error."""


def train(config: TrainConfig) -> Outcome:
    """Run a configuration to its end, or until SIGTERM or Ctrl-C, which save a checkpoint first."""
    if config.resume == "no":
        folder.refuse_used(config.out)
    with join(config.device) as world, Display(world.rank == 0) as display:
        found = None if config.resume == "no" else checkpoint.find(config.out, config.resume)
        return Trainer(config, world, found, display).run()


class Trainer:
    """A run and how it goes.

    Args:
        config: The run.
        world: The processes it is shared by.
        resume: Verified checkpoint to go on from.
        display: What shows how far it is; None: nothing.
    """

    def __init__(
        self, config: TrainConfig, world: World, resume: Checkpoint | None = None, display: Display | None = None
    ) -> None:
        self.config, self.world, self.display = config, world, display or Display(False)
        refuse_sharing(world, config)
        refuse_device(config.model, world.device)
        if resume is not None:
            refuse_other_run(config, world, resume)
        with self.display.preparing("preparing the puzzles"):
            self.task: Task = config.task.build()
        self.state = State(config, world, self.task, resume)
        self.stream = Stream(
            self.task,
            config.batch,
            self.state.rows,
            config.seed,
            config.model.halt_exploration,
            config.model.halt_max_steps,
            world.device,
        )
        self.resumed = resume
        self.saved = None if resume is None else resume.path
        self.scores = self._scorer().scorable
        self.stop: signal.Signals | None = None
        self.evaluating = False
        self.metrics: dict[str, Any] = {}

    def run(self) -> Outcome:
        """Train to the last step."""
        chief = self.world.rank == 0
        with folder.hold(self.config.out, new=self.saved is None) if chief else contextlib.nullcontext():
            return self._run()

    def _run(self) -> Outcome:
        config, chief = self.config, self.world.rank == 0
        if chief:
            with folder.writing(config.out):
                if self.resumed is not None:
                    self._tell_changes(self.resumed)
                (config.out / "config.json").write_text(config.to_json() + "\n")
                for sentence in checkpoint.set_aside(config.out, self.state.step):
                    self.display.say(sentence)
        self.world.wait()
        previous = {number: signal.signal(number, self._ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with Log(config.out, self.state.step, chief) as log:
                if self.resumed is not None:
                    changed = [dataclasses.asdict(change) for change in changes(self.resumed.config, config)]
                    log.write("resume", self.state.step, {"checkpoint": str(self.resumed.path), "changes": changed})
                self._steps(log)
        except Stopped:
            self.stop = self.stop or signal.SIGTERM  # where another rank was asked
        except OSError as refusal:
            rest = "nothing was saved" if self.saved is None else f"--resume latest goes on from {self.saved.name}"
            reason = refusal.strerror or refusal
            raise OSError(f"cannot write to {config.out} ({reason}) after step {self.state.step}; {rest}") from refusal
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        assert self.saved is not None
        return Outcome(self.state.step, self.stop, self.saved, {} if self.stop else self.metrics)

    def _tell_changes(self, resumed: Checkpoint) -> None:
        """Say what the run goes on from and with what changes; keep the configuration that it had so far."""
        changed = changes(resumed.config, self.config)
        if changed:
            former = self.config.out / f"config-until-step-{resumed.step:08d}.json"
            former.write_text(resumed.config.to_json() + "\n")
        settings = ", ".join(map(str, changed)) or "no setting changed"
        self.display.say(f"going on from {resumed.path}, step {resumed.step}: {settings}")

    def _steps(self, log: Log) -> None:
        config, state = self.config, self.state
        if state.step == config.steps:
            self.display.say(f"{self.saved} has done all {config.steps} steps: nothing is left to train")
        if not self.scores:
            self.display.say("no test has a known answer: nothing is scored; jpmhc predict writes the answers")
        kind = "evaluate" if self.scores else "mixing"
        evaluated = any(self.world.collect((kind, state.step) in log.known))  # the first process knows
        if state.step and self._evaluates(state.step) and not evaluated:
            # The run was ended during an evaluation: make up for it.
            self._report(log, self.stream(state.step - 1)[0].to(self.world.device))
        first, started = state.step, time.monotonic()
        for step, rows, minimum in self.stream.steps(first, config.steps):
            logs = (step + 1) % config.log_every == 0 or step + 1 == config.steps
            sums, norms = advance(state, rows, minimum, logs=logs, stop=self.stop is not None)
            detail = None
            if logs:
                speed = (state.step - first) / (time.monotonic() - started)
                values = described(state, sums, norms)
                values["sequences_per_second"] = speed * config.batch
                values["eta_seconds"] = (config.steps - state.step) / speed
                log.write("train", state.step, values)
                detail = _line(values)
            self.display.show("step", state.step, config.steps, detail)
            evaluates = self._evaluates(state.step)
            # Saved before it is evaluated, which may take long: what was trained cannot be lost any more.
            if evaluates or sums.stop or state.step % config.checkpoint_every == 0:
                self.saved = state.save(config.out)
            if sums.stop:
                raise Stopped
            if evaluates:
                paused = time.monotonic()
                self._report(log, rows)
                started += time.monotonic() - paused  # speed is that of training

    def _evaluates(self, step: int) -> bool:
        every = self.config.evaluate_every
        return step == self.config.steps or bool(every and step % every == 0)

    def _report(self, log: Log, rows: Batch) -> None:
        """Evaluate, if anything can be, and log it; the mixers are looked at on a few of the step's rows."""
        step = self.state.step
        if self.scores:
            self.metrics = self.evaluate()
            log.write("evaluate", step, self.metrics)
            self.display.say(f"step {step}: {tested(self.task)}: {summary(self.metrics)}")
        mixing = self.mixing(rows)
        if mixing:
            log.write("mixing", step, mixing)

    def evaluate(self) -> dict[str, Any]:
        """Metrics of the averaged weights on test rows, the same on every rank. SIGTERM and Ctrl-C end it at once."""
        name = f"evaluating step {self.state.step}: rows"
        self.evaluating = True
        try:
            if self.stop:  # asked while the checkpoint was being written
                raise Stopped
            model = self.state.snapshot()
            if self.config.compile:
                model.compile_prediction()
            scorer = evaluate(
                self.task,
                self._scorer(),
                answers_of(model),
                batch_size=self.config.evaluate_batch,
                rank=self.world.rank,
                world=self.world.size,
                gather=self.world.collect,
                progress=lambda done, total: self.display.show(name, done, total),
            )
            return scorer.result()
        except SpoiltAnswers as refusal:
            raise NonFiniteLoss(
                f"after step {self.state.step} the model answers with numbers that are not finite; its weights are in "
                f"{self.saved}"
            ) from refusal
        finally:
            self.evaluating = False
            self.display.finish(name)

    def _scorer(self) -> Scorer:
        return self.task.scorer(self.task.test_selection(self.config.evaluate_variants, self.config.seed))

    def mixing(self, rows: Batch, count: int = 4) -> dict[str, Any]:
        """Statistics of the residual mixers on a few rows."""
        model = self.state.snapshot()
        with torch.no_grad():
            puzzle = model.puzzles(rows.identifiers[:count])
        return mixing_statistics(model.core, puzzle, rows.inputs[:count])

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop and not self.evaluating:
            raise KeyboardInterrupt  # asked twice: at once, without a checkpoint
        self.stop = signal.Signals(number)  # seen by every rank in the sums of the next step
        if self.evaluating:
            raise Stopped


def _line(values: dict[str, Any]) -> str:
    """The numbers of a step in brief."""
    return (
        f"loss {values['loss']:.4f} · exact {values['exact_accuracy']:.1%} · gradient {values['gradient_norm']:.3g} "
        f"(largest {values['largest_layer_gradient_norm']:.3g} in {values['largest_layer']}) · "
        f"{values['sequences_per_second']:.0f} sequences/s"
    )
