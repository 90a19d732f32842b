"""Pictures of spectra: what is drawn is the data, and the axes say what it is."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from jpmhc.report import spectrum_figures as figures
from jpmhc.report.spectrum_figures import EXACT, FIXED, SAMPLED, SCALAR, draw_panel, draw_spectrum
from jpmhc.spectra.panel import PanelConfig, panel
from jpmhc.spectra.query import Query, answer_query

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
    found = [line for line in axis.lines if line.get_color() == colour]
    assert len(found) == 1
    return found[0].get_xdata(), found[0].get_ydata()


def mass_of_bars(axis):
    return sum(bar.get_width() * bar.get_height() for bar in axis.patches)


def test_one_spectrum(answer, drawn, tmp_path):
    path = draw_spectrum(answer, "two layers", tmp_path / "new" / "spectrum.png")
    assert path.read_bytes()[:8] == PNG
    plain, logarithmic = drawn[0].axes
    assert (plain.get_xlabel(), plain.get_ylabel()) == ("singular value", "density")
    assert (logarithmic.get_xlabel(), logarithmic.get_ylabel()) == ("singular value", "density per decade")
    assert logarithmic.get_xscale() == "log"
    grid, values = line_of(plain, EXACT)
    s = answer.density.x.sqrt().numpy()
    assert np.array_equal(grid[1 : 1 + len(s)], s)
    assert np.allclose(values[1 : 1 + len(s)], 2 * s * answer.density.values.numpy())
    # as a density it has unit area, on either axis
    assert np.trapezoid(values, grid) == pytest.approx(1, abs=2e-3)
    grid, values = line_of(logarithmic, EXACT)
    assert np.trapezoid(values, np.log10(grid)) == pytest.approx(1, abs=2e-3)
    # the bars are the samples, and lie where the curve does
    assert mass_of_bars(plain) == pytest.approx(1, abs=1e-9)
    sampled = answer.sampled.sqrt().numpy().ravel()
    heights = [bar.get_height() for bar in plain.patches]
    edges = [bar.get_x() for bar in plain.patches] + [plain.patches[-1].get_x() + plain.patches[-1].get_width()]
    assert np.allclose(heights, np.histogram(sampled, edges, density=True)[0])
    steps = logarithmic.patches[0]
    share, borders, _ = steps.get_data()
    assert np.sum(share * np.diff(np.log10(borders))) == pytest.approx(1, abs=0.02)


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
    title = drawn[0].get_suptitle()
    assert title.startswith("two layers\n")
    assert f"captured mass {answer.density.mass:.4f}" in title
    assert f"W₁ to samples {answer.distances.wasserstein:.2g}" in title
    assert "below" not in title  # nothing has collapsed
    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == ["sampled", "exact theory"]


def test_collapsed_mass_and_inexact_methods_are_said(drawn, tmp_path):
    with pytest.warns(UserWarning, match="not multiples of orthogonal"):
        inexact = answer_query(Query(depth=2, streams=2, method="z1", shared=True))
    draw_spectrum(inexact, "z1", tmp_path / "a.png")
    assert line_of(drawn[0].axes[0], SCALAR)[0][0] > 0
    assert drawn[0].axes[0].get_legend().get_texts()[0].get_text() == "z1: not exact here"
    collapsed = answer_query(Query(depth=2, shared=True))
    draw_spectrum(collapsed, "bistochastic", tmp_path / "b.png")
    assert f"{collapsed.density.collapsed():.1%} below 0.1" in drawn[1].get_suptitle()


def test_the_curve_is_zero_across_gaps(drawn, tmp_path):
    # skips of singular values 1 and 0.1 have two bands with nothing between them
    torch.save(torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64)), tmp_path / "skip.pt")
    draw_spectrum(answer_query(Query(matrix=tmp_path / "skip.pt", depth=1, noise=1e-4)), "gap", tmp_path / "gap.png")
    grid, values = line_of(drawn[0].axes[0], EXACT)
    middle = (grid > 0.25) & (grid < 0.8)
    assert np.interp([0.3, 0.5, 0.7], grid, values).max() < 0.02
    assert values[middle].max(initial=0.0) < 0.02
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
        for name, colour in (("exact", EXACT), ("fixed", FIXED), ("scalar", SCALAR)):
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
