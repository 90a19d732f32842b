"""Scalar composition (z₁-mapping, subordination, S-transform) against closed forms, the chain and each other."""

import math
import warnings

import numpy as np
import pytest
import torch

from jpmhc.paper import stransform, subordination, z1
from jpmhc.paper.scalar import ScalarLayers, why_not_exact
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.network import Network
from jpmhc.spectra.schemes import Anderson

SOLVERS = {
    "z1": z1.solve,
    "subordination": subordination.solve,
    "anderson": lambda network, z: subordination.solve(network, z, scheme=Anderson()),
    "stransform": stransform.solve,
}


def points(x, eta):
    return torch.complex(torch.as_tensor(x, dtype=torch.float64), torch.full((len(x),), eta, dtype=torch.float64))


def orthogonal(count, n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(count, n, n, dtype=torch.float64, generator=generator))[0]


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_fuss_catalan(name, depth):
    """Products of noise alone, at three interior points in the closed parametrisation."""
    phi = np.array([0.15, 0.4, 0.7]) * math.pi / (depth + 1)
    x = np.sin((depth + 1) * phi) ** (depth + 1) / (np.sin(phi) * np.sin(depth * phi) ** depth)
    density = np.sin(phi) ** 2 * np.sin(depth * phi) ** (depth - 1) / (math.pi * np.sin((depth + 1) * phi) ** depth)
    found = SOLVERS[name](Network.repeated(torch.zeros(1, 1), 1.0, depth), points(x, 1e-6))
    assert found.converged.all()
    np.testing.assert_allclose(-found.G.imag / math.pi, density, rtol=1e-5)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("total", [0.05, 1.0])
def test_equals_the_chain_for_orthogonal_skips(name, total):
    """Different rotations in every layer, and for the methods that can, different scales and noises."""
    depth = 3 if name == "anderson" else 6
    skips, variance = orthogonal(depth, 3, 0), torch.full((depth,), total / depth, dtype=torch.float64)
    if name != "z1":
        skips = skips * torch.linspace(0.8, 1.2, depth, dtype=torch.float64).view(-1, 1, 1)
        variance = variance * torch.linspace(0.5, 1.5, depth, dtype=torch.float64)
    network, z = Network(skips, variance), points(np.linspace(0.05, 4, 12), 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = SOLVERS[name](network, z)
    truth = cauchy(network, z, tolerance=1e-12)
    assert found.converged.all()
    assert truth.converged.all()
    assert found.exact
    np.testing.assert_allclose(found.G, truth.G, rtol=1e-8)


@pytest.mark.parametrize("name", ["z1", "subordination"])
def test_tarnowski_limit(name):
    """Identity skips at L = 1000: G = (zG − 1) exp(c (1 − 2 zG)) up to O(1/L)."""
    c, depth = 1.0, 1000
    z = points([0.3, 1.0, 2.0, 5.0], 0.05)
    found = SOLVERS[name](Network.repeated(torch.eye(1), c / depth, depth), z)
    assert found.converged.all()
    product = z * found.G
    np.testing.assert_allclose((product - 1) * torch.exp(c * (1 - 2 * product)), found.G, rtol=3e-3)


def test_one_twisted_skip_among_orthogonal_ones_is_exact():
    skips = orthogonal(4, 3, 1)
    skips[2] = torch.diag(torch.tensor([0.2, 1.0, 1.5], dtype=torch.float64)) @ skips[2]
    network, z = Network(skips, 0.05), points([0.1, 0.5, 1.0, 2.0], 0.02)
    found = subordination.solve(network, z)
    assert found.exact
    np.testing.assert_allclose(found.G, cauchy(network, z, tolerance=1e-12).G, rtol=1e-8)


@pytest.mark.parametrize("name", SOLVERS)
def test_warns_where_it_is_not_exact(name):
    skip = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    network, z = Network.repeated(skip, 0.01, 2), points([0.3, 1.0], 0.05)
    with pytest.warns(UserWarning, match="2 of 2 skips are not multiples of orthogonal"):
        found = SOLVERS[name](network, z)
    assert not found.exact
    assert found.note == why_not_exact(network)
    assert found.converged.all()
    truth = cauchy(network, z)
    assert float(((found.G - truth.G) / truth.G).abs().max()) > 0.05


def test_all_agree_where_the_theory_is_only_a_theory():
    """Heterogeneous Gaussian skips near the axis: three iterations, one equation."""
    generator = torch.Generator().manual_seed(3)
    network = Network(torch.randn(3, 4, 4, dtype=torch.float64, generator=generator) / 2, [0.3, 0.1, 0.5])
    z = points(np.linspace(0.02, 4, 12), 1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [SOLVERS[name](network, z) for name in ("subordination", "anderson", "stransform")]
    for found in results:
        assert found.converged.all()
        np.testing.assert_allclose(found.G, results[0].G, rtol=1e-7)
        assert (found.G.imag < 0).all()


def test_s_transform_of_noise_is_known():
    """S(w) = 1/(1 + w) for Marchenko–Pastur, so that log S of three such layers is -3 log(1 + w)."""
    layers = ScalarLayers.of(Network.repeated(torch.zeros(2, 2), 1.0, 3), "stransform")
    w = torch.tensor([0.3 - 0.4j, -0.3 - 0.2j], dtype=torch.complex128)
    start = (1 / w).unsqueeze(-1).repeat(1, 3)
    log_s, slope, converged, _ = stransform.s_transform(w, layers, start)
    assert converged.all()
    np.testing.assert_allclose(log_s, -3 * torch.log(1 + w), rtol=1e-12)
    np.testing.assert_allclose(slope, -3 / (1 + w), rtol=1e-12)


def test_range_is_no_limit():
    """A hundred layers of gain 30 each overflow any plain product."""
    network = Network.repeated(30 * orthogonal(1, 2, 0)[0], 0.9, 100)
    scaled = Network.repeated(orthogonal(1, 2, 0)[0], 0.001, 100)
    z = points([0.5, 1.0], 0.05)
    found, expected = z1.solve(network, z * 30.0**200), z1.solve(scaled, z)
    assert found.converged.all()
    np.testing.assert_allclose(found.G * 30.0**200, expected.G, rtol=1e-9)


def test_announced_fallback(monkeypatch):
    """When the probe fails, the S-transform answers, says so, and carries its own name."""
    monkeypatch.setattr(subordination, "PROBE_SHARE", 1.1)
    network, z = Network(orthogonal(2, 2, 0), [0.1, 0.2]), points(np.linspace(0.2, 2, 20), 0.05)
    with pytest.warns(UserWarning, match="S-transform used instead"):
        found = subordination.solve(network, z)
    assert found.method == "stransform"
    assert "S-transform used instead" in found.note
    np.testing.assert_allclose(found.G, cauchy(network, z).G, rtol=1e-7)


def test_too_few_iterations_are_marked():
    found = z1.solve(Network.repeated(torch.eye(2), 0.5, 8), points([0.5, 1.0], 1e-6), maximum=1, tolerance=1e-15)
    assert not found.converged.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOLVERS)
def test_the_same_on_a_gpu(name):
    network, z = Network(orthogonal(6, 3, 0), 0.1), points(np.linspace(0.05, 4, 12), 0.02)
    found = SOLVERS[name](network.to("cuda"), z.cuda())
    assert found.G.is_cuda
    np.testing.assert_allclose(found.G.cpu(), SOLVERS[name](network, z).G, rtol=1e-8)


def test_bad_input():
    z = points([1.0], 0.1)
    structured = Network.repeated(torch.eye(2), 0.1, 3, read=torch.ones(2), write=torch.ones(2))
    for name in ("z1", "subordination", "stransform"):
        with pytest.raises(ValueError, match="needs isotropic noise"):
            SOLVERS[name](structured, z)
        with pytest.raises(ValueError, match="layer 2 is zero"):
            SOLVERS[name](Network(torch.stack([torch.eye(2), torch.zeros(2, 2)]), [0.1, 0.0]), z)
    with pytest.raises(ValueError, match="layers of one law"):
        z1.solve(Network(torch.eye(2).repeat(2, 1, 1), [0.1, 0.2]), z)
    with pytest.raises(ValueError, match="use the scheme 'newton'"):
        z1.solve(Network.repeated(torch.eye(2), 0.1, 3), z, scheme=Anderson())


def test_a_layer_without_a_skip_makes_the_composition_exact_again():
    skips = Network.from_mixer("bistochastic", 3, 0.0, seed=4).skips.clone()
    skips[1] = 0
    network = Network(skips, 0.3)
    z = torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64) + 0.02j
    found = subordination.solve(network, z)
    assert found.exact
    assert (found.G - cauchy(network, z).G).abs().max() < 1e-6 * found.G.abs().max()


def test_matrix_power_is_the_printed_formula():
    """Matrix arithmetic at the z₁ that the scalar mapping has, for a skip whose AᵀA is not diagonal."""
    generator = torch.Generator().manual_seed(3)
    skip, variance, depth = torch.randn(3, 3, dtype=torch.float64, generator=generator), 0.2, 3
    z = points([0.1, 1.0, 4.0], 0.3)
    with pytest.warns(UserWarning, match="singular vectors"):
        found = z1.solve_matrix_power(Network.repeated(skip, variance, depth), z)
    with pytest.warns(UserWarning, match="singular vectors"):
        scalar = z1.solve(Network.repeated(skip, variance, depth), z).G
    # z_L G_L = z_1 G_1 of the scalar mapping says z_1 G_1, and z_1 then follows from eq. z1_mapping.
    product = z * scalar
    one = (z * (product / (product - 1)) ** (depth - 1)) ** (1 / depth)
    turns = torch.exp(2j * math.pi * torch.arange(depth, dtype=torch.float64) / depth)
    for k, (where, value) in enumerate(zip(one, product)):
        candidates = where * turns
        green = value / candidates
        u = 1 - variance * green
        resolvent = u.view(-1, 1, 1) * torch.linalg.inv(
            (candidates * u**2).view(-1, 1, 1) * torch.eye(3) - (skip.T @ skip).to(torch.complex128)
        )
        miss = (resolvent.diagonal(dim1=-2, dim2=-1).mean(-1) - green).abs()
        best = int(miss.argmin())
        assert miss[best] < 1e-8  # one root of the three is the layer's own
        first = resolvent[best]
        rest = torch.linalg.inv(candidates[best] * first - torch.eye(3))
        expected = torch.linalg.matrix_power(first, depth) @ torch.linalg.matrix_power(rest, depth - 1)
        np.testing.assert_allclose(found.matrix[k], expected, rtol=1e-6)
        np.testing.assert_allclose(found.G[k], expected.diagonal().mean(), rtol=1e-6)


def test_matrix_power_is_right_for_orthogonal_skips_alone():
    """Where AᵀA is the identity it equals the chain; for a bistochastic skip it is off by more than the scalar form."""
    z = points([0.05, 0.2, 0.5, 1.0, 1.5], 0.05)
    network = Network.from_mixer("orthogonal", 5, 0.01, shared=True)
    np.testing.assert_allclose(z1.solve_matrix_power(network, z).G, cauchy(network, z).G, rtol=1e-7)
    bistochastic = Network.from_mixer("bistochastic", 2, 0.025, shared=True)
    truth = cauchy(bistochastic, z).G
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = [((solve(bistochastic, z).G - truth) / truth).abs() for solve in (z1.solve, z1.solve_matrix_power)]
    assert errors[0].max() < 1 < errors[1].min()
    with pytest.raises(ValueError, match="equal layers"):
        z1.solve_matrix_power(Network.from_mixer("bistochastic", 2, 0.025), z)
