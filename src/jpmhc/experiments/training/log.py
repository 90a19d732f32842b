"""The log of a run: a file with one JSON object per line, and TensorBoard if it is installed."""

from __future__ import annotations

import json
import math
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

import torch
from torch.utils._pytree import tree_map

from jpmhc import __version__
from jpmhc.experiments.training.config import flatten_fields
from jpmhc.experiments.training.processes import World
from jpmhc.experiments.training.run_folder import FolderGone
from jpmhc.files import JsonObject, NotJson, parse_json, write_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Log:
    """The log file `log.jsonl` of a run; each line records the number of finished steps as `step`.

    Args:
        run: The run's folder.
        done: Number of finished steps. Lines of later steps, which a resumed run repeats, are removed from the file.
        writes: Whether this process writes; of several processes only the first does.
        require_folder: A function that is called before every line, and raises `FolderGone` if the folder is gone.
    """

    def __init__(
        self, run: Path, done: int = 0, writes: bool = True, require_folder: Callable[[], None] = lambda: None
    ) -> None:
        self.require_folder = require_folder
        self.file: IO[str] | None = None
        self.board: SummaryWriter | None = None
        self.known: set[tuple[str, int]] = set()  # (kind, step) of the lines in the file at the start
        self.damaged = 0  # number of unreadable lines, such as one cut by a kill, which were removed
        if not writes:
            return
        path = run / "log.jsonl"
        lines = []
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                record = _parse_line(line)
                if record is None:
                    self.damaged += bool(line)
                elif record["step"] <= done:
                    lines.append(line.decode())
                    self.known.add((record["kind"], record["step"]))
        write_file(path, "".join(line + "\n" for line in lines))
        self.file = path.open("a")
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)

    def write(self, kind: str, step: int, values: Mapping[str, object]) -> None:
        """Write values of one kind ("train", "evaluate", …) as a line, and the numbers as kind/name to TensorBoard."""
        self.require_folder()
        if self.file is not None:
            line = {"kind": kind, "step": step, **tree_map(_name_non_finite, dict(values))}
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        if self.board is not None:
            for name, value in flatten_fields(values, "/").items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.board.add_scalar(f"{kind}/{name}", value, step)
            self.board.flush()  # TensorBoard's thread would fail if the folder were removed before it writes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None and not isinstance(error, FolderGone):  # without the folder, closing would fail
            self.board.close()


def _parse_line(line: bytes) -> JsonObject | None:
    """Return the record in a line of the log, or None if the line is incomplete."""
    try:
        record = parse_json(line)
    except NotJson:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("kind"), str) and type(record.get("step")) is int
    return record if whole else None


def _name_non_finite(value: object) -> object:
    """Return NaN and infinities, which JSON lacks, as text, and any other value unchanged."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def describe_environment(world: World) -> dict[str, object]:
    """Return versions, commit, command and device, for the first line of a log."""
    gpu = world.device.type == "cuda"
    return {
        "jpmhc": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": find_commit(Path(__file__).parents[2]),
        "command": shlex.join(sys.argv),
        "device": torch.cuda.get_device_name(world.device) if gpu else "cpu",
        "processes": world.size,
    }


def find_commit(folder: Path) -> str | None:
    """Return a folder's git commit, with a plus if files have changed since; None outside version control."""
    if shutil.which("git") is None:
        return None

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True).stdout.strip()

    if not ask("ls-files", "__init__.py"):
        return None  # not under version control, or installed inside somebody else's repository
    changed = ask("status", "--porcelain", "--untracked-files=no", ".")
    return ask("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
