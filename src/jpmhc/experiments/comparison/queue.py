"""The queue of a comparison, which chooses the next run, and the processes that train the runs on one device."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from jpmhc.experiments.comparison import folder
from jpmhc.experiments.comparison.experiment import Experiment, Job, Progress, Show, Stop, Train

Clock = Callable[[], float]
_MARGIN = 1.05  # safety factor of estimated times


class Queue:
    """The missing runs of a comparison: first all arms with the first learning rate, then other rates, then seeds.

    The first seed is trained with every learning rate, the other seeds with the arm's best learning rate. Arms, rates
    and seeds are in the order of their importance. `losses` are the final losses of finished runs, infinite if they
    diverged. `count_steps` returns the number of steps of an arm's runs. All runs must have ended when `clock` returns
    `deadline`; None is no deadline.
    """

    def __init__(
        self,
        arms: Sequence[str],
        rates: Sequence[float],
        seeds: Sequence[int],
        losses: Mapping[Job, float],
        count_steps: Callable[[str], int],
        deadline: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.arms, self.rates, self.seeds = arms, rates, seeds
        self.losses = dict(losses)
        self.steps = {arm: count_steps(arm) for arm in arms}
        self.deadline, self.clock = deadline, clock
        self.running: dict[Job, float] = {}  # start time by job
        self.paces: dict[str, float] = {}  # seconds per step, by arm
        self.start_seconds = 0.0  # longest time that a run took until its first step was done

    def missing(self) -> Iterator[Job]:
        """Yield the jobs that are neither finished nor running and can be started now, in order."""
        for group in self._groups():
            yield from (job for job in group if job not in self.losses and job not in self.running)

    def _groups(self) -> Iterator[list[Job]]:
        """Yield lists of equally important jobs, the most important list first."""
        for rate in self.rates:
            yield [Job(arm, rate, self.seeds[0]) for arm in self.arms]
        for seed in self.seeds[1:]:
            best = {arm: self.best_rate(arm) for arm in self.arms}
            yield [Job(arm, rate, seed) for arm, rate in best.items() if rate is not None]

    def best_rate(self, arm: str) -> float | None:
        """Return the arm's best learning rate at the first seed; None if a run with that seed is missing."""
        losses = [self.losses.get(Job(arm, rate, self.seeds[0])) for rate in self.rates]
        known = [loss for loss in losses if loss is not None]
        return self.rates[losses.index(min(known))] if len(known) == len(losses) else None

    def take(self, arm: str | None = None) -> Job | None:
        """Return the next job that can end in time, preferably of the given arm, which the process has compiled."""
        for group in self._groups():
            jobs = [job for job in group if job not in self.losses and job not in self.running and self._fits(job, arm)]
            if jobs:
                busy = {job.arm for job in self.running}
                # prefer the process's own arm, which is compiled already, then an arm that no other process has
                job = min(jobs, key=lambda job: (job.arm != arm, job.arm in busy))
                self.running[job] = self.clock()
                return job
        return None

    def _fits(self, job: Job, arm: str | None) -> bool:
        if self.deadline is None:
            return True
        return self.clock() + _MARGIN * self.estimate(job, fresh=job.arm != arm) <= self.deadline

    def estimate(self, job: Job, fresh: bool) -> float:
        """Estimate a run's seconds, with the compilation if `fresh`; an arm that never ran counts as the slowest."""
        pace = self.paces.get(job.arm, max(self.paces.values(), default=0.0))
        return pace * self.steps[job.arm] + fresh * self.start_seconds

    def observe(self, job: Job, progress: Progress) -> None:
        """Update the estimated times from a run's progress."""
        if progress.step == 1:
            self.start_seconds = max(self.start_seconds, self.clock() - self.running[job])
        elif progress.step_seconds is not None:
            self.paces[job.arm] = progress.step_seconds

    def end(self, job: Job, loss: float | None) -> None:
        """Record that a job ended with this final loss; None if it was interrupted, and is missing again."""
        del self.running[job]
        if loss is not None:
            self.losses[job] = loss


def train_job(train: Train, job: Job, out: Path, stop: Stop, show: Show) -> float | None:
    """Train a job, write its run to the comparison's folder and return its loss; None if `stop` interrupted it."""
    own = out / "training" / job.file_name
    run = train(job, own, stop, show)
    if run is None:
        return None
    folder.write_rounded(folder.run_path(out, job), run)
    shutil.rmtree(own, ignore_errors=True)
    return folder.loss_of(run)


def work_alone(queue: Queue, train: Train, out: Path, show: Show, ended: Callable[[Job], None]) -> None:
    """Train the jobs of a queue in this process.

    `show` is called with a job and its progress, and `ended` with every job that was trained to its end.
    """

    def observe(job: Job, progress: Progress) -> None:
        queue.observe(job, progress)
        show(job, progress)

    def stop() -> bool:
        return queue.deadline is not None and queue.clock() > queue.deadline

    arm = None
    while not stop() and (job := queue.take(arm)) is not None:
        arm = job.arm
        loss = train_job(train, job, out, stop, observe)
        queue.end(job, loss)
        if loss is not None:
            ended(job)


def work_together(
    queue: Queue,
    experiment: Experiment,
    device: torch.device,
    out: Path,
    processes: int,
    show: Show,
    ended: Callable[[Job], None],
) -> None:
    """Train the jobs of a queue in several processes; each process prefers jobs of the arm that it has compiled.

    `show` and `ended` are called as by `work_alone`.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    threads = max(1, (os.cpu_count() or 1) // processes)
    workers: dict[Connection, multiprocessing.process.BaseProcess] = {}
    current: dict[Connection, Job] = {}
    try:
        for _ in range(processes):
            job = queue.take()
            if job is None:
                break
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, experiment, device, out, threads, queue.deadline), daemon=False
            )
            process.start()
            there.close()
            here.send(job)
            workers[here], current[here] = process, job
        while current:
            for pipe in wait(list(current)):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    raise ValueError(
                        f"the process that trained {current[pipe]} ended, perhaps because memory ran out: repeat the "
                        "command with fewer processes to train the missing runs"
                    ) from None
                if isinstance(message, ValueError):
                    raise message
                if isinstance(message, Progress):
                    queue.observe(current[pipe], message)
                    show(current[pipe], message)
                    continue
                job = current.pop(pipe)
                queue.end(job, message)
                if message is not None:
                    ended(job)
                following = None if message is None else queue.take(job.arm)
                with suppress(BrokenPipeError):
                    pipe.send(following)
                if following is not None:
                    current[pipe] = following
    except BaseException:
        for worker in workers.values():
            worker.terminate()
        raise
    finally:
        for worker in workers.values():
            worker.join()


def _work(
    pipe: Connection, experiment: Experiment, device: torch.device, out: Path, threads: int, deadline: float | None
) -> None:
    torch.set_num_threads(threads)

    def stop() -> bool:
        return deadline is not None and time.monotonic() > deadline  # one clock for all processes

    def show(job: Job, progress: Progress) -> None:
        pipe.send(progress)

    try:
        train = experiment.open(device)
        while (job := pipe.recv()) is not None:
            pipe.send(train_job(train, job, out, stop, show))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the parent process has ended and reports the reason
    except ValueError as error:
        pipe.send(error)
