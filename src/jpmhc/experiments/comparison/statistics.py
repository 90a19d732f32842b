"""Means, errors and paired differences over the seeds of a comparison."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpmhc.experiments.comparison.experiment import Run

# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom.
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def summarize(runs: Sequence[Run], mixers: Sequence[str], baseline: str) -> list[dict[str, Any]]:
    """Summarize the runs of every mixer.

    Args:
        runs: The runs of a comparison.
        mixers: Its mixers, in the order of the result.
        baseline: The mixer from which the others are subtracted, seed by seed.

    Returns:
        A dictionary for each mixer: `mixer`, `runs`, how many of them `diverged`, `parameters`, mean `seconds`, and
        `metrics`: for every name in the runs' `final`, the `mean` and `standard_error` over the runs that did not
        diverge, and the `difference` to the baseline, its `difference_error` and the 95 % `interval` of a paired t
        test over `pairs` seeds. What one seed cannot give is null.
    """
    summary = []
    finished = {(run["mixer"], run["seed"]): run["final"] for run in runs if run["final"]}
    for mixer in mixers:
        own = [run for run in runs if run["mixer"] == mixer]
        if not own:
            continue
        names = list(dict.fromkeys(name for run in own for name in run["final"]))
        summary.append(
            {
                "mixer": mixer,
                "runs": len(own),
                "diverged": sum(not run["final"] for run in own),
                "parameters": own[0]["parameters"],
                "seconds": float(np.mean([run["seconds"] for run in own])),
                "metrics": {name: _describe_metric(name, mixer, baseline, finished) for name in names},
            }
        )
    return summary


def _describe_metric(
    name: str, mixer: str, baseline: str, finished: dict[tuple[str, int], dict[str, float]]
) -> dict[str, Any]:
    seeds = [seed for which, seed in finished if which == mixer]
    values = [finished[mixer, seed][name] for seed in seeds]
    pairs = [
        finished[mixer, seed][name] - finished[baseline, seed][name]
        for seed in seeds
        if name in finished.get((baseline, seed), {}) and mixer != baseline
    ]
    mean, error = mean_and_error(values)
    difference, difference_error = mean_and_error(pairs)
    reach = None if difference_error is None else student_quantile(len(pairs) - 1) * difference_error
    return {
        "mean": mean,
        "standard_error": error,
        "pairs": len(pairs),
        "difference": difference,
        "difference_error": difference_error,
        "interval": None if reach is None or difference is None else [difference - reach, difference + reach],
    }


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None where there are too few values."""
    if not values:
        return None, None
    mean = float(np.mean(values))
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, to 0.1 %."""
    return _T975[freedom - 1] if freedom <= len(_T975) else 1.960 + 2.5 / freedom
