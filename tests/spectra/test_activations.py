"""Gaussian moments against adaptive quadrature from SciPy and against known values."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate

from jpmhc.spectra.activations import ACTIVATIONS, Activation, get_activation, leaky_relu

# Written in NumPy here, so that neither functions nor derivatives are taken from the code under test.
sigmoid = np.vectorize(lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0)
FUNCTIONS = {
    "linear": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x: max(x, 0.01 * x),
    "tanh": math.tanh,
    "sigmoid": lambda x: float(sigmoid(x)),
    "hard_tanh": lambda x: min(1.0, max(-1.0, x)),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "silu": lambda x: x * float(sigmoid(x)),
}


def expectation(function, variance):
    s = math.sqrt(variance)
    cuts = [c / s for c in (-20, -8, -4, -2, -1, 0, 1, 2, 4, 8, 20) if abs(c / s) < 12]
    bounds = [-12.0, *cuts, 12.0]
    total = 0.0
    for low, high in itertools.pairwise(bounds):
        total += integrate.quad(
            lambda z: function(s * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi), low, high, epsrel=1e-12
        )[0]
    return total


def slope(function, x, h=1e-5):
    return (function(x + h) - function(x - h)) / (2 * h)


def test_every_activation_is_tested():
    assert set(FUNCTIONS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("variance", [0.05, 0.9, 30.0])
def test_moments_against_quadrature(name, variance):
    function, activation = FUNCTIONS[name], ACTIVATIONS[name]
    assert float(activation.kappa(variance)) == pytest.approx(expectation(lambda x: function(x) ** 2, variance), 1e-9)
    assert float(activation.phi(variance)) == pytest.approx(expectation(function, variance), rel=1e-9, abs=1e-9)
    # The central difference blurs a kink over 2e-5.
    assert float(activation.psi(variance)) == pytest.approx(
        expectation(lambda x: slope(function, x) ** 2, variance), rel=2e-5
    )


def test_an_activation_without_a_derivative_is_refused():
    with pytest.raises(ValueError, match="the derivative of the activation 'mish' must be a function of a tensor"):
        Activation("mish", torch.nn.functional.mish, None)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_function_and_derivative(name):
    x = torch.tensor([-3.1, -0.7, -0.2, 0.3, 0.9, 2.7], dtype=torch.float64)
    np.testing.assert_allclose(ACTIVATIONS[name].function(x), [FUNCTIONS[name](float(t)) for t in x], rtol=1e-12)
    np.testing.assert_allclose(
        ACTIVATIONS[name].derivative(x), [slope(FUNCTIONS[name], float(t)) for t in x], rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_variance_is_the_value_at_zero(name):
    activation = ACTIVATIONS[name]
    assert float(activation.kappa(0.0)) == pytest.approx(FUNCTIONS[name](0.0) ** 2, abs=1e-14)
    assert float(activation.phi(0.0)) == pytest.approx(FUNCTIONS[name](0.0), abs=1e-14)
    assert math.isfinite(float(activation.psi(0.0)))


def test_sigmoid_mean_is_one_half_and_batch_is_loop():
    variances = torch.tensor([0.1, 0.6, 50.0], dtype=torch.float64)
    np.testing.assert_allclose(ACTIVATIONS["sigmoid"].phi(variances), 0.5, rtol=1e-13)
    batch = ACTIVATIONS["silu"].psi(variances)
    np.testing.assert_allclose(batch, [float(ACTIVATIONS["silu"].psi(v)) for v in variances], rtol=1e-12)


def test_a_kink_costs_no_digits():
    for variance in (0.2, 1.0, 40.0):
        truth = math.erf((2 * variance) ** -0.5)
        assert float(ACTIVATIONS["hard_tanh"].psi(variance)) == pytest.approx(truth, rel=1e-12)


def test_leaky_slope():
    assert float(leaky_relu(0.3).psi(2.0)) == pytest.approx((1 + 0.09) / 2)


def test_bad_input():
    with pytest.raises(ValueError, match="choose one of linear, relu"):
        get_activation("swishy")
    with pytest.raises(ValueError, match="must not be negative"):
        ACTIVATIONS["tanh"].psi(-1.0)
    with pytest.raises(ValueError, match="finite"):
        ACTIVATIONS["tanh"].kappa(float("nan"))
