"""Curves along training, in the form in which a comparison keeps them."""

from collections.abc import Sequence
from typing import Any

Curves = dict[str, list[Any]]

POINTS = 100  # of a training curve
_TAIL = 0.1  # share of a training curve, at its end, that makes its final number


def average_stretches(values: Sequence[float], count: int = POINTS) -> tuple[list[int], list[float]]:
    """Average a list over at most `count` stretches; returns the place at which each one ends, and its mean."""
    size = max(1, -(-len(values) // count))
    starts = range(0, len(values), size)
    parts = [values[start : start + size] for start in starts]
    return [start + len(part) for start, part in zip(starts, parts)], [sum(part) / len(part) for part in parts]


def append_values(curves: Curves, step: int, values: dict[str, float]) -> None:
    """Add the values at a step to the curves of the same names."""
    for name, value in {"step": step, **values}.items():
        curves.setdefault(name, []).append(value)


def summarize_mixing(found: dict[str, Any]) -> dict[str, float]:
    """Choose what is kept of the statistics of a model's mixers."""
    distances = found["distance_to_identity"].values()
    return {
        **found["product_singular_values"],
        "collapsed": found["product_collapsed"],
        "distance_to_identity": sum(distances) / len(distances),
    }


def final_values(train: Curves, validation: Curves, mixing: Curves) -> dict[str, float]:
    """Return where the curves end; training's, which are noisy, are averaged over the last tenth."""
    last = {name: values[-1] for curves in (validation, mixing) for name, values in curves.items()}
    tail = {name: values[-max(1, round(_TAIL * len(values))) :] for name, values in train.items()}
    means = {name: sum(values) / len(values) for name, values in tail.items()}
    found = {**last, "train_loss": means["loss"], "gradient_norm": means["gradient_norm"]}
    return {name: value for name, value in found.items() if name != "step"}
