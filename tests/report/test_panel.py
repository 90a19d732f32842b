"""The panel: every number printed and every curve drawn is one that was computed, and the axes say what it is."""

import csv

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from jpmhc.paper.panel import PanelConfig, panel
from jpmhc.report import panel as figures
from jpmhc.report.panel import FIXED, SCALAR, draw_panel, print_panel, write_panel
from jpmhc.report.style import SAMPLED, colour_of
from tests.report.figures import PNG, line_of, saved_figures


@pytest.fixture
def drawn(monkeypatch):
    return saved_figures(monkeypatch, figures)


@pytest.fixture(scope="module")
def cells():
    return panel(PanelConfig(mixers=("orthogonal", "bistochastic"), depths=(1, 2), samples=(6, 4), streams=4, width=10))


@pytest.fixture(scope="module")
def small_cells():
    return panel(PanelConfig(mixers=("identity", "bistochastic"), depths=(1, 2), samples=(4, 3), streams=2, width=8))


def test_panel_in_a_table_of_eighty_columns(small_cells, capsys):
    print_panel(small_cells)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 85
    assert len(lines) == 2 + len(small_cells)
    for line, cell in zip(lines[2:], small_cells):
        words = line.replace("|", " ").split()
        assert words[:2] == [str(cell.depth), cell.mixer]
        apart = [cell.distances[name].wasserstein for name in ("exact", "fixed", "scalar")]
        assert [float(word) for word in words[2:5]] == pytest.approx(apart, rel=0.06)
        sampled = float((cell.sampled.sqrt() < 0.1).double().mean())
        assert float(words[5].rstrip("%")) == pytest.approx(100 * sampled, abs=0.051)


def test_the_papers_grid_adds_the_printed_curve(capsys):
    sizes = {"mixers": ("bistochastic",), "depths": (2,), "samples": (3,), "streams": 2, "width": 8}
    (item,) = cells = panel(PanelConfig(grid="x", **sizes))
    print_panel(cells)
    _, head, line = capsys.readouterr().out.splitlines()
    assert len(line) <= 85
    place = head.split().index("printed")
    assert float(line.split()[place]) == pytest.approx(item.distances["printed"].wasserstein, rel=0.06)


def test_panel_as_a_file(small_cells, tmp_path):
    path = write_panel(small_cells, tmp_path / "new" / "panel.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row, cell in zip(rows, small_cells):
        assert (row["mixer"], int(row["depth"])) == (cell.mixer, cell.depth)
        assert float(row["w1_exact"]) == cell.distances["exact"].wasserstein
        assert float(row["mass"]) == cell.curves["exact"].mass
        assert float(row["collapsed_sampled"]) == float((cell.sampled < 0.01).double().mean())


def test_threads_do_not_change_what_is_written(small_cells, tmp_path):
    same = panel(
        PanelConfig(mixers=("identity", "bistochastic"), depths=(1, 2), samples=(4, 3), streams=2, width=8, seed=0)
    )
    first, second = (write_panel(part, tmp_path / f"{k}.csv").read_text() for k, part in enumerate((small_cells, same)))
    assert first == second
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_kernel_estimate_has_the_samples_mass(drawn, tmp_path, logarithmic):
    config = PanelConfig(mixers=("identity",), depths=(1,), samples=(6,), streams=4, width=10, grid="x")
    draw_panel(panel(config), 0.02, tmp_path / "kernel.png", logarithmic=logarithmic, kernel=True)
    axis = drawn[0].axes[0]
    grid, values = line_of(axis, figures._KERNEL["color"])
    place = np.log10(grid) if logarithmic else grid
    assert np.trapezoid(values, place) == pytest.approx(1, abs=0.05)
    assert line_of(axis, figures.PRINTED)
    named = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert named[-2:] == ["printed operator-valued theory, η = 0.02", "kernel estimate of the samples"]


def test_a_curve_that_goes_on_above_its_cell_is_marked(drawn, tmp_path):
    deep = PanelConfig(mixers=("bistochastic",), depths=(10,), samples=(4,), streams=4, width=10)
    draw_panel(panel(deep), 0.02, tmp_path / "panel.png")
    axis = drawn[0].axes[0]
    marks = {line.get_color(): line.get_ydata()[0] for line in axis.lines if line.get_marker() == "^"}
    assert colour_of("sinkhorn") in marks  # three quarters are at zero
    assert all(0.9 < height / axis.get_ylim()[1] < 1 for height in marks.values())


@pytest.mark.parametrize("logarithmic", [False, True])
def test_panel(cells, drawn, logarithmic, tmp_path):
    path = draw_panel(cells, 0.02, tmp_path / "panel.png", logarithmic=logarithmic)
    assert path.read_bytes()[:8] == PNG
    axes = np.array(drawn[0].axes).reshape(2, 2)  # depths downwards, mixers to the right
    assert [axis.get_title() for axis in axes[0]] == ["orthogonal", "bistochastic"]
    words = " per decade" if logarithmic else ""
    assert [axis.get_ylabel() for axis in axes[:, 0]] == [f"L = 1\ndensity{words}", f"L = 2\ndensity{words}"]
    assert [axis.get_xlabel() for axis in axes[1]] == ["singular value"] * 2
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "sampled networks",
        "exact, η ∝ x",
        "exact, η = 0.02",
        "scalar theory, η = 0.02",
    ]
    for axis, cell in zip(axes.ravel(), cells):
        assert axis.get_xscale() == ("log" if logarithmic else "linear")
        for name, colour in (("exact", colour_of(cell.mixer)), ("fixed", FIXED), ("scalar", SCALAR)):
            grid, values = line_of(axis, colour)
            s = cell.curves[name].x.sqrt().numpy()
            truth = 2 * s * cell.curves[name].values.numpy() * (s * np.log(10) if logarithmic else 1)
            assert np.allclose(np.interp(s[3:-3], grid, values), truth[3:-3], atol=1e-9)
        share, borders, _ = axis.patches[0].get_data()
        assert np.sum(share * np.diff(np.log10(borders) if logarithmic else borders)) == pytest.approx(1, abs=1e-9)
        assert axis.patches[0].get_facecolor()[:3] == pytest.approx(to_rgb(SAMPLED))
        assert axis.get_ylim()[0] == 0
        lower, upper = axis.get_xlim()
        assert lower < float(cell.sampled.min()) ** 0.5 < float(cell.sampled.max()) ** 0.5 < upper


def test_numbers_above_the_cells(cells, drawn, tmp_path):
    draw_panel(cells, 0.02, tmp_path / "panel.png")
    for axis, cell in zip(drawn[0].axes, cells):
        words = [text.get_text() for text in axis.texts]
        assert words[0] == "W₁"
        assert words[1:4] == [f"{cell.distances[name].wasserstein:.2g}" for name in ("exact", "fixed", "scalar")]
        collapsed = cell.collapsed()
        if collapsed["exact"] > 0.01:
            shares = [f"{collapsed[name]:.1%}" for name in ("sampled", "exact", "fixed", "scalar")]
            assert words[4:] == ["s < 0.1", *shares]
        else:
            assert cell.mixer == "orthogonal"
            assert len(words) == 4
