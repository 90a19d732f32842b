"""Means, errors, paired differences and F tests against SciPy."""

import numpy as np
import pytest

from jpmhc.experiments.comparison.statistics import (
    best_runs,
    compare_means,
    correlate_with_loss,
    losses_by_time,
    share_of_time,
    student_quantile,
    summarize,
)

stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 100])
def test_quantile(freedom):
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom))


def make_run(arm, loss, seed=0, rate=1e-3):
    return {
        "arm": arm,
        "learning_rate": rate,
        "seed": seed,
        "steps": 5,
        "parameters": 7,
        "seconds": 1.0,
        "step_seconds": 0.1,
        "tokens_per_second": None,
        "peak_bytes": None,
        "final": {} if loss is None else {"loss": loss},
    }


def make_runs(**losses):
    return [make_run(arm, loss, seed) for arm, values in losses.items() for seed, loss in enumerate(values)]


def test_differences_are_paired_by_seed():
    plain, other = np.random.default_rng(0).normal(size=(2, 6))
    rows = summarize(make_runs(plain=plain.tolist(), other=other.tolist()), ("plain", "other"), ("plain", "none"))
    loss, difference = rows[1]["metrics"]["loss"], rows[1]["differences"]["plain"]
    oracle = stats.ttest_rel(other, plain).confidence_interval(0.95)
    assert loss["mean"] == pytest.approx(other.mean())
    assert loss["standard_error"] == pytest.approx(stats.sem(other))
    assert difference["mean"] == pytest.approx((other - plain).mean())
    assert difference["standard_error"] == pytest.approx(stats.sem(other - plain))
    assert difference["interval"] == pytest.approx((oracle.low, oracle.high))
    assert rows[0]["differences"] == {}


def test_numbers_that_go_with_the_loss():
    generator = np.random.default_rng(1)
    losses, drift, other = generator.normal(size=(3, 6))
    runs = [make_run(f"a{k}", float(loss)) for k, loss in enumerate(losses)]
    for run, loss, distance, gain in zip(runs, losses, drift, other):
        run["final"] |= {"rank": float(np.exp(-loss)), "distance": float(distance), "same": 1.0}
        if run["arm"] not in ("a0", "a1", "a2"):
            run["final"]["gain"] = float(gain)  # three arms have it: too few
    runs.append({**make_run("long", -9.0), "steps": 50})
    runs[-1]["final"] |= {"rank": 0.0, "distance": 9.0}
    arms = [run["arm"] for run in runs]
    rows = summarize(runs, arms, ())
    correlations = correlate_with_loss(rows)
    assert correlations == {
        "rank": (pytest.approx(-1), 6),
        "distance": (pytest.approx(stats.spearmanr(drift, losses)[0]), 6),
    }


def test_the_share_of_the_time_until_a_loss():
    losses = {
        "plain": 2.0,
        "plain:steps=10": 2.6,
        "cayley:steps=4": 2.5,
        "cayley": 1.5,
        "cayley:steps=8,streams=2": 2.4,
    }
    runs = [make_run(arm, loss) for arm, loss in losses.items()]
    for run in runs:
        run["steps"] = {"plain": 40, "plain:steps=10": 10, "cayley:steps=4": 4, "cayley": 16}.get(run["arm"], 8)
        run["step_seconds"] = 0.5 if run["arm"].startswith("plain") else 1.0
    curves = losses_by_time(summarize(runs, list(losses), ()))
    assert curves == {"plain": [(5.0, 2.6), (20.0, 2.0)], "cayley": [(4.0, 2.5), (16.0, 1.5)]}
    assert share_of_time(curves["cayley"], 20.0, 2.0) == pytest.approx(8 / 20)  # half-way in the logarithm
    assert share_of_time(curves["cayley"], 20.0, 1.0) is None
    assert share_of_time(curves["plain"], 20.0, 2.0) == pytest.approx(1)


def test_an_arm_with_options_is_compared_with_the_baseline_that_has_them():
    losses = {"plain": 5.0, "plain:layers=9": 3.0, "cayley:layers=9": 2.0, "cayley:streams=2": 4.5}
    arms = list(losses)
    rows = summarize([make_run(arm, loss) for arm, loss in losses.items()], arms, ("plain",))
    assert [row["differences"].get("plain", {}).get("mean") for row in rows] == [None, -2.0, -1.0, -0.5]


def test_seeds_that_diverged_leave_their_pairs_out():
    row = summarize(make_runs(plain=[1.0, 2.0, 3.0], other=[None, 2.5, 3.5]), ("plain", "other"), ("plain",))[1]
    assert (row["seeds"], row["diverged"], row["differences"]["plain"]["pairs"]) == ([0, 1, 2], 1, 2)
    assert row["differences"]["plain"]["mean"] == 0.5


def test_a_single_seed_has_no_interval():
    row = summarize(make_runs(plain=[1.0], other=[2.0]), ("plain", "other"), ("plain",))[1]
    assert row["metrics"]["loss"] == {"mean": 2.0, "standard_error": None}
    assert row["differences"]["plain"] == {"pairs": 1, "mean": 1.0, "standard_error": None, "interval": None}


def test_every_arm_is_summarized_at_its_best_rate():
    runs = [
        *(make_run("plain", 2.0, seed, 1e-3) for seed in (0, 1)),
        make_run("plain", 3.0, 0, 2e-3),
        make_run("plain", None, 0, 4e-3),
        make_run("cayley", 1.5, 0, 2e-3),
    ]
    plain, cayley = summarize(runs, ("plain", "cayley"), ("plain",))
    assert (plain["learning_rate"], plain["seeds"]) == (1e-3, [0, 1])
    assert plain["rates"] == {"0.001": 2.0, "0.002": 3.0, "0.004": None}
    assert cayley["differences"]["plain"] == {"pairs": 1, "mean": -0.5, "standard_error": None, "interval": None}
    assert [run["seed"] for run in best_runs(runs, "plain")] == [0, 1]


def test_equal_means_as_an_analysis_of_variance_with_blocks():
    table = np.random.default_rng(1).normal(size=(3, 4)) + np.arange(4)
    runs = make_runs(**{arm: row.tolist() for arm, row in zip(("plain", "a", "b"), table)})
    all_arms, mixers = compare_means(runs, ("plain", "a", "b"))
    assert mixers["arms"] == ["a", "b"]
    paired = stats.ttest_rel(table[1], table[2])  # of two arms, F is t squared
    assert mixers["f"] == pytest.approx(paired.statistic**2)
    assert mixers["p"] == pytest.approx(paired.pvalue)
    centred = table - table.mean(0)
    between = 4 * (centred.mean(1) ** 2).sum() / 2
    within = ((centred - centred.mean(1, keepdims=True)) ** 2).sum() / 6
    assert all_arms["f"] == pytest.approx(between / within)
    assert all_arms["p"] == pytest.approx(stats.f.sf(between / within, 2, 6))
    assert compare_means(make_runs(plain=[1.0], a=[2.0]), ("plain", "a")) == []
