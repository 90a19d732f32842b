"""Pictures of spectra: what is drawn is the data, and the axes say what it is."""

import re

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from jpmhc.cli.spectrum import Query, answer_query
from jpmhc.paper.panel import PanelConfig, panel
from jpmhc.report import spectrum_figures as figures
from jpmhc.report.spectrum_figures import FIXED, SCALAR, draw_panel, draw_spectrum
from jpmhc.report.style import EXACT, SAMPLED, colour_of

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, kept so that they can be looked at."""
    kept = []

    def keep(figure, path):
        kept.append(figure)
        return save(figure, path)

    save = figures.save_figure
    monkeypatch.setattr(figures, "save_figure", keep)
    return kept


@pytest.fixture(scope="module")
def cells():
    return panel(PanelConfig(mixers=("orthogonal", "bistochastic"), depths=(1, 2), samples=(6, 4), streams=4, width=10))


@pytest.fixture(scope="module")
def answer():
    return answer_query(Query(mixer="orthogonal", depth=2, streams=2, noise=0.2, simulate=True, samples=10, width=20))


def line_of(axis, colour):
    found = [line for line in axis.lines if line.get_color() == colour and line.get_marker() == "None"]
    assert len(found) == 1
    return found[0].get_xdata(), found[0].get_ydata()


def mass_of_bars(axis):
    return sum(bar.get_width() * bar.get_height() for bar in axis.patches)


def test_one_spectrum(answer, drawn, tmp_path):
    path = draw_spectrum(answer, "two layers", tmp_path / "new" / "spectrum.png")
    assert path.read_bytes()[:8] == PNG
    density, shares = drawn[0].axes
    assert (density.get_xlabel(), density.get_ylabel()) == ("singular value", "density")
    assert (shares.get_xlabel(), shares.get_ylabel()) == ("singular value", "share of singular values below")
    grid, values = line_of(density, EXACT)
    s = answer.density.x.sqrt().numpy()
    assert np.array_equal(grid[1 : 1 + len(s)], s)
    assert np.allclose(values[1 : 1 + len(s)], 2 * s * answer.density.values.numpy())
    assert np.trapezoid(values, grid) == pytest.approx(1, abs=2e-3)
    # the bars are the samples
    heights, edges, _ = density.patches[0].get_data()
    sampled = answer.sampled.sqrt().numpy().ravel()
    assert np.allclose(heights, np.histogram(sampled, edges, density=True)[0])
    # the shares are the distribution, of the theory and of the samples
    grid, values = line_of(shares, EXACT)
    for level in (0.1, 0.5, 0.9):
        assert np.interp(answer.density.quantile(level), grid, values) == pytest.approx(level, abs=1e-6)
    grid, values = line_of(shares, SAMPLED)
    assert np.interp(np.median(sampled), grid, values) == pytest.approx(0.5, abs=0.01)


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


def test_words_of_one_spectrum(answer, drawn, tmp_path):
    draw_spectrum(answer, "two layers", tmp_path / "spectrum.png")
    low, high = answer.edges.min(), answer.edges.max()
    words = f"all singular values lie between {low:.3g} and {high:.3g}"
    assert drawn[0].get_suptitle() == f"two layers\n{words} · W₁ to samples {answer.distances.wasserstein:.2g}"
    names = [text.get_text() for text in drawn[0].axes[1].get_legend().get_texts()]
    assert names == ["sampled networks", "exact theory"]


def test_mass_at_zero_is_shown_and_said(drawn, tmp_path):
    """Of two random bistochastic streams one singular value in two is zero to every picture."""
    collapsed = answer_query(Query(mixer="sinkhorn", depth=24, streams=2))
    draw_spectrum(collapsed, "bistochastic", tmp_path / "b.png")
    density, shares = drawn[0].axes
    assert re.match(r"bistochastic\n50\.\d% of singular values are below 0.1, the others", drawn[0].get_suptitle())
    assert re.fullmatch(r"◂ 50\.\d% of singular values\n +lie left of this axis", density.texts[0].get_text())
    assert re.fullmatch(r"50\.\d% lie left of this axis", shares.texts[0].get_text())
    grid, values = line_of(shares, EXACT)
    assert np.interp(shares.get_xlim()[0], grid, values) == pytest.approx(0.5, abs=5e-3)
    # the band that is left fills its picture
    low, high = density.get_xlim()
    assert 0.4 < float(collapsed.edges[-1].diff()) / (high - low) < 0.9


def test_bands_over_many_decades_share_a_logarithmic_axis(drawn, tmp_path):
    skips = torch.diag(torch.tensor([1.0, 0.01], dtype=torch.float64))
    torch.save(skips, tmp_path / "skip.pt")
    wide = answer_query(Query(matrix=tmp_path / "skip.pt", depth=1, noise=0.5, simulate=True, samples=5, width=40))
    draw_spectrum(wide, "wide", tmp_path / "a.png")
    density = drawn[0].axes[0]
    assert (density.get_xscale(), density.get_ylabel()) == ("log", "density per decade")
    assert "×" not in "".join(label.get_text() for label in density.get_xticklabels())
    share, borders, _ = density.patches[0].get_data()
    assert np.sum(share * np.diff(np.log10(borders))) == pytest.approx(1, abs=0.05)


def test_inexact_methods_are_said(drawn, tmp_path):
    with pytest.warns(UserWarning, match="not multiples of orthogonal"):
        inexact = answer_query(Query(mixer="sinkhorn", depth=2, streams=2, method="z1", shared=True))
    draw_spectrum(inexact, "z1", tmp_path / "a.png")
    line_of(drawn[0].axes[0], SCALAR)
    assert drawn[0].axes[1].get_legend().get_texts()[0].get_text() == "z1: not exact here"


def test_bins_fit_narrow_bands_and_leave_gaps_empty():
    rng = np.random.default_rng(0)
    s = np.concatenate([10 ** rng.uniform(-9, -8.9, 500), 10 ** rng.uniform(-0.1, 0.1, 500)])
    edges = figures.fitting_edges(s)
    heights = np.histogram(s, edges)[0] / len(s) / np.diff(np.log10(edges))
    middle = np.sqrt(edges[1:] * edges[:-1])
    assert heights[(middle > 1e-8) & (middle < 0.5)].max() < 0.01
    assert np.median(heights[middle < 1e-8]) == pytest.approx(5, rel=0.3)  # half of all over a tenth of a decade
    assert np.median(heights[middle > 0.5]) == pytest.approx(2.5, rel=0.3)


def test_bins_leave_a_gap_between_two_wide_bands_empty():
    rng = np.random.default_rng(0)
    s = np.concatenate([10 ** rng.uniform(-2, -1, 800), 10 ** rng.uniform(-0.5, 0, 800)])
    edges = figures.fitting_edges(s)
    heights = np.histogram(s, edges)[0]
    gap = (edges[:-1] < 0.15) & (edges[1:] > 0.25)
    assert gap.sum() == 1
    assert heights[gap].sum() <= 1  # what lies on its edge
    assert heights.sum() == len(s)


def test_a_curve_that_goes_on_above_its_cell_is_marked(drawn, tmp_path):
    deep = PanelConfig(mixers=("bistochastic",), depths=(10,), samples=(4,), streams=4, width=10)
    draw_panel(panel(deep), 0.02, tmp_path / "panel.png")
    axis = drawn[0].axes[0]
    marks = {line.get_color(): line.get_ydata()[0] for line in axis.lines if line.get_marker() == "^"}
    assert colour_of("sinkhorn") in marks  # three quarters are at zero
    assert all(0.9 < height / axis.get_ylim()[1] < 1 for height in marks.values())


def test_the_curve_is_zero_across_gaps(drawn, tmp_path):
    # skips of singular values 1 and 0.1 have two bands with nothing between them
    torch.save(torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)), tmp_path / "skip.pt")
    draw_spectrum(answer_query(Query(matrix=tmp_path / "skip.pt", depth=1, noise=1e-4)), "gap", tmp_path / "gap.png")
    grid, values = line_of(drawn[0].axes[0], EXACT)
    if drawn[0].axes[0].get_xscale() == "log":
        values = values / (grid * np.log(10))
    assert np.interp([0.3, 0.5, 0.7], grid, values).max() < 0.02
    for low, high in ((0.05, 0.2), (0.8, 1.2)):
        band = (grid > low) & (grid < high)
        assert np.trapezoid(values[band], grid[band]) == pytest.approx(0.5, abs=0.02)


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
        if logarithmic:
            share, borders, _ = axis.patches[0].get_data()
            assert np.sum(share * np.diff(np.log10(borders))) == pytest.approx(1, abs=1e-9)
        else:
            assert mass_of_bars(axis) == pytest.approx(1, abs=1e-9)
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
