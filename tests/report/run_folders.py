"""Run folders written by hand, as `jpmhc train` and `jpmhc predict` leave them."""

import json
from pathlib import Path
from typing import Any

SKIP = [[0.75, 0.25], [0.25, 0.75]]


def write_run(
    folder: Path, *, mixer: str = "cayley", seed: int = 0, steps: int = 20, loss: Any = None, **options: Any
) -> Path:
    """Write a run of which every step is logged; its loss at step k is `loss(k)`, by default 2 / k + seed."""
    folder.mkdir(parents=True)
    config = {
        "preset": "laptop",
        "task": {"kind": "sudoku", "size": 4},
        "model": {"dim": 64, "mixer": mixer, "streams": 2},
        "steps": steps,
        "lr": 0.5,
        "seed": seed,
        "out": str(folder),
        **options,
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines: list[dict[str, Any]] = [
        {
            "kind": "start",
            "step": 0,
            "jpmhc": "0.1.0",
            "commit": "abc123",
            "command": "/home/me/bin/jpmhc train --seed 7",
        }
    ]
    for step in range(1, steps + 1):
        lines.append(
            {
                "kind": "train",
                "step": step,
                "loss": (loss or (lambda k: 2 / k + seed))(step),
                "halted": step % 2,
                "exact_accuracy": 0.5 if step % 2 else 0.0,
                "token_accuracy": 0.75,
                "rate": 0.5,
                "gradient_norm": 1.0,
                "layer_gradient_norms": {"tokens": 0.5, "network.connections.0": 0.25},
                "sequences_per_second": 100.0,
            }
        )
    lines.append({"kind": "evaluate", "step": steps, "exact_accuracy": 0.25, "token_accuracy": 0.5, "lm_loss": 0.7})
    lines.append(
        {
            "kind": "mixing",
            "step": steps,
            "skips": {"network.connections.0": SKIP},
            "distance_to_identity": {"network.connections.0": 0.5},
            "violation": {"network.connections.0": 1e-7},
            "product_collapsed": 0.5,
            "product_over_depth": [[1.0, 0.5], [1.0, 0.25]],
            "random_product_over_depth": [[1.0, 0.1], [1.0, 0.01]],
        }
    )
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_votes(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Write the votes that `jpmhc predict` leaves in a run's folder."""
    (folder / "submissions").mkdir()
    path = folder / "submissions" / "step-00000020.votes.json"
    path.write_text(json.dumps({"format": "jpmhc votes 1", "tests": tests}))
