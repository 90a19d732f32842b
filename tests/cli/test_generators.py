"""The command `jpmhc generators`: what it prints and writes."""

import json

import pytest
import torch

from jpmhc import cli, generators
from tests.cli.running import fails_with


def test_prints_the_table_and_writes_a_basis(tmp_path, capsys):
    path = tmp_path / "found" / "n4-k3.json"
    cli.main(["generators", "--streams", "4", "--size", "3", "--json", str(path)])
    printed = capsys.readouterr().out
    for words in ("Spectral gap 0.6666666667", "(0 1 2 3)", "99 by Burnside's lemma", "2,024 sets", str(path)):
        assert words in printed
    record = json.loads(path.read_text())
    assert generators.spectral_gap(torch.tensor(record["perms"])) == pytest.approx(2 / 3, abs=1e-14)
    assert record["plain_gap"] == pytest.approx(2 / 3, abs=1e-9)
    assert (record["examined"], record["classes"], len(record["ties"])) == (99, 99, 2)


def test_says_so_where_there_is_no_gap(capsys):
    cli.main(["generators", "--streams", "3", "--size", "2", "--reversible"])
    printed = capsys.readouterr().out
    for words in ("Spectral gap 0.0000000000", "(0 1)", "(1 2)", "The walk is periodic"):
        assert words in printed


def test_says_so_where_nothing_generates_the_group(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generators", "--streams", "3", "--size", "1"])
    assert stop.value.code == 2
    sentence = "no such set of 1 permutation of 3 streams generates all 6 permutations; ask for a larger size"
    assert capsys.readouterr().err.strip() == f"jpmhc: {sentence}"


def test_bad_input_is_one_sentence_and_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generators", "--streams", "9"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "jpmhc: the number of streams must be between 2 and 8, not 9\n"


def test_an_unwritable_file_is_refused_before_the_search(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    fails_with(capsys, "cannot write to", "generators", "--json", str(tmp_path / "file" / "n4.json"))
    fails_with(capsys, "is a folder", "generators", "--json", str(tmp_path))
