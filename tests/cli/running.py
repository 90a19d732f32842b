"""Running commands that fail, or whose output nobody reads."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator

import pytest

from jpmhc import cli


def fails_with(capsys: pytest.CaptureFixture[str], pattern: str, *arguments: str) -> None:
    """Check that a command ends with status 2 and one line on stderr that matches the pattern."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert re.search(pattern, lines[0])


@contextlib.contextmanager
def closed_pipe() -> Iterator[None]:
    """Let the output and the errors go into a pipe whose reader has left."""
    before = sys.stdout, sys.stderr
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(writer), "w", buffering=1) for _ in range(2))
    os.close(writer)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        sys.stdout, sys.stderr = before
