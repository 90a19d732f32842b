"""The panel's cells against samples and closed forms."""

import math
import sys

import numpy as np
import pytest
import torch

from jpmhc.paper.panel import PanelConfig, cell, panel, rows
from tests.spectra.problems import shifted_gaussian_edges

SMALL = PanelConfig(
    mixers=("identity", "bistochastic"), depths=(1, 3), samples=(12, 8), streams=3, width=12, budget=0.05
)


@pytest.fixture(scope="module")
def cells():
    return panel(SMALL)


def test_cells_come_row_by_row_and_are_announced():
    named = []
    config = PanelConfig(mixers=("identity", "orthogonal"), depths=(1, 2), samples=(2, 1), streams=2, width=3)
    found = panel(config, named.append)
    assert named == ["identity, L = 1", "orthogonal, L = 1", "identity, L = 2", "orthogonal, L = 2"]
    assert [(item.mixer, item.depth) for item in found] == [
        ("identity", 1),
        ("orthogonal", 1),
        ("identity", 2),
        ("orthogonal", 2),
    ]
    assert [item.sampled.shape for item in found] == [(2, 6), (2, 6), (1, 6), (1, 6)]


def test_threads_are_given_back(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(sys.modules[panel.__module__], "cell", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        panel(SMALL)
    assert torch.get_num_threads() == before


def test_the_exact_curve_is_on_the_samples_and_the_budget_is_shared_by_the_layers(cells):
    for item in cells:
        assert item.curves["exact"].exact
        assert item.distances["exact"].wasserstein < 0.01
        assert abs(item.curves["exact"].mass + item.curves["exact"].below - 1) < 2e-3
        if item.mixer == "identity":
            assert float(item.sampled.mean()) == pytest.approx((1 + 0.05 / item.depth) ** item.depth, rel=0.02)
    low, high = shifted_gaussian_edges(math.sqrt(0.05))
    sampled = cells[0].sampled
    assert low - 0.1 < float(sampled.min()) < float(sampled.max()) < high + 0.15


def test_fixed_curves_are_normalised_and_smear(cells):
    collapsed = cells[3]  # bistochastic, three layers of one skip
    assert (collapsed.mixer, collapsed.depth) == ("bistochastic", 3)
    for name in ("fixed", "scalar"):
        curve = collapsed.curves[name]
        assert set(curve.eta.tolist()) == {0.02}
        assert float(torch.trapezoid(curve.x * curve.values, curve.x.log())) == pytest.approx(1, abs=1e-9)
    shares = collapsed.collapsed()
    below = float((collapsed.sampled.sqrt() < 0.1).double().mean())
    assert shares["sampled"] == below > 0.3
    assert abs(shares["exact"] - below) < 0.02
    assert shares["fixed"] < below / 2
    assert collapsed.distances["fixed"].wasserstein > 20 * collapsed.distances["exact"].wasserstein


def test_the_scalar_theory_is_right_for_identity_and_wrong_for_bistochastic_skips(cells):
    identity, bistochastic = cells[2].curves, cells[3].curves
    assert (identity["scalar"].values - identity["fixed"].values).abs().max() < 1e-5
    assert identity["scalar"].exact
    assert not bistochastic["scalar"].exact
    assert (bistochastic["scalar"].values - bistochastic["fixed"].values).abs().max() > 0.1


def test_no_warning_escapes(recwarn):
    cell("bistochastic", 2, 2, PanelConfig(streams=2, width=3))
    assert not [warning for warning in recwarn if issubclass(warning.category, UserWarning)]


def test_rows_are_the_numbers_of_the_cells(cells):
    table = rows(cells)
    assert [(row["mixer"], row["depth"]) for row in table] == [(item.mixer, item.depth) for item in cells]
    for row, item in zip(table, cells):
        s = np.sort(item.sampled.sqrt().numpy().ravel())
        curve = item.curves["exact"]
        # W1 anew, by quantile functions
        u = (np.arange(20_000) + 0.5) / 20_000
        theory = np.interp(u, curve.cumulative().numpy(), curve.x.sqrt().numpy())
        assert row["w1_exact"] == pytest.approx(np.abs(theory - s[(u * len(s)).astype(int)]).mean(), abs=2e-4)
        assert row["collapsed_sampled"] == np.mean(s < 0.1)
        assert row["first_moment"] == pytest.approx(row["exact_moment"], rel=5e-3)
        assert row["mass"] == curve.mass
        assert row["below"] == curve.below


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"samples": (3,)}, "as many sample counts as depths, not 4, 3 and 1"),
        ({"mixers": ()}, "at least one mixer"),
        ({"mixers": ("identity", "foo")}, "no random skip is called 'foo'"),
        ({"mixers": ("identity", "identity")}, "each mixer must be named once"),
        ({"depths": (1, 1, 2)}, "each depth must be named once"),
        ({"depths": (1, 2, 0)}, "depth must be a whole number, at least 1, got 0"),
        ({"depths": (1, 2, 2.5)}, "depth must be a whole number, at least 1, got 2.5"),
        ({"samples": (1, 2, 0)}, "samples must be a whole number, at least 1, got 0"),
        ({"streams": 0}, "streams must be a whole number"),
        ({"width": 0}, "width, the features per stream, must be a whole number"),
        ({"budget": -1.0}, "budget must be finite and not negative"),
        ({"eta": 0.0}, "eta must be positive"),
        ({"eta": math.inf}, "eta must be positive"),
        ({"seed": -1}, "seed must be a whole number, at least 0"),
    ],
)
def test_bad_panels_are_refused_before_any_cell(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        PanelConfig(**options)


def test_the_papers_grid_and_its_printed_curve():
    """Uniform in x from 0.01, as alg. ov_panel says; the matrix power is right where the skip is orthogonal alone."""
    config = PanelConfig(mixers=("orthogonal", "bistochastic"), depths=(3,), samples=(4,), streams=3, width=8, grid="x")
    right, wrong = panel(config)
    for item in (right, wrong):
        x = item.curves["fixed"].x
        top = max(1.5 * float(item.sampled.max()), 10.0)
        assert x.tolist() == pytest.approx(np.linspace(0.01, top, max(400, int(40 * top))).tolist())
        assert torch.equal(item.curves["printed"].x, x)
        assert item.curves["printed"].method == "z1-matrix"
    assert (right.curves["printed"].values - right.curves["fixed"].values).abs().max() < 1e-5
    assert right.curves["printed"].mass == pytest.approx(right.curves["fixed"].mass, rel=1e-5)
    # Far from the spectrum z G of the printed form is not one, and so neither is its mass.
    assert wrong.curves["printed"].mass > 3 * wrong.curves["fixed"].mass
    assert "w1_printed" in rows([wrong])[0]
