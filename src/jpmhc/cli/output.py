"""Where commands write their results, and which process prints."""

import os
from pathlib import Path
from tempfile import TemporaryFile


def make_folder(folder: Path) -> None:
    """Make the folder for the results before any work is done that could be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as refusal:
        raise ValueError(f"cannot write to {folder} ({refusal.strerror}); name a folder that can be made") from refusal


def is_first_process() -> bool:
    """Whether this process prints: of those that torchrun started only the first does."""
    return int(os.environ.get("RANK", "0")) == 0
