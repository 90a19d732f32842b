"""One spectrum: every number printed and every curve drawn is one that was computed, and the axes say what it is."""

import re

import numpy as np
import pytest
import torch

from jpmhc import MIXERS, spectra
from jpmhc.cli.spectrum import Query, answer_query
from jpmhc.report import spectrum
from jpmhc.report.spectrum import SCALAR, draw_spectrum, print_answer
from jpmhc.report.style import EXACT, SAMPLED
from tests.report.figures import PNG, line_of, saved_figures


@pytest.fixture
def drawn(monkeypatch):
    return saved_figures(monkeypatch, spectrum)


@pytest.fixture(scope="module")
def answer():
    return answer_query(Query(mixer="orthogonal", depth=2, streams=2, noise=0.2, simulate=True, samples=10, width=20))


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
    edges = spectrum.fitting_edges(s)
    heights = np.histogram(s, edges)[0] / len(s) / np.diff(np.log10(edges))
    middle = np.sqrt(edges[1:] * edges[:-1])
    assert heights[(middle > 1e-8) & (middle < 0.5)].max() < 0.01
    assert np.median(heights[middle < 1e-8]) == pytest.approx(5, rel=0.3)  # half of all over a tenth of a decade
    assert np.median(heights[middle > 0.5]) == pytest.approx(2.5, rel=0.3)


def test_bins_leave_a_gap_between_two_wide_bands_empty():
    rng = np.random.default_rng(0)
    s = np.concatenate([10 ** rng.uniform(-2, -1, 800), 10 ** rng.uniform(-0.5, 0, 800)])
    edges = spectrum.fitting_edges(s)
    heights = np.histogram(s, edges)[0]
    gap = (edges[:-1] < 0.15) & (edges[1:] > 0.25)
    assert gap.sum() == 1
    assert heights[gap].sum() <= 1  # what lies on its edge
    assert heights.sum() == len(s)


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


def test_a_density_is_drawn_with_the_mass_below_its_grid_beside_samples(tmp_path):
    skips = MIXERS["sinkhorn"].sample(4, (10,), generator=torch.Generator().manual_seed(0))
    network = spectra.Network(skips, torch.full((10,), 0.005))
    assert repr(network) == "Network(10 layers, 4 streams, mean variance 0.005)"
    assert repr(network.end_to_end()).endswith("0.005, the model's own map)")
    curve = spectra.density(network)
    samples = spectra.simulate(network, width=25, samples=4, seed=0)
    body, shares = curve.plot(tmp_path / "density.svg", samples).axes
    low, high = body.get_xlim()
    assert 0.7 < low < 0.86 < 1.18 < high < 1.4  # the band that has not collapsed fills the axis
    grid, values = line_of(body, EXACT)
    assert np.trapezoid(values[grid > low], grid[grid > low]) == pytest.approx(0.25, abs=0.01)
    assert "75.0% of singular values" in body.texts[0].get_text()
    assert len(body.patches) == 1  # the samples' bars
    assert len(shares.lines) == 4  # samples, theory, its left end, the mark at 0.1
    assert not curve.plot().axes[0].patches
    assert (tmp_path / "density.svg").stat().st_size > 1000
