"""Running commands that fail."""

import re

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
