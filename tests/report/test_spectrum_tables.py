"""Tables of spectra: every number printed is one that was computed."""

import csv
import re

import pytest
import torch

from jpmhc.cli.spectrum import Query, answer_query
from jpmhc.paper.panel import PanelConfig, panel
from jpmhc.report.spectrum_tables import print_answer, print_panel, write_panel


@pytest.fixture(scope="module")
def cells():
    return panel(PanelConfig(mixers=("identity", "bistochastic"), depths=(1, 2), samples=(4, 3), streams=2, width=8))


def table(printed):
    """What is printed, by the word that each line begins with."""
    joined = re.sub(r"\n {3,}", " ", printed)  # a cell that was wrapped
    return {line.split("  ")[0].strip(): line.strip().split("  ", 1)[1].strip() for line in joined.splitlines() if line}


def test_answer_in_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    answer = answer_query(Query(mixer="identity", depth=2, streams=1, noise=0.2, simulate=True, samples=3, width=30))
    print_answer(answer)
    said = table(capsys.readouterr().out)
    density = answer.density
    assert said["method"].startswith("chain (exact)")
    assert said["mass"] == f"{density.mass:.5f} captured on {len(density.x)} points, {density.below:.5f} below them"
    low, high = (float(word) for word in said["singular values"].split(" – "))
    # infinitely many layers would reach from 0.51 to 1.97, one from 0.48 to 1.69
    assert 0.45 < low < 0.55
    assert 1.6 < high < 2.0
    assert float(said["moments of s²"].split()[0]) == pytest.approx(1.1**2, rel=1e-5)
    assert said["mean of s²"].endswith("1.21 exactly")
    assert f"W1 {answer.distances.wasserstein:.3g}" in said["to samples"]
    assert said["collapsed"] == "0.00% of singular values are below 0.1"
    assert "unconverged" not in said


def test_a_method_that_is_not_exact_is_called_so(capsys):
    with pytest.warns(UserWarning, match="not multiples of orthogonal"):
        answer = answer_query(Query(depth=2, streams=2, method="z1", shared=True))
    print_answer(answer)
    assert "z1 (NOT exact here)" in capsys.readouterr().out


def test_unconverged_points_are_counted(capsys):
    answer = answer_query(Query(mixer="identity", depth=1, streams=1))
    answer.density.interpolated[:3] = True
    print_answer(answer)
    assert "3 points, interpolated" in capsys.readouterr().out


def test_panel_in_a_table_of_eighty_columns(cells, capsys):
    print_panel(cells)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 85
    assert len(lines) == 2 + len(cells)
    for line, cell in zip(lines[2:], cells):
        words = line.replace("|", " ").split()
        assert words[:2] == [str(cell.depth), cell.mixer]
        apart = [cell.distances[name].wasserstein for name in ("exact", "fixed", "scalar")]
        assert [float(word) for word in words[2:5]] == pytest.approx(apart, rel=0.06)
        sampled = float((cell.sampled.sqrt() < 0.1).double().mean())
        assert float(words[5].rstrip("%")) == pytest.approx(100 * sampled, abs=0.051)


def test_panel_as_a_file(cells, tmp_path):
    path = write_panel(cells, tmp_path / "new" / "panel.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row, cell in zip(rows, cells):
        assert (row["mixer"], int(row["depth"])) == (cell.mixer, cell.depth)
        assert float(row["w1_exact"]) == cell.distances["exact"].wasserstein
        assert float(row["mass"]) == cell.curves["exact"].mass
        assert float(row["collapsed_sampled"]) == float((cell.sampled < 0.01).double().mean())


def test_threads_do_not_change_what_is_written(cells, tmp_path):
    again = panel(
        PanelConfig(mixers=("identity", "bistochastic"), depths=(1, 2), samples=(4, 3), streams=2, width=8, seed=0)
    )
    first, second = (write_panel(part, tmp_path / f"{k}.csv").read_text() for k, part in enumerate((cells, again)))
    assert first == second
    assert torch.get_num_threads() >= 1
