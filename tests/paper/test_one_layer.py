"""The law of one layer: its edges and mass by independent quadrature, its explicit form by the equation."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from jpmhc.paper.one_layer import evaluate_layer, gram_spectrum, layer_cauchy, low_rank_spectrum
from tests.spectra.oracles import find_support
from tests.spectra.problems import points


@pytest.mark.parametrize("sigma", [0.1, 0.6, 1.0])
def test_edges_of_the_identity_skip(sigma):
    """The closed form of the edges of I + σX; at σ = 1 the spectrum just touches zero."""
    root = sigma * (8 + sigma**2) ** 1.5
    expected = [(8 + 20 * sigma**2 - sigma**4 + sign * root) / 8 for sign in (-1, 1)]
    np.testing.assert_allclose(find_support(torch.ones(3), sigma**2), [expected], rtol=1e-12, atol=1e-12)


def test_edges_carry_the_whole_mass():
    """Gaps included: the density integrates to one over the intervals, and each holds its share of the s_i."""
    spectrum = torch.tensor([0.0, 0.1, 1.5, 4.0], dtype=torch.float64)
    intervals = find_support(spectrum, 0.03)
    assert len(intervals) == 4

    for low, high in intervals.tolist():
        # x = low + (high - low) sin² removes the square roots at the edges.
        def smooth(t, low=low, high=high):
            x = low + (high - low) * np.sin(t) ** 2
            found = layer_cauchy(points(x, 1e-11), spectrum, 0.03)
            assert found.converged.all()
            return -found.x.squeeze(-1).imag.numpy() / math.pi * (high - low) * np.sin(2 * t)

        assert integrate.fixed_quad(smooth, 0, math.pi / 2, n=40)[0] == pytest.approx(0.25, abs=2e-5)


def test_edges_are_where_the_density_ends():
    spectrum = torch.tensor([0.3, 2.0], dtype=torch.float64)
    for low, high in find_support(spectrum, 0.05).tolist():
        inside = layer_cauchy(points([low * (1 + 1e-4), high * (1 - 1e-4)], 1e-12), spectrum, 0.05).x
        outside = layer_cauchy(points([low * (1 - 1e-4), high * (1 + 1e-4)], 1e-12), spectrum, 0.05).x
        assert (inside.imag < -1e-3).all()
        assert (outside.imag > -1e-7).all()


def test_explicit_form_and_its_slopes():
    spectrum, variance = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64), 0.4
    omega = torch.tensor([0.7 + 0.9j, -0.2 + 0.5j, 3 + 2j], dtype=torch.complex128)
    here = evaluate_layer(omega, spectrum, variance)
    g = layer_cauchy(here.z, spectrum, variance).x.squeeze(-1)
    np.testing.assert_allclose(here.g, g, rtol=1e-10)
    np.testing.assert_allclose(here.w, here.z * here.g - 1, rtol=1e-12)
    h = 1e-6
    up, down = (evaluate_layer(omega + step, spectrum, variance) for step in (h, -h))
    np.testing.assert_allclose(here.z_slope, (up.z - down.z) / (2 * h), rtol=1e-8)
    np.testing.assert_allclose(here.w_slope, (up.w - down.w) / (2 * h), rtol=1e-8)


def test_spectrum_of_a_low_rank_skip_is_the_one_of_woodburys_small_problem():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(60, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    values, weights = low_rank_spectrum(0.8, left, right)
    full = gram_spectrum(0.8 * torch.eye(60, dtype=torch.float64) + left @ right.T)
    expanded = torch.cat([values[:-1], values[-1:].expand(round(float(weights[-1]) * 60))])
    np.testing.assert_allclose(expanded.sort().values, full.sort().values, rtol=1e-9)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_low_rank_skip_is_solved_from_its_small_spectrum():
    """The eigenvalues with their weights give the transform of the whole skip."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 30, 2, dtype=torch.float64, generator=generator) / 30**0.5
    z = points([0.2, 0.9, 2.0], 0.05)
    values, weights = low_rank_spectrum(0.8, left, right)
    small = layer_cauchy(z, values, 0.3, weights=weights)
    whole = layer_cauchy(z, gram_spectrum(0.8 * torch.eye(30, dtype=torch.float64) + left @ right.T), 0.3)
    assert small.converged.all()
    np.testing.assert_allclose(small.x, whole.x, rtol=1e-9)
