"""Means, errors and paired differences against SciPy."""

import numpy as np
import pytest

from jpmhc.experiments.comparison.curves import average_stretches
from jpmhc.experiments.comparison.statistics import student_quantile, summarize

stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 20, 21, 30, 100, 10_000])
def test_quantile(freedom):
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


def make_runs(**losses):
    return [
        {"mixer": mixer, "seed": seed, "parameters": 7, "seconds": 1.0, "final": {} if x is None else {"loss": x}}
        for mixer, values in losses.items()
        for seed, x in enumerate(values)
    ]


def test_differences_are_paired_by_seed():
    rng = np.random.default_rng(0)
    plain, other = rng.normal(size=(2, 6))
    found = summarize(make_runs(plain=plain.tolist(), other=other.tolist()), ("plain", "other"), "plain")
    loss = found[1]["metrics"]["loss"]
    oracle = stats.ttest_rel(other, plain).confidence_interval(0.95)
    assert loss["mean"] == pytest.approx(other.mean())
    assert loss["standard_error"] == pytest.approx(stats.sem(other))
    assert loss["difference"] == pytest.approx((other - plain).mean())
    assert loss["interval"] == pytest.approx([oracle.low, oracle.high], rel=1e-3)
    assert found[0]["metrics"]["loss"]["interval"] is None


def test_seeds_that_diverged_leave_their_pairs_out():
    found = summarize(make_runs(plain=[1.0, 2.0, 3.0], other=[None, 2.5, 3.5]), ("plain", "other"), "plain")
    assert (found[1]["runs"], found[1]["diverged"], found[1]["metrics"]["loss"]["pairs"]) == (3, 1, 2)
    assert found[1]["metrics"]["loss"]["difference"] == 0.5


def test_a_single_seed_has_no_interval():
    found = summarize(make_runs(plain=[1.0], other=[2.0]), ("plain", "other"), "plain")
    loss = found[1]["metrics"]["loss"]
    assert (loss["difference"], loss["standard_error"], loss["interval"]) == (1.0, None, None)


def test_stretches():
    assert average_stretches([1.0, 3.0, 5.0, 7.0, 10.0], 3) == ([2, 4, 5], [2.0, 6.0, 10.0])
    assert average_stretches([1.0, 2.0], 10) == ([1, 2], [1.0, 2.0])
