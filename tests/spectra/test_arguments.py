"""What people pass by mistake ends in one sentence, whichever function they pass it to."""

import math

import numpy as np
import pytest
import torch

from jpmhc import checks, paper
from jpmhc.spectra import (
    Network,
    cauchy,
    density,
    distances,
    edges,
    moments,
    simulate,
    simulate_nonlinear,
)
from jpmhc.spectra.arguments import to_read_and_write

NETWORK = Network.from_mixer("orthogonal", 2, 0.01, streams=2)
DENSITY = density(NETWORK, torch.linspace(0.3, 2, 30, dtype=torch.float64))
EYE = torch.eye(2)
Z = 1 + 1j


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), torch.tensor(3)])
def test_whole_numbers_of_any_kind(value):
    assert checks.whole_number(value, "depth") == 3
    assert type(checks.whole_number(value, "depth")) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, 2.5, "2", None, True, math.nan])
def test_what_is_no_count(value):
    with pytest.raises(ValueError, match=r"^depth must be a whole number, at least 1, got "):
        checks.whole_number(value, "depth")


def test_numbers():
    assert checks.positive_number(np.float32(0.5), "eta") == 0.5
    assert checks.non_negative_number(0, "noise") == 0.0
    for value in (0, -1.0, math.inf, math.nan, "1", None, 1j):
        with pytest.raises(ValueError, match=r"^eta must be positive and finite, got "):
            checks.positive_number(value, "eta")
    for value in (-1e-300, math.inf, math.nan, "1", None, [1.0, 2.0]):
        with pytest.raises(ValueError, match=r"^noise must be finite and not negative, got "):
            checks.non_negative_number(value, "noise")


def test_arrays_keep_double_precision():
    third = checks.real_tensor([1 / 3], "x")
    assert third.dtype == torch.float64
    assert float(third) == 1 / 3
    assert checks.real_tensor(np.ones((2, 3), dtype=np.float32), "x").shape == (2, 3)
    assert checks.real_tensor([EYE, EYE], "x").shape == (2, 2, 2)
    read, write = to_read_and_write([1.0, 2.0], [[0.0, 1.0]] * 3, torch.zeros(3, 2, 2))
    assert read.tolist() == [[1.0, 2.0]] * 3
    assert write.tolist() == [[0.0, 1.0]] * 3


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Network.repeated(EYE, 0.1, 2.5), "depth must be a whole number, at least 1, got 2.5"),
        (lambda: Network.repeated(EYE, 0.1, "a"), "depth must be a whole number, at least 1, got 'a'"),
        (lambda: Network.repeated(EYE, "x", 2), "variance must be real numbers in an array of equal rows, not 'x'"),
        (lambda: Network.repeated(EYE, 0.1, 2, covariance=EYE), "covariance must be"),
        (
            lambda: Network([EYE, torch.eye(3)], 0.1),
            "skips must be real numbers in an array of equal rows, not the content",
        ),
        (lambda: Network.from_mixer("identity", 2.5, 0.1), "depth must be a whole number"),
        (lambda: Network.from_mixer("identity", 2, 0.1, "a"), "streams must be a whole number"),
        (lambda: Network.from_mixer(["identity"], 2, 0.1), "no random skip is called"),
        (lambda: Network.from_mixer("identity", 2, 0.1, seed=1.5), "seed must be a whole number, at least 0"),
        (lambda: Network.from_mixer("grassmann", 2, 0.1, rank=1.5), "rank must be a whole number"),
        (
            lambda: Network.from_mixer("orthogonal", 2, 0.1, rank=2),
            "rank is the dimension of a grassmann skip's subspace",
        ),
        (
            lambda: Network.from_coefficients([(torch.ones(5, 2), torch.ones(5, 2), torch.ones(5, 2, 2))], 0.1),
            "one token",
        ),
        (lambda: Network.from_coefficients(3, 0.1), r"list of \(read, write, skip\)"),
        (lambda: Network.from_coefficients([(EYE[0], EYE[0])], 0.1), r"list of \(read, write, skip\)"),
        (
            lambda: Network.from_coefficients([(torch.ones(n), torch.ones(n), torch.eye(n)) for n in (2, 3)], 0.1),
            "one number of streams",
        ),
        (lambda: Network.from_activation(EYE, None, 1.0, depth=2), "no activation is called None"),
        (lambda: NETWORK.to("abacus"), "no available device is called 'abacus'"),
        (lambda: cauchy(EYE, Z), "must be a Network, not a Tensor"),
        (lambda: cauchy(NETWORK, "a"), "spectral points must be complex numbers"),
        (lambda: paper.cauchy(NETWORK, Z, ["z1"]), "no method is called"),
        (lambda: cauchy(NETWORK, Z, tolerance="a"), "the tolerance must be positive and finite, got 'a'"),
        (lambda: cauchy(NETWORK, Z, maximum=2.5), "the number of iterations must be a whole number"),
        (lambda: density(EYE), "must be a Network"),
        (lambda: density(NETWORK, "a"), "grid of squared singular values must be real numbers"),
        (lambda: density(NETWORK, torch.ones(3) * 1j), "grid of squared singular values must be real"),
        (lambda: density(NETWORK, eta=math.inf), "eta must be positive and finite"),
        (lambda: density(NETWORK, refine="richardson", levels=2.5), "levels must be a whole number"),
        (lambda: DENSITY.moments(2.5), "the number of moments must be a whole number"),
        (lambda: DENSITY.quantile("a"), "a quantile's probability must be finite and not negative"),
        (lambda: DENSITY.quantile(1.5), "must be at most 1"),
        (lambda: DENSITY.collapsed(math.nan), "the threshold must be finite and not negative"),
        (lambda: DENSITY.condition(0.5), "tail must be below 0.5"),
        (lambda: DENSITY.wasserstein(torch.tensor([-1.0, 2.0])), "none of them negative"),
        (lambda: DENSITY.wasserstein(torch.zeros(0)), "at least one and none"),
        (lambda: DENSITY.wasserstein(torch.ones(2) * 1j), "must be real"),
        (lambda: DENSITY.wasserstein("a"), "must be real numbers"),
        (lambda: distances(torch.ones(2), DENSITY), "must be a Density, not a Tensor"),
        (lambda: distances(DENSITY, torch.ones(2), bins=2.5), "the number of bins must be a whole number"),
        (lambda: edges(DENSITY, NETWORK), "must be a Network, not a Density"),
        (lambda: edges(NETWORK, None), "must be a Density of the network"),
        (lambda: moments(NETWORK, 2.5, 3.0), "the number of moments must be a whole number"),
        (lambda: moments(NETWORK, 2, "a"), "above the spectrum, must be positive and finite"),
        (lambda: simulate(EYE, 3, 2), "must be a Network"),
        (lambda: simulate(NETWORK, "a", 2), "width, the features per stream, must be a whole number"),
        (lambda: simulate(NETWORK, 3, 2.5), "samples must be a whole number"),
        (lambda: simulate(NETWORK, 3, 2, batch=0), "batch must be a whole number, at least 1, got 0"),
        (lambda: simulate(NETWORK, 3, 2, -1), "seed must be a whole number, at least 0"),
        (lambda: simulate(NETWORK, 3, 2, dtype=torch.float16), "torch.float32 or torch.float64"),
        (
            lambda: simulate_nonlinear(Network([EYE], 1, covariance=EYE[None, None]), "tanh", 1.0, 4, 1),
            "general covariance",
        ),
        (lambda: simulate_nonlinear(NETWORK, "tanh", -1.0, 3, 2), "weight_scale must be finite and not negative"),
        (lambda: simulate_nonlinear(NETWORK, "tanh", 1.0, 3, 2, input_variance=-1), "input_variance must be finite"),
        (lambda: simulate_nonlinear(NETWORK, "tanh", 1.0, 3, 2, bias_scale=math.nan), "bias_scale must be finite"),
    ],
)
def test_every_function_refuses_in_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_samples_may_be_arrays_and_seeds_large():
    sampled = simulate(NETWORK, 5, 2, seed=2**62)
    assert DENSITY.wasserstein(sampled.numpy()) == DENSITY.wasserstein(sampled)
    assert DENSITY.wasserstein(sampled.tolist()) == DENSITY.wasserstein(sampled)
    assert distances(DENSITY, sampled.numpy()) == distances(DENSITY, sampled)


def test_coefficients_may_be_arrays():
    layer = (np.array([1.0, 0.0]), np.array([0.5, 0.5]), np.eye(2))
    network = Network.from_coefficients([layer, layer], 0.1)
    assert network.depth == 2
    assert network.read.tolist() == [[1.0, 0.0]] * 2


def test_text_that_is_no_character_is_refused():
    """A damaged file of text: NumPy itself cannot show it."""
    damaged = np.frombuffer(b"\xff\xff\xff\x7f", dtype="<U1").reshape(())
    with pytest.raises(ValueError, match="must be real numbers in an array of equal rows, not text"):
        Network.repeated(damaged, 0.1, 2)
