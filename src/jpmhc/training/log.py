"""The log of a run: one JSON object per line always, TensorBoard when it is installed."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Log:
    """Appends to `log.jsonl`; lines at or after the step a run resumes from are dropped first.

    Args:
        run: Folder of the run.
        start: First step that will be logged.
    """

    def __init__(self, run: Path, start: int = 0) -> None:
        self.path = run / "log.jsonl"
        kept = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line a killed process was writing
                if record["step"] < start:
                    kept.append(line)
        self.path.write_text("".join(line + "\n" for line in kept))
        self.file = self.path.open("a")
        self.board: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log values under a kind ("train", "evaluate", …); numbers also go to TensorBoard as kind/name."""
        self.file.write(json.dumps({"kind": kind, "step": step, **_plain(values)}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in _numbers(values):
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is written as its name."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"{prefix}{name}", float(value)))
    return found
