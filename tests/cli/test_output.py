"""What a command says while it works."""

import warnings

from jpmhc.cli.output import StageProgress, warnings_in_one_line


def test_stages_advance_when_the_next_begins():
    with StageProgress(3) as progress:
        task = progress.bar.tasks[0]
        progress.show("first")
        assert (task.completed, task.description) == (0, "first")
        progress.show("second")
        assert (task.completed, task.description) == (1, "second")
    assert not progress.bar.live.is_started


def test_stages_become_lines_where_there_is_no_terminal(capsys):
    with StageProgress(2) as progress:
        progress.show("first")
        progress.show("second, at once")
        progress.finish("all done")
    assert capsys.readouterr().err == "first …\nall done\n"


def test_warnings_are_one_line_and_only_inside(capsys):
    before = warnings.showwarning
    with warnings_in_one_line():
        warnings.simplefilter("always")
        warnings.warn("not exact here", stacklevel=1)
    assert capsys.readouterr().err == "jpmhc: warning: not exact here\n"
    assert warnings.showwarning is before
