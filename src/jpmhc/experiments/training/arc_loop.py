"""A run of the ARC decoder: training with log and checkpoints, handling of signals, and the score at the end."""

import dataclasses
import signal
import time
from dataclasses import dataclass
from types import FrameType

from jpmhc.experiments.evaluation.decoding import SUBMISSIONS, Score, score_decoder
from jpmhc.experiments.training import run_folder
from jpmhc.experiments.training.arc_decoder import CHECKPOINT, Progress, Training, summarize
from jpmhc.experiments.training.config import ArcDecoderRun
from jpmhc.experiments.training.log import Log, describe_environment
from jpmhc.experiments.training.processes import handling_signals, join_processes
from jpmhc.experiments.training.progress import Display
from jpmhc.files import write_file
from jpmhc.machine import use_threads


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its last step, the signal that stopped it, and the score of its answers (None: unfinished)."""

    step: int
    finished: bool
    stopped: signal.Signals | None
    score: Score | None


def train_decoder(run: ArcDecoderRun) -> Outcome:
    """Train and score a decoder; on SIGTERM, Ctrl-C or the time limit, save a checkpoint and stop."""
    started = time.monotonic()
    if not run.resume:
        run_folder.refuse_used_folder(run.out)
        if (run.out / CHECKPOINT).exists():
            raise ValueError(f"{run.out} already holds a decoder: choose another --out, or go on with --resume")
    with (
        use_threads(run.threads),
        join_processes(run.device) as world,
        Display() as display,
        run_folder.lock_folder(run.out, new=not run.resume) as require_folder,
    ):
        with display.preparing("preparing the puzzles"):
            arc = run.task.build()
            training = Training(run, arc, world.device)
        path = run.out / CHECKPOINT
        if run.resume:
            training.load(path)
            display.say(f"going on from step {training.step}, epoch {training.epoch + 1}")
        write_file(run.out / "config.json", run.to_json() + "\n")
        asked: list[signal.Signals] = []

        def request_stop(number: int, frame: FrameType | None) -> None:
            if asked:
                raise KeyboardInterrupt  # the second signal ends the run at once
            asked.append(signal.Signals(number))

        def is_over() -> bool:
            return bool(asked) or (run.minutes is not None and time.monotonic() - started > 60 * run.minutes)

        def save() -> None:
            require_folder()
            training.save(path)

        with Log(run.out, training.step, require_folder=require_folder) as log, handling_signals(request_stop):
            log.write("start", training.step, describe_environment(world))

            def show(progress: Progress) -> None:
                log.write("train", progress.step, dataclasses.asdict(progress))
                display.show("epoch", progress.epoch, run.epochs, summarize(progress))

            training.train(is_over, show, save)
            save()
            score = None
            if training.finished:
                score = score_decoder(training.model, arc, run.evaluate_variants, run.seed, run.slots, display, is_over)
            if score is not None:
                log.write("evaluate", training.step, score.to_json())
                score.write(run.out / "score.json", run.out / SUBMISSIONS / "score.json")
                display.say(score.summarize())
    return Outcome(training.step, training.finished, asked[0] if asked else None, score)
