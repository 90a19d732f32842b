"""The command `jpmhc panel`."""

from jpmhc import cli
from jpmhc.paper.panel import PanelConfig
from tests.cli.running import fails_with


def test_runs_end_to_end_and_refuses_before_the_first_cell(capsys, tmp_path):
    sizes = ["--mixers", "identity", "--depths", "1", "--samples", "2", "--streams", "2", "--width", "5"]
    cli.main(["panel", *sizes, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    for name in ("panel.png", "panel_log.png", "panel.csv"):
        assert f"wrote {tmp_path / name}" in out
        assert (tmp_path / name).stat().st_size > 100
    fails_with(capsys, "no random skip is called 'foo'", "panel", "--mixers", "identity", "foo")


def test_depths_bring_their_own_number_of_samples():
    assert PanelConfig().samples == (300, 200, 100)  # the paper's
    assert PanelConfig(depths=(48,)).samples == (100,)


def test_an_unwritable_folder_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to .*file", "panel", "--out", str(tmp_path / "file"))
