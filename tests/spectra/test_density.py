"""Densities, edges, moments and distances against closed forms and samples."""

import dataclasses
import importlib
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import kstest, wasserstein_distance

from jpmhc import paper
from jpmhc.cli.spectrum import Query
from jpmhc.paper.one_layer import gram_spectrum
from jpmhc.spectra import Network, cauchy, density, distances, edges, gradient_gains, moments, simulate
from jpmhc.spectra.grid import upper_bound
from jpmhc.spectra.refine import richardson
from tests.campaign.hostile_networks import draw_network, find_fault
from tests.spectra.oracles import find_support
from tests.spectra.problems import (
    deep_identity_edges,
    fuss_catalan_density,
    fuss_catalan_edge,
    fuss_catalan_moments,
    shifted_gaussian_edges,
)


def gaussian_product(depth):
    return Network(torch.zeros(depth, 1, 1), 1.0)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_fuss_catalan_density_edge_and_moments(depth):
    network = gaussian_product(depth)
    x, truth = fuss_catalan_density(depth, 12)
    found = density(network, x, refine="richardson", relative_eta=0.01)
    assert (found.values - truth).abs().max() < 1e-4
    assert not found.interpolated.any()
    whole = density(network)
    ends = edges(network, whole)
    assert ends.shape == (1, 2)
    assert ends[0, 0] == 0
    assert abs(float(ends[0, 1]) / fuss_catalan_edge(depth) - 1) < 1e-3
    found_moments = moments(network, 4, float(whole.x[-1]))
    assert (found_moments / fuss_catalan_moments(depth, 4) - 1).abs().max() < 1e-6
    assert abs(whole.mass + whole.below - 1) < 5e-3
    assert (whole.moments(2) / fuss_catalan_moments(depth, 2) - 1).abs().max() < 0.02


@pytest.mark.parametrize(("scale", "transform"), [(0.1, paper.transform("dyson")), (0.5, cauchy)])
def test_edges_of_the_identity_plus_noise(scale, transform):
    network = Network.repeated(torch.eye(2), scale**2, 1)
    found = edges(network, density(network, transform=transform), transform)
    assert (found[0] - torch.tensor(shifted_gaussian_edges(scale), dtype=torch.float64)).abs().max() < 1e-3


def test_edges_of_sixty_layers_are_near_the_continuum():
    network = Network.repeated(torch.eye(1), 0.5 / 60, 60)
    found = edges(network, density(network))
    assert (found[0] / torch.tensor(deep_identity_edges(0.5), dtype=torch.float64) - 1).abs().max() < 0.02


def test_collapsed_mass_is_found_and_agrees_with_samples():
    network = Network.from_mixer("bistochastic", 10, 0.005, shared=True)
    found = density(network)
    sampled = simulate(network, 25, 30)
    assert found.exact
    assert abs(found.collapsed() - float((sampled < 0.01).double().mean())) < 0.005
    assert abs(found.mass + found.below - 1) < 0.01
    assert abs(found.first_moment / found.exact_moment - 1) < 0.01
    assert found.wasserstein(sampled) < 0.01
    fixed = density(network, torch.linspace(0.01, 2, 200, dtype=torch.float64), eta=0.02)
    assert fixed.mass < 0.8  # what the paper's grid and eta lose, said before any normalisation
    assert abs(float(torch.trapezoid(fixed.normalised().values * fixed.x, fixed.x.log())) - 1) < 1e-9


def test_an_atom_at_zero_is_reported():
    # a projector of rank 2 of 4 with noise on its range alone
    projector = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    network = Network.repeated(projector, 0.1, 1, read=torch.tensor([1.0, 0, 0, 0]), write=torch.tensor([1.0, 0, 0, 0]))
    found = density(network)
    assert abs(found.below - 0.5) < 1e-3
    assert found.quantile(0.3) == 0
    assert found.quantile(0.9) > 0.5
    assert math.isinf(found.condition())


def test_richardson_removes_powers_of_eta():
    eta = 0.1 * 2.0 ** torch.arange(4, dtype=torch.float64).unsqueeze(-1)
    assert abs(float(richardson(3 + 2 * eta - eta**2 + 5 * eta**3)) - 3) < 1e-12
    assert abs(float(richardson(3 + 2 * eta**2 - eta**4 + 5 * eta**6, base=4)) - 3) < 1e-12


def test_richardson_beats_the_papers_tableau_and_no_refinement():
    network = Network.repeated(torch.eye(1), 0.25, 1)
    x = torch.linspace(0.6, 2.0, 15, dtype=torch.float64)
    truth = density(network, x, eta=1e-7).values
    error = {
        name: float((density(network, x, eta=0.01, refine=name).values - truth).abs().max())
        for name in (None, "richardson", "richardson-paper")
    }
    assert error["richardson"] < 1e-4
    assert error["richardson"] < 0.02 * error["richardson-paper"]
    assert error["richardson-paper"] < error[None]


def test_the_rational_fit_gives_the_curve_from_fewer_points():
    network = Network.from_mixer("orthogonal", 3, 0.05, shared=True)
    x = torch.linspace(0.2, 3, 400, dtype=torch.float64)
    plain, fitted = (density(network, x, eta=0.02, refine=refine) for refine in (None, "aaa"))
    assert (plain.values - fitted.values).abs().max() < 1e-5


def test_change_of_variables_quantiles_and_summaries():
    network = gaussian_product(1)  # singular values on [0, 2], density sqrt(4 - s^2) / pi
    found = density(network)
    s, values = found.singular_values()
    inside = (s > 0.1) & (s < 1.9)
    assert (values - (4 - s**2).clamp_min(0).sqrt() / math.pi)[inside].abs().max() < 2e-3

    def cumulative(t):
        return (t * math.sqrt(4 - t * t) / 2 + 2 * math.asin(t / 2)) / math.pi

    for t in (0.1, 0.5, 1.0, 1.7):
        assert abs(found.quantile(cumulative(t)) - t) < 2e-3
    assert abs(found.collapsed() - cumulative(0.1)) < 1e-3
    assert abs(found.collapsed(1.0) - cumulative(1.0)) < 1e-3
    assert abs(found.condition(0.1) / (found.quantile(0.9) / found.quantile(0.1)) - 1) < 1e-12


def test_distances_against_scipy():
    network = gaussian_product(1)
    found = density(network)
    generator = torch.Generator().manual_seed(0)
    sampled = 4 * torch.rand(3000, dtype=torch.float64, generator=generator)  # another law on purpose
    apart = distances(found, sampled)
    u = (np.arange(200_000) + 0.5) / 200_000
    theory = np.interp(u, found.cumulative().numpy(), found.x.sqrt().numpy())
    s = sampled.sqrt().numpy()
    assert abs(apart.wasserstein - wasserstein_distance(theory, s)) < 1e-3

    def cumulative(t):
        return (t * np.sqrt(4 - t * t) / 2 + 2 * np.arcsin(t / 2)) / np.pi

    assert abs(apart.kolmogorov - kstest(s, cumulative).statistic) < 2e-3
    # both densities in closed form: s / 2 against sqrt(4 - s^2) / pi
    t = np.linspace(0, 2, 20001)
    gap = np.abs(t / 2 - np.sqrt(4 - t**2) / np.pi)
    assert abs(apart.l1 - np.trapezoid(gap, t)) < 0.06
    assert abs(apart.l2 - np.sqrt(np.trapezoid(gap**2, t))) < 0.06
    assert apart.linf > 0.5
    good = distances(found, simulate(network, 100, 20))
    assert good.wasserstein < 0.02 < apart.wasserstein


def test_unconverged_points_are_interpolated_only_when_few():
    network = Network.from_mixer("bistochastic", 4, 0.05)
    x = torch.linspace(0.1, 2, 40, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"40 of 40 points did not converge .*; layer [1-4] makes it hard"):
        density(network, x, eta=0.02, maximum=2)
    truth = density(network, x, eta=0.02)

    def spoilt(network, z, *arguments, **options):
        found = cauchy(network, z, *arguments, **options)
        if len(z) == len(x):
            found.G[[7, 20]] = 1e6
            found.converged[[7, 20]], found.residual[[7, 20]] = False, 1.0
        return found

    few = density(network, x, eta=0.02, transform=spoilt)
    assert few.interpolated.nonzero().squeeze(-1).tolist() == [7, 20]
    assert (few.values - truth.values).abs().max() < 0.05
    assert (few.values != truth.values)[[7, 20]].all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"eta": -1.0}, "eta must be positive"),
        ({"relative_eta": 0.0}, "relative_eta"),
        ({"refine": "aitken"}, "no refinement"),
        ({"levels": 0}, "level"),
        ({"x": torch.zeros(0)}, "at least two"),
        ({"x": torch.tensor([1.0, 0.5])}, "ascending"),
        ({"x": torch.tensor([-1.0, 0.5])}, "positive"),
    ],
)
def test_bad_input_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        density(gaussian_product(2), **arguments)


def test_edges_of_one_layer_are_the_exact_ones_down_to_the_first():
    # the first band begins at s = 0.005, where the curve is too low to be seen
    network = Network.from_mixer("bistochastic", 1, 0.05, streams=4, seed=0)
    exact = find_support(gram_spectrum(network.skips[0]), 0.05).view(-1, 2)
    found = edges(network, density(network))
    assert found.shape == exact.shape
    assert (found / exact - 1).abs().max() < 1e-2


@pytest.mark.parametrize("kind", ["zero", "nilpotent"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_network_that_maps_everything_to_zero_is_an_atom_of_mass_one(kind, n):
    generator = torch.Generator().manual_seed(0)
    turn, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    skip = turn @ torch.ones(n, n, dtype=torch.float64).triu(1) @ turn.mT
    found = density(Network((0.0 if kind == "zero" else 1.0) * skip.repeat(4, 1, 1), 0.0))
    assert (found.mass, found.below, found.exact_moment) == pytest.approx((0.0, 1.0, 0.0))
    assert (found.quantile(0.99), found.collapsed()) == (0.0, 1.0)


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.05])
@pytest.mark.parametrize(("mixer", "depth"), [("orthogonal", 4), ("bistochastic", 10), ("gaussian", 1)])
def test_narrow_bands_and_the_gaps_between_them_add_up_to_one(mixer, depth, noise):
    # An interval that bridges a gap would count the flanks of both bands across it: up to 0.7 % too much.
    network = Network.from_mixer(mixer, depth, noise / depth)
    found = density(network)
    assert abs(found.mass + found.below - 1) < 1e-3
    assert abs(found.first_moment / found.exact_moment - 1) < 2e-3


@pytest.mark.parametrize("start", [1e-6, 1e-12, 1e-18])
def test_mass_below_a_grid_that_begins_inside_the_spectrum(start):
    # five Gaussian layers: density sin(pi/6)/pi x^(-5/6) towards zero, so that 6 sin(pi/6)/pi x^(1/6) lies below x
    found = density(gaussian_product(5), torch.logspace(math.log10(start), 1.2, 60, dtype=torch.float64))
    truth = 3 / math.pi * start ** (1 / 6)
    assert abs(found.below - truth) < 0.02 * truth + 2e-4


def test_mass_below_a_grid_that_begins_outside_the_spectrum_is_none():
    found = density(Network.repeated(torch.eye(2), 0.01, 1), torch.linspace(0.4, 2, 100, dtype=torch.float64))
    assert found.below < 1e-4


def test_unconverged_points_far_apart_are_interpolated_over_orders_of_magnitude():
    network = gaussian_product(3)
    x = torch.logspace(-8, 1, 30, dtype=torch.float64)
    truth = density(network, x)

    def spoilt(network, z, *arguments, **options):
        found = cauchy(network, z, *arguments, **options)
        if len(z) == len(x):
            found.G[5], found.converged[5], found.residual[5] = 1e6, False, 1.0
        return found

    found = density(network, x, transform=spoilt)
    assert found.interpolated.nonzero().squeeze(-1).tolist() == [5]
    assert abs(found.values[5] / truth.values[5] - 1) < 0.02


def test_the_last_edge_of_a_long_tail_is_beyond_what_the_curve_shows():
    # 40 identity layers of much noise: x rho falls below what counts as a band long before the spectrum ends
    network = Network.repeated(torch.eye(1), 0.15, 40)
    found = edges(network, density(network))
    assert abs(float(found[-1, 1]) / deep_identity_edges(6.0)[1] - 1) < 0.5
    x = torch.tensor([0.98, 0.99, 1.01, 1.02], dtype=torch.float64) * found[-1, 1]
    around = density(network, x, relative_eta=1e-6).values
    assert float(around[2:].max()) < 0.02 * float(around[:2].min())


def test_without_scipy_only_the_rational_fit_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.interpolate", None)
    network = Network.from_mixer("orthogonal", 2, 0.05)
    assert density(network).mass > 0.99
    with pytest.raises(ValueError, match=r"install jpmhc\[spectra\]"):
        density(network, refine="aaa")


def test_a_rational_fit_that_misses_is_refused():
    """Three quarters of the mass lie eight orders of magnitude below the rest: its mass was 4e9."""
    network = Network.from_mixer("sinkhorn", 10, 0.005)
    with pytest.raises(ValueError, match=r"the rational function of the refinement 'aaa' misses z G by up to .* leave"):
        density(network, refine="aaa")


def test_thirty_defective_layers_over_thirty_decades():
    # Rounding hides what lies below 1e-26 of the mean square, and a thousandth of the mass holds most of it.
    network, label = draw_network(np.random.default_rng(801008667))
    assert find_fault(network, label, 0) is None


@pytest.mark.parametrize("noisy", [1, 3, 6])
def test_a_refusal_names_the_layer_that_makes_it_hard(noisy):
    variance = torch.full((6,), 1e-3)
    variance[noisy - 1] = 30.0
    network = Network(torch.eye(2).repeat(6, 1, 1), variance)
    with pytest.raises(
        ValueError, match=rf"^9 of 9 points did not converge .*; layer {noisy} makes it hard: raise eta"
    ):
        density(network, torch.linspace(0.1, 3, 9), eta=1e-6, maximum=3)


def test_where_nothing_converges_below_the_grid_the_rest_of_the_mass_lies_there(monkeypatch):
    """Two of four streams are lost: half of the singular values are zero."""
    network = Network.repeated(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)), 1e-4, depth=3)
    wanted = density(network)
    module = importlib.import_module("jpmhc.spectra.density")
    find_grid = module.find_grid

    def fails_for_few(network, z, *given, **named):
        found = cauchy(network, z, *given, **named)
        if len(z) > 3:
            return found
        return dataclasses.replace(found, converged=torch.zeros_like(found.converged), residual=found.residual + 0.1)

    monkeypatch.setattr(module, "find_grid", lambda network, transform, *given: find_grid(network, cauchy, *given))
    found = density(network, transform=fails_for_few)
    assert found.below == pytest.approx(1 - wanted.mass, abs=1e-9)
    with pytest.raises(ValueError, match="the mass below the grid is unknown"):
        density(network, x=wanted.x, transform=fails_for_few)


def test_a_band_across_the_grids_first_point_counts_once():
    """Three of four directions collapse to 1e-15, where the grid ends, inside their band."""
    found = density(Query(mixer="orthostochastic", depth=48).network())
    assert found.mass + found.below == pytest.approx(1, abs=1e-3)
    assert found.collapsed() == pytest.approx(0.75, abs=1e-3)


def test_a_residual_that_rounding_keeps_above_the_tolerance_is_taken():
    """Singular values of 2 and 2e-9 in one skip: squared, they are a float64's digits apart."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    values = torch.tensor([2.0, 1e-6, 2e-9], dtype=torch.float64)
    read, write = torch.randn(2, 1, 3, generator=generator, dtype=torch.float64)
    network = Network((left * values @ right)[None], torch.tensor([0.13], dtype=torch.float64), read=read, write=write)
    # Noise of one read and one write leaves one of three directions alone: an atom of mass 1/3 at 7.7e-14.
    found = density(network, torch.linspace(7.5e-14, 7.95e-14, 240, dtype=torch.float64))
    assert 1e-7 < found.residual < 1e-5
    assert not found.interpolated.any()
    assert found.mass == pytest.approx(1 / 3, abs=0.02)
    samples = simulate(network, 50, 1, 0).flatten()
    assert int(((samples > 7.5e-14) & (samples < 7.95e-14)).sum()) == 50


@pytest.mark.parametrize("seed", [914565743, 1522966517])
def test_bands_that_rounding_blurs_are_found_and_count_once(seed):
    """A sixth of the mass at 1e-20 of the largest squared singular value, and a band across the grid's first point."""
    network, label = draw_network(np.random.default_rng(seed))
    assert find_fault(network, label, seed) is None


def test_a_mass_that_is_not_one_is_said(monkeypatch):
    module = sys.modules["jpmhc.spectra.density"]
    network = Network.repeated(0.5 * torch.eye(2), 0.1, 3)
    assert density(network).mass == pytest.approx(1, abs=1e-3)
    monkeypatch.setattr(module, "_mass_below", lambda *arguments: (0.1, cauchy(network, torch.tensor([1j]))))
    with pytest.warns(UserWarning, match=r"a mass of 1\.1.. instead of one, 0\.100 of it below its grid"):
        density(network)


def test_isotropic_and_block_noise_need_no_matrices(monkeypatch):
    """n² unit matrices for each of 24 layers took 2 GiB at n = 48 and 23 GB at n = 96."""

    def refuse(network):
        raise AssertionError("matrices of the noise were built")

    monkeypatch.setattr(Network, "noise_factors", refuse)
    skips = torch.eye(96, dtype=torch.float64).expand(24, -1, -1)
    assert upper_bound(Network(skips, 0.04)) == pytest.approx((1 + 2 * 0.2) ** 48)
    assert float(gradient_gains(Network(skips, 0.04))[0]) == pytest.approx(1.04**23 / 96)
    read = torch.full((96,), 1 / 96, dtype=torch.float64)
    block = Network(skips, 0.04, read, torch.ones(96, dtype=torch.float64))
    assert upper_bound(block) == pytest.approx((1 + 2 * 0.2) ** 48)
    assert float(gradient_gains(block)[0]) == pytest.approx(1.04**23)


def test_the_bound_is_the_same_for_noise_given_as_matrices():
    """n² units over the root of n are isotropic noise, and one outer product is the block's."""
    generator = torch.Generator().manual_seed(0)
    skips = torch.randn(3, 4, 4, dtype=torch.float64, generator=generator)
    read, write = torch.rand(2, 3, 4, dtype=torch.float64, generator=generator)
    units = torch.eye(16, dtype=torch.float64).view(16, 4, 4).expand(3, -1, -1, -1) / 2
    outer = (write.unsqueeze(-1) * read.unsqueeze(-2)).unsqueeze(1)
    isotropic, general = Network(skips, 0.3), Network(skips, 0.3, covariance=units)
    assert upper_bound(isotropic) == pytest.approx(upper_bound(general), rel=1e-9)
    assert torch.allclose(gradient_gains(isotropic), gradient_gains(general))
    block, general = Network(skips, 0.3, read, write), Network(skips, 0.3, covariance=outer)
    assert upper_bound(block) == pytest.approx(upper_bound(general), rel=1e-9)


def test_a_grid_that_is_too_coarse_for_shares_is_named():
    network = Network.repeated(torch.eye(2), 0.1, 3)
    truth = density(network)
    for points, wrong in ((20, 2.0), (50, 1.1)):
        with pytest.warns(UserWarning, match=f"the grid of {points} points is too coarse"):
            coarse = density(network, torch.linspace(1e-4, float(truth.x[-1]), points, dtype=torch.float64))
        assert coarse.mass + coarse.below > wrong - 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine = density(network, torch.linspace(1e-4, float(truth.x[-1]), 400, dtype=torch.float64))
    assert fine.quantile(0.5) == pytest.approx(truth.quantile(0.5), rel=0.01)
