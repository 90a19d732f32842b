"""Flip one bit of a checkpoint of torch.distributed.checkpoint, and count how often loading notices.

The numbers are in docs/results/reliability.md:

    python benchmarks/check_damage.py
"""

import random
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.distributed import checkpoint

TRIES = 300


def make_values() -> dict[str, object]:
    """Return weights, a step and the state of a random generator, as a training run saves."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"weight {k}": torch.randn(64, 64, generator=generator) for k in range(8)}
    return {**weights, "step": 7, "generator": generator.get_state()}


def load(folder: Path) -> str:
    """Load a checkpoint, and say what came of it."""
    values = make_values()
    found = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in values.items()}
    try:
        checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    except (Exception, checkpoint.CheckpointException):  # noqa: BLE001 - any error is a damage that was noticed
        return "an error"
    same = all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in values.items()
    )
    return "the values that were saved" if same else "other values, without a word"


def main() -> None:
    warnings.simplefilter("ignore")
    draw, tally = random.Random(0), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        whole, damaged = Path(name) / "whole", Path(name) / "damaged"
        checkpoint.save(make_values(), checkpoint_id=whole, no_dist=True)
        sizes = {path.name: path.stat().st_size for path in sorted(whole.iterdir())}
        for number in range(TRIES):
            shutil.copytree(whole, damaged)
            chosen = ".metadata" if number % 3 == 0 else draw.choices([*sizes], [*sizes.values()])[0]
            content = bytearray((damaged / chosen).read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (damaged / chosen).write_bytes(content)
            tally[load(damaged)] += 1
            shutil.rmtree(damaged)
    for outcome, count in tally.most_common():
        print(f"{count} of {TRIES}: {outcome}")


if __name__ == "__main__":
    main()
