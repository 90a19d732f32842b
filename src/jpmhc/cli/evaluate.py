"""The command `jpmhc evaluate`."""

from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from jpmhc.cli.output import is_first_process
from jpmhc.trm.training.evaluation import EvaluateConfig, evaluate_checkpoints, summary


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc evaluate` and run it."""
    tyro.cli(evaluate, prog="jpmhc evaluate", args=words)


def evaluate(config: Annotated[EvaluateConfig, tyro.conf.arg(name="")]) -> None:
    """Score checkpoints on held-out puzzles: exact accuracy, and for ARC pass@k by vote.

    Example: jpmhc evaluate out/laptop
    Example: jpmhc evaluate out/arc-small --variants 32 --out out/evaluation.json

    Several processes: torchrun --nproc-per-node 8 -m jpmhc evaluate out/paper
    """
    found = evaluate_checkpoints(config, print_scores)
    if is_first_process():
        print(f"wrote {found['choices']['out']}")


def print_scores(found: dict[str, Any]) -> None:
    """Print one line for every checkpoint, and one for all of them pooled."""
    parts = [(f"{result['checkpoint']}: {result['tests']}", result["metrics"]) for result in found["results"]]
    if found["pooled"] is not None:
        parts.append(("all checkpoints pooled", found["pooled"]))
    for name, metrics in parts:
        print(f"{name}: {summary(metrics)}", flush=True)
