"""Flip one bit of a checkpoint, and count how often loading notices, for two formats with and without checksums.

The formats are those of `torch.save` and of `torch.distributed.checkpoint`. Checksums are one CRC32 per file, checked
before loading. Also measured: seconds and bytes of a larger checkpoint, and the seconds for which a training step waits
while `async_save` writes it. The numbers are in docs/results/reliability.md:

    python benchmarks/check_damage.py
"""

import logging
import random
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.distributed import checkpoint

TRIES = 300
Values = dict[str, object]
Load = Callable[[Path], Values]


def make_values(width: int) -> Values:
    """Return weights, a step and the state of a random generator, as a training run saves."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"weight {k}": torch.randn(width, width, generator=generator) for k in range(8)}
    return {**weights, "step": 7, "generator": generator.get_state()}


def save_file(values: Values, folder: Path) -> None:
    folder.mkdir()
    torch.save(values, folder / "values.pt")


def load_file(folder: Path) -> Values:
    return torch.load(folder / "values.pt", weights_only=True)


def save_distributed(values: Values, folder: Path) -> None:
    checkpoint.save(values, checkpoint_id=folder, no_dist=True)


def load_distributed(folder: Path) -> Values:
    values: Values = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 for key, value in make_values(64).items()
    }
    checkpoint.load(values, checkpoint_id=folder, no_dist=True)
    return values


def compute_checksums(folder: Path) -> dict[str, int]:
    """Return the checksum of every file in a folder."""
    return {path.name: zlib.crc32(path.read_bytes()) for path in sorted(folder.iterdir())}


def try_load(load: Load, folder: Path) -> str:
    """Load a checkpoint, and describe the result."""
    try:
        values = load(folder)
    except (Exception, checkpoint.CheckpointException):  # noqa: BLE001 - any error reports the damage
        return "an error"
    same = all(
        torch.equal(values[key], value) if isinstance(value, torch.Tensor) else values[key] == value
        for key, value in make_values(64).items()
    )
    return "the saved values" if same else "other values, without an error"


def flip_bits(whole: Path) -> Iterator[Path]:
    """Yield copies of a folder, each with another flipped bit; every third bit is in the smallest file."""
    draw, damaged = random.Random(0), whole.with_name("damaged")
    sizes = {path.name: path.stat().st_size for path in sorted(whole.iterdir())}
    for number in range(TRIES):
        shutil.copytree(whole, damaged)
        smallest = min(sizes, key=sizes.__getitem__)
        name = smallest if number % 3 == 0 else draw.choices([*sizes], [*sizes.values()])[0]
        content = bytearray((damaged / name).read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (damaged / name).write_bytes(content)
        yield damaged
        shutil.rmtree(damaged)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()  # torch.distributed.checkpoint logs every error
    formats = {
        "torch.save": (save_file, load_file),
        "torch.distributed.checkpoint": (save_distributed, load_distributed),
    }
    large = make_values(2048)
    for name, (save, load) in formats.items():
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "whole"
            save(make_values(64), whole)
            print(f"{name}: undamaged: {try_load(load, whole)}")
            checksums = compute_checksums(whole)
            plain, checked = Counter[str](), Counter[str]()
            for damaged in flip_bits(whole):
                plain[try_load(load, damaged)] += 1
                checked["an error" if compute_checksums(damaged) != checksums else try_load(load, damaged)] += 1
            for what, tally in (("", plain), (" with checksums", checked)):
                counts = "; ".join(f"{count} of {TRIES}: {outcome}" for outcome, count in tally.most_common())
                print(f"{name}{what}: {counts}")
            started = time.monotonic()
            save(large, Path(folder) / "large")
            saved = time.monotonic()
            compute_checksums(Path(folder) / "large")
            size = sum(path.stat().st_size for path in (Path(folder) / "large").iterdir())
            print(f"{name}: {size:,} bytes, {saved - started:.2f} s, checksums {time.monotonic() - saved:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        saving = checkpoint.async_save(large, checkpoint_id=Path(folder) / "large", no_dist=True)
        waited = time.monotonic() - started
        saving.result()
        print(f"async_save: the step waits {waited:.2f} s, the disk is done after {time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    main()
