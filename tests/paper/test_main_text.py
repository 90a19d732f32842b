"""The equations of the paper's main text: solved as printed, and away from the law of a layer."""

import numpy as np
import pytest
import torch

from jpmhc import paper, spectra
from jpmhc.spectra import Network
from tests.spectra.problems import points

Z = points(np.linspace(0.05, 3, 12), 0.05)


def solve(network, method):
    with pytest.warns(UserWarning, match=f"method '{method}': eq. {method} is not the law of a layer"):
        return paper.cauchy(network, Z, method)


@pytest.mark.parametrize(("skip", "variance"), [(1.0, 0.05), (-0.7, 0.4), (2.0, 1.0)])
def test_the_scalar_equation_has_the_root_of_its_quadratic(skip, variance):
    found = solve(Network.repeated(torch.eye(3, dtype=torch.float64) * skip, variance, 1), "dyson-fp")
    z, edge = Z.numpy(), 2 * np.sqrt(complex(skip * variance))
    m = 2 * skip / (z + np.sqrt(z - edge) * np.sqrt(z + edge))  # the root that vanishes at infinity
    good = found.converged.numpy()
    assert good.mean() > 0.8
    assert not found.exact
    np.testing.assert_allclose(found.G.numpy()[good], (m / z)[good], rtol=1e-8)


def test_the_printed_newton_step_takes_many_iterations():
    found = solve(Network.repeated(torch.eye(1), 0.05, 1), "dyson-fp")
    assert found.iterations.max() > 30


def test_the_matrix_equation_is_solved():
    """The residual is recomputed here, in NumPy, from the matrix that the solution holds."""
    skip, variance = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 0.02
    found = solve(Network(skip[None], variance), "matrix-dyson")
    good = found.converged.numpy()
    assert good.mean() > 0.9
    for z, resolvent, g in zip(Z.numpy()[good], found.matrix.numpy()[good], found.G.numpy()[good]):
        # (z - A_h' A_h)^-1 = R determines M through A_h = A + s M and M = A_h R
        dressed = skip.numpy() @ np.linalg.inv(np.eye(3) - variance * resolvent)
        np.testing.assert_allclose(np.linalg.inv(z * np.eye(3) - dressed.T @ dressed), resolvent, rtol=1e-7, atol=1e-9)
        assert g == pytest.approx(np.trace(resolvent) / 3)


def test_without_noise_the_matrix_equation_is_the_skip_alone():
    skip = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = solve(Network(skip[None], 0.0), "matrix-dyson")
    assert found.converged.all()
    np.testing.assert_allclose(found.G, spectra.cauchy(Network(skip[None], 0.0), Z).G, rtol=1e-9)


@pytest.mark.parametrize("method", ["dyson-fp", "matrix-dyson"])
def test_neither_is_the_law_of_the_layer(method):
    network = Network.repeated(torch.eye(2), 0.3, 1)
    found, truth = solve(network, method), spectra.cauchy(network, Z)
    assert ((found.G - truth.G).abs() > 0.15 * truth.G.abs())[found.converged].any()


def test_refused_networks():
    with pytest.raises(ValueError, match="'dyson-fp' needs a skip that is a number times the identity; use 'dyson'"):
        paper.cauchy(Network.from_mixer("bistochastic", 1, 0.1), Z, "dyson-fp")
    with pytest.raises(ValueError, match="'matrix-dyson' solves one layer, and this network has 2"):
        paper.cauchy(Network.repeated(torch.eye(2), 0.1, 2), Z, "matrix-dyson")
    with pytest.raises(ValueError, match=r"b must be matrices \[B, n, n\]"):
        paper.matrix_cauchy(torch.eye(3), torch.eye(2, dtype=torch.float64), 0.1)
