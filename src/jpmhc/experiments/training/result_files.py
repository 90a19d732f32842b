"""The files that evaluations and predictions write: named for what was asked, and never left half written."""

import zlib
from pathlib import Path

from jpmhc import files
from jpmhc.experiments.training.checkpoint import Checkpoint
from jpmhc.experiments.training.run_folder import explaining_write_errors


def name_result_file(checkpoint: Checkpoint, folder: str, words: list[str], puzzles: tuple[str, ...] = ()) -> Path:
    """Name a file in the checkpoint's run so that results of different questions do not overwrite each other.

    Args:
        checkpoint: The checkpoint that is asked.
        folder: The run's folder for this kind of result.
        words: The choices that the results depend on.
        puzzles: The puzzles that are asked about; empty: all.
    """
    path = checkpoint.path if checkpoint.path.parent.name == "checkpoints" else checkpoint.path.resolve()
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    puzzles = tuple(dict.fromkeys(puzzles))
    names = "-".join(puzzles)
    chosen = [names if len(names) < 100 else f"{len(puzzles)}-tasks-{zlib.crc32(names.encode()):08x}"] if names else []
    return run / folder / f"{'-'.join([path.name, *words, *chosen])}.json"


def require_writable(path: Path) -> None:
    """Refuse a place that cannot be written to before the work is done rather than after."""
    with explaining_write_errors(path):
        files.require_writable(path)


def write_result(path: Path, text: str) -> None:
    """Replace a file of results; what it held stays until all of the new text is on the disk."""
    with explaining_write_errors(path):
        files.write_file(path, text)
