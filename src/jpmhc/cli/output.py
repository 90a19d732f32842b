"""The output of commands: the results' folder, warnings, and which process prints."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile


@contextlib.contextmanager
def result_folder(folder: Path) -> Iterator[None]:
    """Make the folder for the results at the beginning of the context; remove it if the context raises an error."""
    new_folders = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as refusal:
        raise ValueError(f"cannot write to {folder} ({refusal.strerror}); name a folder that can be made") from refusal
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for one in new_folders:
                one.rmdir()
        raise


def is_first_process() -> bool:
    """Return whether this process prints: of torchrun's processes, only the first one prints."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print each warning in one line, without the line of code that raised the warning."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *source: print(f"jpmhc: warning: {message}", file=sys.stderr)
        yield
