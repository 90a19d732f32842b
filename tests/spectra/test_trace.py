"""Stochastic traces and quadratures against dense linear algebra."""

import math

import numpy as np
import pytest
import torch

from jpmhc.spectra import trace
from jpmhc.spectra.chain.solve import cauchy
from jpmhc.spectra.network import Network


def generator(seed):
    return torch.Generator().manual_seed(seed)


def matrix(rows, columns, seed):
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator(seed)) / math.sqrt(columns)


def on_rows(a):
    return lambda x: x @ a.mT


@pytest.mark.parametrize("kind", trace.PROBES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_hutchinson_is_unbiased(kind, dtype):
    """A resolvent of a non-symmetric matrix, whose trace is complex."""
    a = matrix(60, 60, 0).to(torch.complex128)
    a = torch.linalg.inv((1.5 + 0.7j) * torch.eye(60) - a)
    start = trace.probes(4000, 60, kind, dtype=dtype, generator=generator(1)).to(torch.complex128)
    found = trace.hutchinson(on_rows(a), start)
    assert abs(found.value - torch.trace(a)) < 4 * found.error
    assert found.error < 0.02 * abs(torch.trace(a))


def test_the_transpose_in_print_estimates_nothing():
    a = torch.eye(50, dtype=torch.complex128)
    g = trace.probes(4000, 50, dtype=torch.complex128, generator=generator(0))
    assert abs(50 * (g * g).sum(-1).mean()) < 0.5  # gᵀAg instead of g*Ag
    assert trace.hutchinson(on_rows(a), g).value.real == pytest.approx(50)


@pytest.mark.parametrize("kind", trace.PROBES)
def test_probes_are_isotropic_unit_vectors(kind):
    g = trace.probes(40_000, 3, kind, dtype=torch.complex128, generator=generator(2))
    np.testing.assert_allclose(torch.linalg.vector_norm(g, dim=-1), 1, rtol=1e-12)
    np.testing.assert_allclose(g.T @ g.conj() / len(g), np.eye(3) / 3, atol=0.01)


def test_hutchpp_is_exact_on_low_rank():
    left = matrix(80, 4, 3)
    a = left @ left.T
    found = trace.hutchpp(on_rows(a), trace.probes(6, 80, generator=generator(4)), trace.probes(3, 80))
    assert float(found.value) == pytest.approx(float(torch.trace(a)), rel=1e-10)


def test_hutchpp_gains_on_decay_and_not_near_isometry():
    """With equal numbers of products; the errors are measured over repetitions."""
    orthogonal = torch.linalg.qr(matrix(100, 100, 5))[0]
    steep = orthogonal @ torch.diag(torch.linspace(1, 100, 100, dtype=torch.float64) ** -2.0) @ orthogonal.T
    flat = orthogonal @ torch.diag(1 + 0.1 * torch.sin(torch.arange(100.0, dtype=torch.float64))) @ orthogonal.T

    def error(a, improved):
        misses = []
        for seed in range(60):
            vectors = trace.probes(30, 100, generator=generator(seed))
            if improved:
                found = trace.hutchpp(on_rows(a), vectors[:10], vectors[10:20])
            else:
                found = trace.hutchinson(on_rows(a), vectors)
            misses.append(float(found.value - torch.trace(a)))
        return float(np.std(misses))

    assert error(steep, True) < 0.2 * error(steep, False)
    assert error(flat, True) > 0.8 * error(flat, False)


def test_hutchpp_with_complex_vectors():
    a = torch.linalg.inv((0.5 + 0.3j) * torch.eye(40) - matrix(40, 40, 6) / 3)
    sketch, start = (
        trace.probes(count, 40, dtype=torch.complex128, generator=generator(count)) for count in (10, 2000)
    )
    found = trace.hutchpp(on_rows(a), sketch, start)
    assert abs(found.value - torch.trace(a)) < 4 * found.error


def test_lanczos_integrates_polynomials_exactly():
    """Degree 2k - 1 with k steps, for each vector separately, complex Hermitian included."""
    b = torch.complex(matrix(30, 30, 7), matrix(30, 30, 8))
    a = b + b.mH
    start = trace.probes(3, 30, dtype=torch.complex128, generator=generator(9))
    rule = trace.quadrature(on_rows(a), start, 5)
    for order in range(10):
        exact = (start.conj() * (start @ torch.linalg.matrix_power(a, order).mT)).sum(-1).real
        np.testing.assert_allclose((rule.weights * rule.nodes**order).sum(-1), exact, rtol=1e-9, atol=1e-9)
    assert rule.nodes.shape == (3, 5)


def test_golub_kahan_integrates_polynomials_exactly():
    j = matrix(20, 35, 10)
    start = trace.probes(4, 35, generator=generator(11))
    rule = trace.singular_quadrature(on_rows(j), on_rows(j.mT), start, 6)
    gram = j.T @ j
    for order in range(12):
        exact = (start * (start @ torch.linalg.matrix_power(gram, order))).sum(-1)
        np.testing.assert_allclose((rule.weights * rule.nodes**order).sum(-1), exact, rtol=1e-8)


def test_all_steps_give_the_whole_spectrum():
    """k = N: the measure of every vector is exact, down to singular values of 1e-6, and a null space stays empty."""
    q, _ = torch.linalg.qr(matrix(12, 12, 12))
    values = torch.logspace(-6, 0.3, 12, dtype=torch.float64)
    j = q @ torch.diag(values) @ torch.linalg.qr(matrix(12, 12, 13))[0]
    rule = trace.singular_quadrature(on_rows(j), on_rows(j.mT), trace.probes(2, 12, generator=generator(1)), 12)
    np.testing.assert_allclose(rule.nodes.sort().values[0].sqrt(), values, rtol=1e-7)
    np.testing.assert_allclose(rule.weights.sum(-1), 1, rtol=1e-12)


def test_breakdown_stops_quietly():
    """An identity has one eigenvalue: one step finds it, and the rest must carry no weight."""
    eye = torch.eye(9, dtype=torch.float64)
    for rule in (
        trace.quadrature(on_rows(2 * eye), trace.probes(3, 9, generator=generator(0)), 4),
        trace.singular_quadrature(on_rows(2 * eye), on_rows(2 * eye), trace.probes(3, 9, generator=generator(0)), 4),
    ):
        assert float(rule.moment(1).value) in (pytest.approx(2.0), pytest.approx(4.0))
        np.testing.assert_allclose(rule.weights.amax(-1), 1, rtol=1e-12)


def test_cauchy_transform_of_a_sampled_network_agrees_with_theory():
    """A Jacobian used only through products, against the chain: the way a real model will be compared."""
    n, width, depth = 2, 250, 4
    gen = generator(3)
    skip = torch.tensor([[0.8, 0.2], [0.2, 0.8]], dtype=torch.float64)
    network = Network.repeated(skip, 0.1, depth)
    size = n * width
    full = torch.kron(skip, torch.eye(width, dtype=torch.float64))
    layers = [
        full + torch.randn(size, size, dtype=torch.float64, generator=gen) * math.sqrt(0.1 / size) for _ in range(depth)
    ]

    def forward(x):
        for layer in layers:
            x = x @ layer.mT
        return x

    def backward(x):
        for layer in reversed(layers):
            x = x @ layer
        return x

    rule = trace.singular_quadrature(forward, backward, trace.probes(80, size, generator=gen), 40)
    z = torch.tensor([0.2 + 0.1j, 0.6 + 0.1j, 1 + 0.1j, 2 + 0.1j], dtype=torch.complex128)
    np.testing.assert_allclose(rule.cauchy(z), cauchy(network, z).G, rtol=0.05)
    jacobian = forward(torch.eye(size, dtype=torch.float64)).mT
    squared = torch.linalg.svdvals(jacobian).square()
    first, below = rule.moment(1), rule.below(0.25)
    assert abs(float(first.value) - float(squared.mean())) < 4 * first.error
    assert float(below.value) == pytest.approx(float((squared < 0.25).double().mean()), abs=0.05)


def test_bad_input():
    start = trace.probes(2, 5)
    with pytest.raises(ValueError, match="must be at most 5, the dimension, not 6"):
        trace.quadrature(lambda x: x, start, 6)
    with pytest.raises(ValueError, match="steps must be a whole number, at least 1, got 0"):
        trace.singular_quadrature(lambda x: x, lambda x: x, start, 0)
    with pytest.raises(ValueError, match="choose one of gaussian"):
        trace.probes(2, 5, "sobol")
    with pytest.raises(ValueError, match="number of probes must be a whole number, at least 1, got 0"):
        trace.probes(0, 5)
    with pytest.raises(ValueError, match="at most 5"):
        trace.hutchpp(lambda x: x, trace.probes(6, 5), start)
    with pytest.raises(ValueError, match="rows"):
        trace.hutchinson(lambda x: x, start[0])
    with pytest.raises(ValueError, match="at most 5 vectors of size 5"):
        trace.hutchpp(lambda x: x, trace.probes(2, 4), start)
    assert math.isnan(trace.hutchinson(lambda x: x, start[:1]).error)
