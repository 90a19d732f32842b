"""Warnings of a command."""

import warnings

from jpmhc.cli.command import warnings_in_one_line


def test_warnings_are_one_line_and_only_inside(capsys):
    before = warnings.showwarning
    with warnings_in_one_line():
        warnings.simplefilter("always")
        warnings.warn("not exact here", stacklevel=1)
    assert capsys.readouterr().err == "jpmhc: warning: not exact here\n"
    assert warnings.showwarning is before
