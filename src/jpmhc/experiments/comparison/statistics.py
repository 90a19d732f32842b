"""Means, errors, paired differences and F tests over the runs of a comparison."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from jpmhc.experiments.comparison.experiment import PLAIN, Run, split_arm


class Difference(TypedDict):
    """The mean difference of two arms' losses over their common seeds."""

    pairs: int
    mean: float | None
    standard_error: float | None
    interval: tuple[float, float] | None  # 95 % confidence interval of a paired t test


class Mean(TypedDict):
    """A mean over seeds and its standard error; None if there are too few seeds."""

    mean: float | None
    standard_error: float | None


class ArmSummary(TypedDict):
    """The runs of one arm at its best learning rate."""

    arm: str
    learning_rate: float  # the best one (see `best_runs`)
    rates: dict[str, float | None]  # the loss at the first seed by learning rate; None if the run diverged
    seeds: list[int]
    diverged: int
    parameters: int
    steps: int
    seconds: float
    step_seconds: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    metrics: dict[str, Mean]  # by the names in `Run.final`
    differences: dict[str, Difference]  # from each baseline's loss; a baseline with the arm's options is preferred


class EqualMeans(TypedDict):
    """An F test of the hypothesis that arms have the same mean loss, with seeds as blocks."""

    arms: list[str]
    seeds: list[int]
    f: float
    p: float


def best_runs(runs: Sequence[Run], arm: str) -> list[Run]:
    """Return an arm's runs at its best learning rate, sorted by seed.

    Learning rates are compared by the mean loss over the seeds that all rates have in common, or over all seeds of each
    rate if there is no common seed.
    """
    rates: dict[float, dict[int, Run]] = {}
    for run in runs:
        if run["arm"] == arm:
            rates.setdefault(run["learning_rate"], {})[run["seed"]] = run
    if not rates:
        return []
    shared = set.intersection(*(set(own) for own in rates.values()))

    def mean_loss(rate: float) -> float:
        own = [run["final"].get("loss", math.inf) for seed, run in rates[rate].items() if seed in shared or not shared]
        return sum(own) / len(own)

    best = rates[min(rates, key=mean_loss)]
    return [best[seed] for seed in sorted(best)]


def summarize(runs: Sequence[Run], arms: Sequence[str], baselines: Sequence[str]) -> list[ArmSummary]:
    """Return a summary of each trained arm's runs at its best learning rate, in the order of `arms`.

    A summary has the differences between the losses of the arm and of each of the `baselines`, which are arms, too.
    """
    chosen = {arm: best for arm in arms if (best := best_runs(runs, arm))}
    losses = {arm: {run["seed"]: run["final"]["loss"] for run in best if run["final"]} for arm, best in chosen.items()}
    return [
        {
            "arm": arm,
            "learning_rate": best[0]["learning_rate"],
            "rates": _first_losses(runs, arm),
            "seeds": [run["seed"] for run in best],
            "diverged": sum(not run["final"] for run in best),
            "parameters": best[0]["parameters"],
            "steps": best[0]["steps"],
            "seconds": float(np.mean([run["seconds"] for run in best])),
            "step_seconds": _median([run["step_seconds"] for run in best]),
            "tokens_per_second": _median([run["tokens_per_second"] for run in best]),
            "peak_bytes": best[0]["peak_bytes"],
            "metrics": {
                name: mean_and_error([run["final"][name] for run in best if run["final"]])
                for name in dict.fromkeys(name for run in best for name in run["final"])
            },
            "differences": {
                baseline: subtract(losses[arm], losses[other])
                for baseline in baselines
                if (other := _with_options_of(arm, baseline, losses)) in losses and other != arm
            },
        }
        for arm, best in chosen.items()
    ]


def _with_options_of(arm: str, baseline: str, arms: Mapping[str, object]) -> str:
    """Return the arm to subtract: the baseline with the arm's options if it was trained, otherwise the baseline."""
    _, colon, options = arm.partition(":")
    changed = baseline + colon + options
    return changed if changed in arms and changed != arm else baseline


def _first_losses(runs: Sequence[Run], arm: str) -> dict[str, float | None]:
    own = [run for run in runs if run["arm"] == arm]
    first = min(run["seed"] for run in own)
    ordered = sorted((run for run in own if run["seed"] == first), key=lambda run: run["learning_rate"])
    return {f"{run['learning_rate']:g}": run["final"].get("loss") for run in ordered}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def mean_and_error(values: Sequence[float]) -> Mean:
    """Return the values' mean and its standard error; None if there are too few values."""
    mean = float(np.mean(values)) if len(values) else None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": mean, "standard_error": error}


def subtract(losses: Mapping[int, float], others: Mapping[int, float]) -> Difference:
    """Return the mean of `losses` - `others` over their common seeds, with the 95 % interval of a paired t test.

    Both arguments are dicts from an arm's seeds to its final losses.

    >>> subtract({0: 2.0, 1: 3.0}, {0: 1.5, 2: 1.0})
    {'pairs': 1, 'mean': 0.5, 'standard_error': None, 'interval': None}
    """
    pairs = [losses[seed] - others[seed] for seed in losses if seed in others]
    difference = mean_and_error(pairs)
    mean, error = difference["mean"], difference["standard_error"]
    if mean is None or error is None:
        return {"pairs": len(pairs), **difference, "interval": None}
    reach = student_quantile(len(pairs) - 1) * error
    return {"pairs": len(pairs), **difference, "interval": (mean - reach, mean + reach)}


def correlate_with_loss(summary: Sequence[ArmSummary]) -> dict[str, tuple[float, int]]:
    """Return {number: (Spearman's rank correlation with the loss, number of arms)} for each final number of the runs.

    The correlation is over the arms that have the number and as many steps as the first arm, by their means over seeds.
    Numbers that fewer than four arms have, or that are equal in all arms, are left out.
    """
    from scipy.stats import spearmanr

    alike = [row["metrics"] for row in summary if row["steps"] == summary[0]["steps"] and row["metrics"]]
    correlations = {}
    for name in dict.fromkeys(name for metrics in alike for name in metrics if name != "loss"):
        pairs = [(metrics[name]["mean"], metrics["loss"]["mean"]) for metrics in alike if name in metrics]
        if len(pairs) > 3 and len({value for value, _ in pairs}) > 1:
            correlations[name] = float(spearmanr(*zip(*pairs)).statistic), len(pairs)
    return correlations


def losses_by_time(summary: Sequence[ArmSummary]) -> dict[str, list[tuple[float, float]]]:
    """Return (training seconds, final loss), in rising order of time, for each arm with several numbers of steps.

    The arms `cayley:steps=900` and `cayley` are points of one curve with the name `cayley`. Training seconds are steps
    times the median time of a step, without compilation and measurements.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in summary:
        mixer, options = split_arm(row["arm"])
        options.pop("steps", None)
        text = ",".join(f"{name}={value}" for name, value in options.items())
        loss = row["metrics"]["loss"]["mean"] if "loss" in row["metrics"] else None
        if row["step_seconds"] is not None and loss is not None:
            point = row["steps"] * row["step_seconds"], loss
            curves.setdefault(f"{mixer}:{text}" if text else mixer, []).append(point)
    return {arm: sorted(points) for arm, points in curves.items() if len(points) > 1}


def share_of_time(curve: Sequence[tuple[float, float]], time: float, loss: float) -> float | None:
    """Return the time at which a curve of `losses_by_time` reaches `loss`, divided by `time`.

    Between points the loss is linear in the logarithm of the time. Returns None if `loss` is not between the losses of
    two neighbouring points.

    >>> share_of_time([(10.0, 3.0), (40.0, 2.0)], 100.0, 2.5)
    0.2
    """
    for (early, high), (late, low) in itertools.pairwise(curve):
        if low <= loss <= high and low < high:
            done = (high - loss) / (high - low)
            return early * (late / early) ** done / time
    return None


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with these degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def compare_means(runs: Sequence[Run], arms: Sequence[str]) -> list[EqualMeans]:
    """Return F tests of equal mean losses over common seeds: one of all arms, and one of the arms with streams.

    Arms with a single seed are left out. A test needs two arms and two common seeds.
    """
    from scipy.special import fdtrc

    tests: list[EqualMeans] = []
    losses = {
        arm: {run["seed"]: run["final"]["loss"] for run in best_runs(runs, arm) if run["final"]}
        for arm in dict.fromkeys(arms)
    }
    with_streams = [arm for arm in arms if not arm.startswith(PLAIN)]
    for group in dict.fromkeys((tuple(arms), tuple(with_streams))):
        own = {arm: losses[arm] for arm in group if len(losses[arm]) > 1}
        seeds = sorted(set.intersection(*(set(one) for one in own.values()))) if own else []
        if len(own) < 2 or len(seeds) < 2:
            continue
        table = np.array([[one[seed] for seed in seeds] for one in own.values()])  # [arms, seeds]
        rows, columns = table.shape
        between = columns * ((table.mean(1) - table.mean()) ** 2).sum() / (rows - 1)
        rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
        freedom = (rows - 1) * (columns - 1)
        f = between / ((rest**2).sum() / freedom)
        tests.append({"arms": list(own), "seeds": seeds, "f": float(f), "p": float(fdtrc(rows - 1, freedom, f))})
    return tests
