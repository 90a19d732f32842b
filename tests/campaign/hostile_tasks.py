"""ARC task files that are torn, mistyped, nested, huge or in another encoding: read rightly, or refused in a line."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jpmhc.experiments.tasks.arc.puzzles import Puzzle, from_folder
from tests.campaign.refusals import find_fault
from tests.campaign.tally import Tally

ROUND = 2000


def run(rng: np.random.Generator, size: int) -> Tally:
    """Write `size` hostile task files, one folder each, and read them."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "task.json"
        for _ in range(size):
            written = make_file(rng)
            path.write_bytes(written)
            answers = bool(rng.integers(2))
            puzzles, fault = find_fault(lambda answers=answers: from_folder(Path(name), answers), str(path))
            fault = fault or (puzzles and find_difference(puzzles[0], written))
            if fault:
                tally.fail(f"{fault}; the file begins with {written[:80]!r}")
            else:
                tally.hold()
    return tally


def find_difference(puzzle: Puzzle, written: bytes) -> str | None:
    """Say where a puzzle that was read is not what the file holds, or return None."""
    content = json.loads(written)
    for part, pairs in (("train", puzzle.demonstrations), ("test", puzzle.tests)):
        read = [[None if g is None else g.tolist() for g in (pair.input, pair.output)] for pair in pairs]
        if read != [[pair["input"], pair.get("output")] for pair in content[part]]:
            return f"{part} was read as {str(read)[:100]}"
        grids = [cell for pair in read for grid in pair if grid is not None for row in grid for cell in row]
        if not all(0 <= cell <= 9 for cell in grids):
            return f"{part} has colours beyond 9"
    return None


def make_file(rng: np.random.Generator) -> bytes:
    """Make a task file with one to three faults; now and then one has none."""
    content: Any = {part: [make_pair(rng) for _ in range(rng.integers(1, 4))] for part in ("train", "test")}
    for _ in range(rng.integers(3)):
        content = spoil_value(rng, content)
    text = json.dumps(content).encode()
    return spoil_bytes(rng, text) if rng.integers(2) else text


def make_pair(rng: np.random.Generator) -> dict[str, Any]:
    """Make a pair of random grids."""
    return {side: rng.integers(0, 10, rng.integers(1, 5, 2)).tolist() for side in ("input", "output")}


def spoil_value(rng: np.random.Generator, content: Any) -> Any:
    """Put something else in the place of one value, somewhere in the content."""
    if rng.random() < 0.15 or not content or not isinstance(content, dict | list):
        return make_value(rng)
    if isinstance(content, dict):
        key = list(content)[rng.integers(len(content))]
        if rng.random() < 0.1:
            return {name: value for name, value in content.items() if name != key}
        return {**content, key: spoil_value(rng, content[key])}
    place = int(rng.integers(len(content)))
    if rng.random() < 0.1:
        return content[:place] + content[place + 1 :]
    return [*content[:place], spoil_value(rng, content[place]), *content[place + 1 :]]


def make_value(rng: np.random.Generator) -> Any:
    """Make a value that does not belong into a task file, or hardly."""
    depth = int(rng.choice([3, 100, 900]))
    nested: Any = 1
    for _ in range(depth):
        nested = [nested] if rng.integers(2) else {"input": nested}
    values = (
        *(None, True, False, -1, 10, 256, 2**63, -(2**70), 10**400, 0.0, 1.5, float("nan"), float("inf"), 1e300),
        *("", "1", "x" * 5000, "\n\r\u2028", "\ud800", "é" * 100, [], {}, [[]], [[[]]], [[1], [1, 2]], [[0] * 31]),
        *([[0]] * 31, [[1, "x" * 5000]], {"x" * 5000: 1}, [{"input": [[1]]}], nested, [list(range(1000))]),
    )
    return values[rng.integers(len(values))]


def spoil_bytes(rng: np.random.Generator, text: bytes) -> bytes:
    """Damage the bytes of a file."""
    place = int(rng.integers(len(text) + 1))
    kind = rng.integers(9)
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + bytes(rng.integers(0, 256, rng.integers(1, 20), dtype=np.uint8)) + text[place:]
    if kind == 2 and text:
        place = min(place, len(text) - 1)
        return text[:place] + bytes([text[place] ^ (1 << int(rng.integers(8)))]) + text[place + 1 :]
    if kind == 3:
        depth = int(rng.choice([500, 1000, 5000, 100_000]))
        return text[:place] + (b"[" * depth if rng.integers(2) else b'{"a":' * depth) + text[place:]
    if kind == 4:
        return text[:place] + b"9" * int(rng.choice([30, 4000, 5000])) + text[place:]
    if kind == 5:
        return text.decode(errors="replace").encode(["utf-16", "utf-32", "utf-8-sig"][rng.integers(3)])
    if kind == 6:
        return text.replace(b"1", [b"NaN", b"-Infinity", b"1e999", b"01", b"1.", b"'1'", b"0x1"][rng.integers(7)])
    if kind == 7:
        return text + text
    return text[place:]
