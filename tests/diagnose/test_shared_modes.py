"""Shared modes: planted ones are found and predicted exactly, fresh layers have none, and training makes them."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.shared_modes import find_modes, multiply_all, split_shared
from jpmhc.diagnose.theory import compose_layers, kolmogorov_distance, rotate_sublayers
from tests.diagnose.models import Residual, make_mlp
from tests.spectra.problems import normal

DEPTH, DIM = 16, 96


def plant(strengths, seed=0):
    """Return Gaussian sublayers of mean squared singular value 0.04 with one matrix added to all, and that matrix."""
    own, shared = (
        0.2 * normal(*shape, seed=seed + k) / DIM**0.5 for k, shape in enumerate(((DEPTH, DIM, DIM), (DIM, DIM)))
    )
    return [matrix + strength * shared for matrix, strength in zip(own, strengths)], shared


def plain_layers(n=1):
    one = torch.ones(n, dtype=torch.float64)
    return [(one / n, one, torch.eye(n, dtype=torch.float64))] * DEPTH


def test_a_planted_mode_is_found_with_its_share():
    """Own and shared parts of strengths 1 and s: the mode carries s² of 1 + s² and its part of the noise, 1/L."""
    matrices, shared = plant([0.5] * DEPTH)
    modes = find_modes(multiply_all(torch.stack(matrices)), DIM**2)
    assert modes.count == 1
    # C = (1 - c) 1 + c 11ᵀ with c = s²/(1 + s²) has the eigenvalue 1 - c + c L
    c = 0.25 / 1.25
    assert float(modes.eigenvalues[0]) == pytest.approx(1 - c + c * DEPTH, rel=0.03)
    assert modes.share == pytest.approx((1 - c + c * DEPTH) / DEPTH, rel=0.03)
    parts = split_shared(matrices, modes)
    found = torch.stack([part for part, _ in parts]).mean(0).flatten()
    cosine = torch.nn.functional.cosine_similarity(found, shared.flatten(), dim=0)
    assert float(cosine) == pytest.approx((DEPTH * 0.25 / (1 + DEPTH * 0.25)) ** 0.5, abs=0.02)


@pytest.mark.parametrize("streams", [1, 4])
def test_the_theory_with_modes_follows_layers_that_share_a_matrix(streams):
    matrices, _ = plant([0.7] * DEPTH)
    layers = plain_layers(streams)
    modes = find_modes(multiply_all(torch.stack(matrices)), DIM**2)
    measured = spectrum_of(compose_layers(layers, matrices))
    free, mean_free = rotate_sublayers(layers, matrices, seed=1)
    shared, mean_shared = rotate_sublayers(layers, matrices, seed=1, modes=modes)
    if streams == 1:
        assert kolmogorov_distance(measured, free) > 0.08
        assert kolmogorov_distance(measured, shared) < 0.03
    else:  # of four streams the sublayers move one, the mean: the model's own map is the plain network's
        plain = spectrum_of(compose_layers(plain_layers(1), matrices))
        assert kolmogorov_distance(plain, mean_free) > 0.08
        assert kolmogorov_distance(plain, mean_shared) < 0.03


def test_sketches_find_the_modes_of_the_matrices():
    matrices = torch.stack(plant([0.5] * DEPTH)[0])
    exact = find_modes(multiply_all(matrices), DIM**2)
    probes = normal(16, DIM, seed=7)
    sketched = find_modes(multiply_all(probes @ matrices), probes.numel())
    assert sketched.count == exact.count == 1
    assert sketched.share == pytest.approx(exact.share, rel=0.15)


def test_independent_layers_share_nothing_and_zero_ones_do_no_harm():
    matrices = 0.2 * normal(DEPTH, DIM, DIM)
    assert find_modes(multiply_all(matrices), DIM**2).count == 0
    matrices[3] = 0
    modes = find_modes(multiply_all(matrices), DIM**2)
    assert (modes.count, float(modes.shares.sum())) == (0, 0.0)
    assert find_modes(torch.zeros(3, 3, dtype=torch.float64), 100).count == 0
    assert find_modes(multiply_all(normal(24, 4, 4)), 16).count == 0  # more layers than numbers in a matrix
    assert repr(modes).startswith("SharedModes(count=0, share=0")


def test_a_trained_network_shares_modes_and_the_verdict_says_so():
    """Twelve pre-norm layers after 60 steps of AdamW: free layers miss the spectrum, layers with modes do not."""
    torch.manual_seed(0)
    dim = 48
    model = nn.Sequential(*(Residual(make_mlp(dim)) for _ in range(12)))
    first, second = (torch.randn(dim, dim) / dim**0.5 for _ in range(2))
    x = torch.randn(1, dim)
    fresh = jpmhc.diagnose(model, x, say=None)
    assert fresh.comparisons[0].modes.count == 0
    assert "sublayers' Jacobians share" not in fresh.verdict[4]
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(60):
        inputs = torch.randn(64, dim)
        optimizer.zero_grad()
        (model(inputs) - 2 * torch.tanh(2 * inputs @ first) @ second).square().mean().backward()
        optimizer.step()
    said = []
    trained = jpmhc.diagnose(model, x, say=said.append)
    (item,) = trained.comparisons
    assert item.modes.count >= 1
    assert item.kolmogorov > 0.15
    assert item.rotated_kolmogorov < 0.08
    assert "the sublayers' Jacobians share" in trained.verdict[4]
    assert "layers work together, and gains add up" in trained.verdict[4]
    assert any("every sublayer at those tokens and its shared modes, about" in line and "MiB" in line for line in said)
    assert trained.modes.share == pytest.approx(item.modes.share, abs=0.15)
    short = jpmhc.diagnose(model, x, seconds=1e-3, say=None)  # too short for matrices: random vectors
    assert short.comparisons[0].rotated is None
    assert short.comparisons[0].modes.share == pytest.approx(item.modes.share, abs=0.1)
