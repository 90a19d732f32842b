"""Where commands write their results, and which process prints."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile


@contextlib.contextmanager
def result_folder(folder: Path) -> Iterator[None]:
    """Make the folder for the results before any work is done that could be lost; remove it if the work fails."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as refusal:
        raise ValueError(f"cannot write to {folder} ({refusal.strerror}); name a folder that can be made") from refusal
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that holds something stays
            for one in made:
                one.rmdir()
        raise


def is_first_process() -> bool:
    """Whether this process prints: of those that torchrun started only the first does."""
    return int(os.environ.get("RANK", "0")) == 0
