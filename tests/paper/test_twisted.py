"""The twisted S-transform against the chain, the matrix Dyson equation and the paper's own equations."""

import numpy as np
import pytest
import torch

from jpmhc.paper import matrix_cauchy, twisted, z1
from jpmhc.paper import one_layer as dyson
from jpmhc.spectra import Network, cauchy
from tests.paper.twisted_fold import psi_inverse, twisted_fold


def points(x, eta):
    return torch.complex(torch.as_tensor(x, dtype=torch.float64), torch.full((len(x),), eta, dtype=torch.float64))


def gaussian(depth, n, seed):
    return torch.randn(depth, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / n**0.5


GRID = points(np.geomspace(1e-3, 8, 25), 0.02)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [[0.025, 0.025], [0.9, 0.3]])
def test_two_layers_equal_the_chain(seed, noise):
    """Non-normal skips, to 1e-8."""
    network = Network(gaussian(2, 4, seed), noise)
    found, truth = twisted.solve(network, GRID), cauchy(network, GRID, tolerance=1e-12)
    assert found.converged.all()
    assert truth.converged.all()
    assert found.exact
    assert found.method == "twisted"
    np.testing.assert_allclose(found.G, truth.G, rtol=1e-8)


def test_two_layers_close_to_the_axis():
    network, z = Network(gaussian(2, 3, 7), 0.2), points(np.geomspace(1e-2, 5, 20), 1e-6)
    found, truth = twisted.solve(network, z), cauchy(network, z, tolerance=1e-12, maximum=3000)
    assert found.converged.all()
    np.testing.assert_allclose(found.G[truth.converged], truth.G[truth.converged], rtol=1e-7)
    assert truth.converged.double().mean() > 0.9


def test_two_hyper_connection_blocks_equal_the_chain():
    generator = torch.Generator().manual_seed(1)
    read, write = (torch.rand(2, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    network = Network(gaussian(2, 3, 2), [0.5, 0.8], read=read, write=write)
    found, truth = twisted.solve(network, GRID), cauchy(network, GRID, tolerance=1e-12)
    assert found.exact
    assert found.converged.all()
    np.testing.assert_allclose(found.G, truth.G, rtol=1e-8)


def test_one_layer_is_the_layer():
    network = Network(gaussian(1, 4, 3), 0.4)
    np.testing.assert_allclose(twisted.solve(network, GRID).G, dyson.solve(network, GRID).G, rtol=1e-9)


def test_orthogonal_skips_are_scalar():
    """Without directions nothing is twisted: seven layers equal the z₁-mapping."""
    skips = torch.linalg.qr(gaussian(7, 3, 4))[0]
    network = Network(skips, 0.05)
    found = twisted.solve(network, GRID)
    assert found.exact
    np.testing.assert_allclose(found.G, z1.solve(network, GRID).G, rtol=1e-8)


def test_the_papers_first_factor_is_wrong_for_non_normal_skips():
    network = Network(gaussian(2, 4, 0), 0.025)
    with pytest.warns(UserWarning, match="A₁ is not normal"):
        found = twisted.solve_as_printed(network, GRID)
    assert not found.exact
    truth = cauchy(network, GRID)
    assert float(((found.G - truth.G) / truth.G).abs().median()) > 0.05
    symmetric = Network(network.skips + network.skips.mT, 0.025)
    same = twisted.solve_as_printed(symmetric, GRID)
    assert same.exact
    np.testing.assert_allclose(same.G, cauchy(symmetric, GRID, tolerance=1e-12).G, rtol=1e-8)


@pytest.mark.parametrize("depth", [3, 5, 10])
def test_deeper_it_warns_and_differs(depth):
    network = Network(gaussian(depth, 3, depth), 1 / depth)
    z = GRID[::4]
    with pytest.warns(UserWarning, match="not cyclic"):
        found = twisted.solve(network, z)
    assert not found.exact
    assert found.converged.all()
    truth = cauchy(network, z)
    assert float(((found.G - truth.G) / truth.G).abs().max()) > 0.02


def test_what_it_computes_is_the_product_of_the_factors():
    """Its law for three layers is that of x₃x₂x₁ sampled with independent layers, transposes and all."""
    n, width, samples, variance = 2, 150, 12, 0.15
    skips = gaussian(3, n, 5) + 0.6 * torch.eye(n)
    z = torch.tensor([1.0 + 1.5j, -0.5 + 0.6j, 3 + 1j], dtype=torch.complex128)
    with pytest.warns(UserWarning, match="not cyclic"):
        found = twisted.solve(Network(skips, variance), z)
    rng = np.random.default_rng(0)
    values = []
    for _ in range(samples):
        y = [
            np.kron(a, np.eye(width)) + rng.normal(size=(n * width,) * 2) * np.sqrt(variance / (n * width))
            for a in skips.numpy()
        ]
        product = y[2].T @ y[2] @ y[1].T @ y[1] @ y[0] @ y[0].T
        eigenvalues = np.linalg.eigvals(product)
        values.append((1 / (z.numpy()[:, None] - eigenvalues)).mean(-1))
    np.testing.assert_allclose(found.G, np.mean(values, 0), rtol=0.02)


def test_psi_inversion_inverts_the_matrix_dyson_equation():
    """G(b) from the two-scalar Schur iteration, then back: b and W⁻¹ G(b)."""
    skip, variance = gaussian(1, 3, 8)[0], 0.5
    rng = np.random.default_rng(3)
    b = torch.tensor(rng.normal(size=(4, 3, 3)) * 0.4) + (1.5 + 1.2j) * torch.eye(3)
    g, converged = matrix_cauchy(b, skip, variance)
    assert converged.all()
    w = g @ b - torch.eye(3)
    factor = twisted.Factors.of(Network(skip[None], variance), "gram")
    start = torch.tensor([[0.0, 1.0]], dtype=torch.complex128).repeat(4, 1)
    s, b_again, good = psi_inverse(factor, w, start)
    assert good.all()
    np.testing.assert_allclose(b_again, b, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(w @ s, g, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*not cyclic")
@pytest.mark.parametrize("depth", [2, 3])
def test_solution_is_that_of_the_papers_outer_equation(depth):
    """z W S(W) = 1 + W (eq. outer_newton) with S from the literal fold, solved here over all n² entries of W."""
    network = Network(gaussian(depth, 2, 9), 0.4)
    factors = twisted.Factors.of(network, "outer")
    start = torch.tensor([[0.0] * depth + [1.0] * depth], dtype=torch.complex128).repeat(5, 1)
    eye, z = torch.eye(2, dtype=torch.complex128), 2.0 + 1.5j
    w = (factors.mean()[0] / (4 * z)).flatten()
    for height in (4, 2, 1, 1, 1):
        for _ in range(3):
            # The point itself and its four neighbours, for a Jacobian by differences.
            around = (w + 1e-6 * torch.eye(5, 4, dtype=w.dtype).roll(1, 0)).view(5, 2, 2)
            s, good = twisted_fold(factors, around, start)
            assert good.all()
            defect = (height * z * around @ s - around - eye).flatten(1)
            w = w - torch.linalg.solve(((defect[1:] - defect[0]) / 1e-6).T, defect[0])
    expected = (1 + w.view(2, 2).diagonal().mean()) / z
    found = twisted.solve(network, torch.tensor([z], dtype=torch.complex128))
    np.testing.assert_allclose(found.G[0], expected, rtol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_on_a_gpu(depth):
    network = Network(gaussian(depth, 4, 0), 0.2)
    for solve in (twisted.solve, dyson.solve) if depth == 1 else (twisted.solve,):
        found = solve(network.to("cuda"), GRID.cuda())
        assert found.G.is_cuda
        np.testing.assert_allclose(found.G.cpu(), solve(network, GRID).G, rtol=1e-8)


def test_bad_input():
    z = points([1.0], 0.1)
    with pytest.raises(ValueError, match="general covariance"):
        twisted.solve(Network(torch.eye(2)[None], 0.1, covariance=torch.ones(1, 1, 2, 2)), z)
    with pytest.raises(ValueError, match="layer 1 has a singular mean"):
        twisted.solve(Network(torch.diag(torch.tensor([1.0, 0.0]))[None], 0.0), z)
