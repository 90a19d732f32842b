"""The command `jpmhc recommend`."""

import csv

import pytest

from jpmhc.cli import main


def test_it_ranks_the_mixers_and_writes_a_table_and_a_figure(tmp_path, capsys):
    main(["recommend", "--depth", "6", "--depth-range", "3", "6", "--spectra", "1", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "First by this theory: rotation" in shown
    assert "Assumed: 6 pre-norm sublayers" in shown
    rows = list(csv.DictReader((tmp_path / "recommendation.csv").open()))
    assert [row["depth"] for row in rows if row["rank"] == "1"] == ["3", "6"]
    assert (tmp_path / "recommendation.png").stat().st_size > 10_000
    assert (tmp_path / "spectra.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--depth", "0"], "depth must be a whole number, at least 1, got 0"),
        (["--activation", "none"], "no activation is called 'none'"),
        (["--mixers", "nowhere:Mine"], "there is no module 'nowhere'"),
        (["--drift", "-1"], "drift must lie in (0, 1]"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["recommend", *words, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_mixer_and_an_activation_of_ones_own(tmp_path, capsys):
    own = ["--mixers", "cayley", "tests.own:Shrinking", "--activation", "tests.own:SQUARED_RELU"]
    main(["recommend", "--depth", "6", *own, "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "(tests.own:SQUARED_RELU, scales" in " ".join(shown.split())
    rows = list(csv.DictReader((tmp_path / "recommendation.csv").open()))
    assert sorted(row["mixer"] for row in rows) == ["cayley", "tests.own:Shrinking"]
