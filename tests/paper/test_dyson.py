"""One layer against closed forms and sampled matrices."""

import math

import numpy as np
import pytest
import torch

from jpmhc.paper import matrix_cauchy
from jpmhc.paper import one_layer as dyson
from jpmhc.spectra.network import Network
from tests.spectra.problems import points


def random_skip(n, seed):
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, n)) / np.sqrt(n))


def sampled(skip, variance, width, samples, seed, z):
    """mean (z - s²)⁻¹ over the singular values of sampled layers, and its standard error."""
    n = len(skip)
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(samples):
        y = np.kron(skip, np.eye(width)) + rng.normal(size=(n * width, n * width)) * math.sqrt(variance / (n * width))
        squared = np.linalg.svd(y, compute_uv=False) ** 2
        values.append((1 / (z[:, None] - squared)).mean(-1))
    return np.mean(values, 0), np.std(values, 0) / math.sqrt(samples)


def test_marchenko_pastur():
    x = np.array([0.1, 0.7, 2.0, 3.5])
    found = dyson.solve(Network(torch.zeros(1, 2, 2), 1.0), points(x, 1e-10))
    np.testing.assert_allclose(-found.G.imag / math.pi, np.sqrt(x * (4 - x)) / (2 * math.pi * x), rtol=1e-8)
    assert found.converged.all()
    assert found.exact
    assert found.method == "dyson"


@pytest.mark.parametrize("variance", [0.05, 1.0])
def test_against_sampled_matrices(variance):
    skip = random_skip(3, 1)
    z = points([0.05, 0.3, 0.8, 1.5, 3.0], 0.1)
    found = dyson.solve(Network(skip[None], variance), z)
    truth, error = sampled(skip.numpy(), variance, 120, 12, 0, z.numpy())
    assert found.converged.all()
    # Besides the sampling error the finite width leaves a bias of order 1/N².
    assert np.all(np.abs(found.G.numpy() - truth) < 4 * error + 2e-3 * np.abs(truth))


def test_satisfies_the_equation_close_to_the_axis():
    """The residual is recomputed here from eq. dyson_subordination, for heights down to 1e-12."""
    skip = random_skip(4, 2)
    s = np.linalg.svd(skip.numpy(), compute_uv=False) ** 2
    for eta in (0.02, 1e-6, 1e-12):
        z = points(np.linspace(1e-3, 6, 200), eta)
        found = dyson.solve(Network(skip[None], 0.3), z)
        assert found.converged.all()
        g = found.G.numpy()
        u = 1 - 0.3 * g
        again = u * (1 / ((z.numpy() * u**2)[:, None] - s)).mean(-1)
        np.testing.assert_allclose(again, g, rtol=1e-11)
        assert (g.imag < 0).all()


def test_without_noise_it_is_the_skip_alone():
    skip = random_skip(3, 3)
    z = points([0.2, 1.0], 0.05)
    exact = [np.trace(np.linalg.inv(w * np.eye(3) - skip.numpy().T @ skip.numpy())) / 3 for w in z.numpy()]
    np.testing.assert_allclose(dyson.solve(Network(skip[None], 0.0), z).G, exact, rtol=1e-12)


def test_matrix_parameter_against_sampled_matrices():
    """E_B[(b - YᵀY)⁻¹]: the partial trace over features of a sampled resolvent, at a non-normal b."""
    n, width, samples, variance = 3, 80, 20, 0.4
    rng = np.random.default_rng(0)
    skip = random_skip(n, 5)
    b = rng.normal(size=(n, n)) * 0.5 + np.eye(n) * (1 + 0.8j) + 0.2j * np.diag([0, 1, 2])
    total = np.zeros((n, n), dtype=complex)
    for _ in range(samples):
        y = np.kron(skip, np.eye(width)) + rng.normal(size=(n * width, n * width)) * math.sqrt(variance / (n * width))
        resolvent = np.linalg.inv(np.kron(b, np.eye(width)) - y.T @ y).reshape(n, width, n, width)
        total += np.einsum("ikjk->ij", resolvent) / width / samples
    found, converged = matrix_cauchy(torch.tensor(b)[None], skip, variance)
    assert converged.all()
    np.testing.assert_allclose(found[0], total, atol=6e-3)


def test_matrix_parameter_at_a_scalar_is_the_layer():
    skip = random_skip(4, 6)
    z = points([0.1, 0.9, 2.5], 0.02)
    found, converged = matrix_cauchy(z[:, None, None] * torch.eye(4, dtype=z.dtype), skip, 0.3)
    assert converged.all()
    trace = found.diagonal(dim1=-1, dim2=-2).mean(-1)
    np.testing.assert_allclose(trace, dyson.solve(Network(skip[None], 0.3), z).G, rtol=1e-10)


def test_bad_input():
    z = points([1.0], 0.1)
    with pytest.raises(ValueError, match="solves one layer"):
        dyson.solve(Network.repeated(torch.eye(2), 0.1, 2), z)
    with pytest.raises(ValueError, match="isotropic noise"):
        dyson.solve(Network(torch.eye(2)[None], 0.1, read=torch.ones(2), write=torch.ones(2)), z)
