"""Checks of a run's folder: a new run needs a folder without another run, and only one process may write to it."""

import contextlib
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jpmhc.experiments.training import checkpoint
from jpmhc.files import explaining_write_errors

_LOCK = ".lock"


def refuse_used_folder(run: Path) -> None:
    """Raise a ValueError if another run is training in a folder, or has left files there."""
    refuse_busy_folder(run)
    _refuse_remains(run)


def refuse_busy_folder(run: Path) -> None:
    """Raise a ValueError if another process is training in a folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(run / _LOCK) as file:
        _take_lock(file, fcntl.LOCK_SH, run)


class FolderGone(OSError):
    """The error for a run's folder that was removed or renamed during the run."""


@contextlib.contextmanager
def lock_folder(run: Path, new: bool) -> Iterator[Callable[[], None]]:
    """Create a run's folder if needed, and lock it for this process; the lock always ends with the process.

    Yields a function that raises `FolderGone` if the folder was removed or renamed. For a `new` run, a folder with
    files of another run raises a ValueError.
    """
    with explaining_write_errors(run):
        run.mkdir(parents=True, exist_ok=True)
        (run / _LOCK).touch()  # never removed, because a lock on a removed file has no effect
    with open(run / _LOCK, "a") as file:
        _take_lock(file, fcntl.LOCK_EX, run)
        if new:
            _refuse_remains(run)

        def require_folder() -> None:
            try:
                same = os.path.samestat(os.stat(run / _LOCK), os.fstat(file.fileno()))
            except OSError:
                same = False
            if not same:
                raise FolderGone(f"{run} was removed or renamed while the run wrote to it")

        yield require_folder


def _refuse_remains(run: Path) -> None:
    if checkpoint.list_folders(run):
        raise ValueError(
            f"{run} already holds checkpoints: choose another --out, or go on with jpmhc train --resume latest"
        )
    if left := [name for name in ("config.json", "log.jsonl") if (run / name).exists()]:
        raise ValueError(
            f"{run} holds {' and '.join(left)} of a run that ended before its first checkpoint: "
            f"choose another --out, or remove {'them' if len(left) > 1 else 'it'}"
        )


def _take_lock(file: IO[str], kind: int, run: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another process is training in {run}: wait for its end, or choose another --out") from None
    except OSError as refusal:
        # Some cluster file systems have no locks; training there is allowed, with a warning.
        warnings.warn(
            f"{run} cannot be locked ({refusal.strerror}): see to it that no second run writes to it", stacklevel=2
        )
