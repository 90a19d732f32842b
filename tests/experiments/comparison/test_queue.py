"""The queue: the order of runs, and the time limit, with a clock that the tests move."""

import math

from jpmhc.experiments.comparison.experiment import Job, Progress
from jpmhc.experiments.comparison.queue import Queue


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(arms=("plain", "cayley"), rates=(2e-3, 1e-3), seeds=(0, 1), losses=None, deadline=None, clock=None):
    return Queue(arms, rates, seeds, losses or {}, lambda arm: 100, deadline, clock or Clock())


def test_all_arms_are_looked_at_before_other_rates_and_seeds():
    queue = make()
    order = []
    while (job := queue.take()) is not None:
        order.append(job)
        queue.end(job, job.learning_rate * (1 if job.arm == "plain" else -1))
    first = [Job(arm, rate, 0) for rate in (2e-3, 1e-3) for arm in ("plain", "cayley")]
    assert order == [*first, Job("plain", 1e-3, 1), Job("cayley", 2e-3, 1)]  # each with its best rate


def test_a_process_keeps_its_arm_and_leaves_others_theirs():
    queue = make(seeds=(0,))
    assert queue.take() == Job("plain", 2e-3, 0)
    assert queue.take() == Job("cayley", 2e-3, 0)
    queue.end(Job("cayley", 2e-3, 0), 1.0)
    assert queue.take("cayley") == Job("cayley", 1e-3, 0)
    queue.end(Job("cayley", 1e-3, 0), 1.0)
    assert queue.take("cayley") == Job("plain", 1e-3, 0)
    assert queue.take("cayley") is None


def test_finished_runs_are_left_out_and_a_diverged_rate_is_not_best():
    losses = {Job("plain", 2e-3, 0): math.inf, Job("plain", 1e-3, 0): 3.0}
    queue = make(("plain",), losses=losses)
    assert list(queue.missing()) == [Job("plain", 1e-3, 1)]
    assert make(("plain",), losses={Job("plain", 2e-3, 0): 1.0}).best_rate("plain") is None


def test_no_run_is_begun_that_cannot_end_in_time():
    clock = Clock()
    queue = make(("plain", "cayley"), (1e-3, 2e-3, 3e-3), (0,), deadline=100.0, clock=clock)
    plain, cayley = queue.take(), queue.take()
    clock.now = 10.0
    for job in (plain, cayley):
        queue.observe(job, Progress(1, 100, 9.0, 10.0))
    queue.observe(plain, Progress(20, 100, 8.0, 0.2))
    queue.observe(cayley, Progress(20, 100, 8.0, 0.5))
    assert queue.estimate(Job("plain", 2e-3, 0), fresh=False) == 0.2 * 100
    assert queue.estimate(Job("plain", 2e-3, 0), fresh=True) == 0.2 * 100 + 10
    clock.now = 60.0
    queue.end(plain, 5.0)
    queue.end(cayley, 5.0)
    assert queue.take("cayley") == Job("plain", 2e-3, 0)  # 50 seconds for cayley are too long
    clock.now = 90.0
    assert queue.take("plain") is None
    assert len(list(queue.missing())) == 3


def test_an_unknown_arm_takes_as_long_as_the_slowest():
    queue = make(("plain", "cayley", "sinkhorn"), deadline=1000.0)
    job = queue.take()
    queue.observe(job, Progress(20, 100, 8.0, 0.3))
    assert queue.estimate(Job("sinkhorn", 2e-3, 0), fresh=True) == 30.0


def test_a_run_that_was_stopped_is_still_missing():
    queue = make(("plain",), (1e-3,), (0,))
    job = queue.take()
    assert list(queue.missing()) == []
    queue.end(job, None)
    assert list(queue.missing()) == [job]
