"""Write and read files. A file keeps its old content until the new content is complete and on the disk."""

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
    """Yield a temporary file that replaces `path` if the block ends without an error.

    The temporary file is a hidden file in the folder of `path`; the folder is created if needed. At the end the file is
    synced to the disk and renamed. After an error the temporary file is removed, and `path` stays as it was. A path
    that is not a regular file, such as /dev/stdout, is written directly. A write error raises an OSError whose
    `filename` is `path`.

    >>> with replacing(Path("/dev/null")) as file:
    ...     _ = file.write(b"content")
    """
    with _naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(path))  # a symbolic link stays a link
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
    """Write content to a file, in place of any former content, and return the path. Text is written as UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder) / "new folder" / "answer.txt", "42").read_text()
    '42'
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Path:
    """Write a CSV table with one heading per column to a file, and return the file's path."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return write_file(path, text.getvalue())


JsonObject = dict[str, Any]  # the content of a JSON file that holds an object


class NotJson(ValueError):
    """The error for text that is not valid JSON; the message says why."""


def parse_json(text: bytes) -> Any:
    """Parse the bytes of a JSON file in UTF-8. Raise `NotJson` if they are not valid JSON.

    >>> parse_json(b'{"steps": 4}')
    {'steps': 4}
    """
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise NotJson("JSON that is nested too deeply") from None
    except ValueError as error:  # also for bytes that are not UTF-8, and for numbers with thousands of digits
        raise NotJson(f"not a JSON file ({str(error).partition(';')[0]})") from None


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise a ValueError that names the file if it cannot be read or is not valid JSON."""
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except NotJson as error:
        raise ValueError(f"{path} is {error}") from None


def read_json_object(path: Path) -> JsonObject:
    """Read a JSON file that holds an object. Raise a ValueError that names the file if it does not."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def write_json(path: Path, value: object, indent: int | None = None) -> Path:
    """Write a value as JSON to a file, and return the path. Raise a ValueError for numbers that are not finite.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_json(write_json(Path(folder) / "steps.json", {"steps": 4}))
    {'steps': 4}
    """
    return write_file(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


@contextlib.contextmanager
def explaining_write_errors(path: Path, option: str = "--out") -> Iterator[None]:
    """Turn an OSError from writing to a path into a ValueError that advises another value of `option`."""
    try:
        yield
    except OSError as refusal:
        raise ValueError(f"cannot write to {path} ({refusal.strerror}): name another {option}") from refusal


def require_writable(path: Path, option: str = "--out") -> None:
    """Raise a ValueError as `explaining_write_errors` does if a file cannot be written.

    Call this before computing results. It writes nothing, so it does not detect a full disk.
    """
    with explaining_write_errors(path, option):
        target = Path(os.path.realpath(path))
        if _is_replaceable(target):
            with TemporaryFile(dir=next(folder for folder in target.parents if folder.exists())):
                pass


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of file names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_replaceable(target: Path) -> bool:
    """Return whether a path is new or a regular file. Raise an OSError for a folder or a read-only file."""
    if target.exists():
        with open(target, "ab"):
            pass
    return not target.exists() or target.is_file()


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into one whose `filename` is `path`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save turns the error of a full disk into a RuntimeError about positions in the file.
        refusal = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refusal, OSError):
            raise
        raise OSError(refusal.errno, refusal.strerror or str(refusal), str(path)) from error
