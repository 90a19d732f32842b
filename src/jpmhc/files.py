"""Writing and reading files: the former content of a file stays until its new content is whole and on the disk."""

import contextlib
import csv
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which takes the place of `path` when the block ends without an error.

    The new file lies hidden in the folder of `path`, which is made if it does not exist. At the end it is synced to the
    disk and renamed. An error removes it and leaves `path` as it was. A path that is no regular file, such as
    /dev/stdout, is written to directly. A write error raises an OSError whose `filename` is `path`.

    >>> with replacing(Path("/dev/null")) as file:
    ...     _ = file.write(b"content")
    """
    with _naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))  # a symbolic link stays one
        if not _is_replaceable(target):
            with open(target, "wb") as file:
                yield file
            return
        new = target.with_name(f".{target.name[:40]}.{os.getpid()}.new")
        try:
            with open(new, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                new.chmod(stat.S_IMODE(target.stat().st_mode))
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)
        sync_folder(target.parent)


def write_file(path: Path, content: str | bytes) -> Path:
    """Replace the content of a file and return its path; text is written as UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder) / "new folder" / "answer.txt", "42").read_text()
    '42'
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Path:
    """Replace the content of a file by a table with one heading per column, and return the file's path."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return write_file(path, text.getvalue())


class NotJson(ValueError):
    """A text is not JSON that can be read; the message says why."""


def parse_json(text: bytes) -> Any:
    """Parse the bytes of a JSON file, which is UTF-8; whatever is wrong raises `NotJson`.

    >>> parse_json(b'{"steps": 4}')
    {'steps': 4}
    """
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise NotJson("JSON that is nested too deeply") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of numbers with thousands of digits
        raise NotJson(f"not a JSON file ({str(error).partition(';')[0]})") from None


def require_writable(path: Path) -> None:
    """Raise the OSError that writing a file would raise, without a trace; a full disk is not noticed."""
    with _naming_file(path):
        target = Path(os.path.realpath(path))
        if _is_replaceable(target):
            with TemporaryFile(dir=next(folder for folder in target.parents if folder.exists())):
                pass


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_replaceable(target: Path) -> bool:
    """Whether a path may be replaced; a folder or a read-only file raises an OSError, although it could be."""
    if target.exists():
        with open(target, "ab"):
            pass
    return not target.exists() or target.is_file()


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Let an OSError inside the block name this file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save turns the error of a full disk into a RuntimeError about positions in the file.
        refusal = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refusal, OSError):
            raise
        raise OSError(refusal.errno, refusal.strerror or str(refusal), str(path)) from error
