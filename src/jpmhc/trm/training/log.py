"""The log of a run: a file with one JSON object per line, and TensorBoard where it is installed."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Log:
    """Appends lines to `log.jsonl`, whose `step` is the number of steps done.

    Lines of steps that a resumed run will do again are dropped first.

    Args:
        run: Folder of the run.
        done: Steps already done.
        writes: Whether this process writes: the first of several does.
    """

    def __init__(self, run: Path, done: int = 0, writes: bool = True) -> None:
        self.file: Any = None
        self.board: Any = None
        self.known: set[tuple[str, int]] = set()  # (kind, step) of the lines kept
        if not writes:
            return
        path = run / "log.jsonl"
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line a killed process was writing
                if record["step"] <= done:
                    kept.append(line)
                    self.known.add((record["kind"], record["step"]))
        fresh = path.with_suffix(".new")  # a full disk must not cost what was logged
        fresh.write_text("".join(line + "\n" for line in kept))
        fresh.replace(path)
        self.file = path.open("a")
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write values under a kind ("train", "evaluate", …); numbers also go to TensorBoard as kind/name."""
        if self.file is not None:
            self.file.write(json.dumps({"kind": kind, "step": step, **_name_non_finite(values)}) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in _list_numbers(values):
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for open_file in (self.file, self.board):
            if open_file is not None:
                open_file.close()


def _name_non_finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {name: _name_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _list_numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _list_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"{prefix}{name}", float(value)))
    return found
