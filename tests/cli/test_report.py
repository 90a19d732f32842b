"""The command `jpmhc report`: where it writes, and what it refuses."""

from jpmhc import cli
from tests.cli.running import fails_with
from tests.report.run_folders import write_run


def test_the_page_lies_in_the_run_or_where_it_is_wanted(tmp_path, capsys):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    cli.main(["report", str(first)])
    assert capsys.readouterr().out == f"wrote {first}/report.html\n"
    cli.main(["report", str(first), str(second), "--out", str(tmp_path / "new" / "both.html")])
    assert "2 runs" in (tmp_path / "new" / "both.html").read_text()


def test_bad_input_is_one_sentence(tmp_path, capsys):
    fails_with(capsys, "there is no folder", "report", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    fails_with(capsys, "is empty", "report", str(tmp_path / "empty"))
