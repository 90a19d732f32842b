"""Signal propagation against wide random networks that are really run."""

import math

import numpy as np
import pytest
import torch

from jpmhc.spectra.propagation import propagate

FUNCTIONS = {
    "tanh": (np.tanh, lambda h: 1 - np.tanh(h) ** 2),
    "relu": (lambda h: np.maximum(h, 0), lambda h: (h > 0).astype(float)),
}


def bistochastic(n, seed):
    matrix = np.exp(np.random.default_rng(seed).normal(size=(n, n)))
    for _ in range(500):
        matrix /= matrix.sum(1, keepdims=True)
        matrix /= matrix.sum(0, keepdims=True)
    return matrix


def run_network(name, skips, weight, second, width, seed, read=None, write=None, bias=0.0):
    """q, v and mean square slope measured in one sampled network of `width` features per stream."""
    function, derivative = FUNCTIONS[name]
    rng = np.random.default_rng(seed)
    n = skips.shape[-1]
    values, vectors = np.linalg.eigh(second)
    x = (vectors * np.sqrt(np.maximum(values, 0))) @ rng.normal(size=(n, width))
    q, v, e = [], [np.mean(x**2)], []
    for layer, skip in enumerate(skips):
        inner = x.reshape(-1) if read is None else read[layer] @ x
        # W x with fresh Gaussian weights is exactly this given x; so the network may be very wide.
        h = rng.normal(size=inner.size) * np.linalg.norm(inner) * weight / np.sqrt(inner.size)
        h += bias * rng.normal(size=h.shape)
        out = function(h).reshape(n, width) if write is None else np.outer(write[layer], function(h))
        x = skip @ x + out
        q.append(np.mean(h**2))
        e.append(np.mean(derivative(h) ** 2))
        v.append(np.mean(x**2))
    return np.array(q), np.array(v), np.array(e)


@pytest.mark.parametrize("name", ["tanh", "relu"])
@pytest.mark.parametrize("copied", [False, True])
def test_mean_field_is_what_a_network_does(name, copied):
    n, depth, weight = 3, 5, 0.9
    skips = np.stack([bistochastic(n, seed) for seed in range(depth)])
    second = 1.3 * (np.ones((n, n)) if copied else np.eye(n))
    q, v, e = run_network(name, skips, weight, second, 200_000, 0, bias=0.2)
    theory = propagate(name, torch.tensor(skips), weight, torch.tensor(second), bias_scale=0.2)
    np.testing.assert_allclose(theory.q, q, rtol=0.01)
    np.testing.assert_allclose(theory.v, v, rtol=0.01)
    np.testing.assert_allclose(theory.e, e, rtol=0.01)
    np.testing.assert_allclose(theory.variance, weight**2 * theory.e, rtol=1e-14)


def test_hyper_connection_block_is_what_a_network_does():
    n, depth, weight = 3, 5, 0.9
    skips = np.stack([bistochastic(n, seed) for seed in range(depth)])
    rng = np.random.default_rng(9)
    read, write = rng.uniform(0.2, 0.8, (depth, n)), rng.uniform(0.5, 1.5, (depth, n))
    q, v, _ = run_network("relu", skips, weight, np.eye(n), 1_000_000, 0, read=read, write=write)
    theory = propagate("relu", torch.tensor(skips), weight, 1.0, read=torch.tensor(read), write=torch.tensor(write))
    np.testing.assert_allclose(theory.q, q, rtol=0.01)
    np.testing.assert_allclose(theory.v, v, rtol=0.01)


def test_the_short_forms_differ_from_the_network_where_they_should():
    """A bistochastic skip and ReLU leave the isotropic recursion; the paper's adds a slope to a variance."""
    n, depth = 3, 4
    skip = torch.tensor(bistochastic(n, 0))
    q, v, _ = run_network("relu", np.stack([skip] * depth), 0.9, np.eye(n), 200_000, 0)
    exact = propagate("relu", skip, 0.9, 1.0, depth=depth)
    isotropic = propagate("relu", skip, 0.9, 1.0, depth=depth, form="isotropic")
    paper = propagate("relu", skip, 0.9, 1.0, depth=depth, form="paper")
    np.testing.assert_allclose(exact.v, v, rtol=0.01)
    assert abs(float(isotropic.v[-1]) / v[-1] - 1) > 0.1
    assert abs(float(paper.q[0]) / q[0] - 1) > 0.3


def test_forms_agree_for_orthogonal_skips_and_an_odd_activation():
    skip = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    full = propagate("tanh", skip, 0.7, 0.8, depth=6)
    short = propagate("tanh", skip, 0.7, 0.8, depth=6, form="isotropic")
    np.testing.assert_allclose(full.v, short.v, rtol=1e-12)


def test_paper_form_by_hand():
    """One stream, linear: κ(q) = q and ψ = 1, so that two layers can be written out."""
    result = propagate("linear", torch.tensor([[0.5]]), [2.0, 3.0], 1.5, depth=2, form="paper")
    q1 = 4 * (1.5 + 1)
    v1 = q1 + 0.25 * 1.5
    q2 = 9 * (v1 + 1)
    np.testing.assert_allclose(result.q, [q1, q2])
    np.testing.assert_allclose(result.v, [1.5, v1, q2 + 0.25 * v1])
    np.testing.assert_allclose(result.variance, [4, 9])


def test_paper_form_divides_by_the_features_of_one_stream():
    """‖A ⊗ I_p‖² / p is the squared norm of A: four for a rotation of four streams, whose gain is one."""
    skip = torch.eye(4)[[1, 0, 3, 2]]
    printed = propagate("linear", skip, 1.0, 2.0, depth=1, form="paper")
    np.testing.assert_allclose(printed.v[1], (2 + 1) + 4 * 2)
    np.testing.assert_allclose(propagate("linear", skip, 1.0, 2.0, depth=1, form="isotropic").v[1], 2 + 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skips": torch.eye(3)}, "needs a depth"),
        ({"skips": torch.eye(3), "depth": 0}, "depth must be a whole number, at least 1"),
        ({"skips": torch.ones(2, 3, 4)}, "square matrices"),
        ({"skips": torch.ones(2, 3, 3), "depth": 3}, "contradicts"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": [1.0, 2.0, 3.0]}, "one per layer"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": -1.0}, "must not be negative"),
        ({"skips": torch.ones(2, 3, 3), "input_variance": -1.0}, "must not be negative"),
        ({"skips": torch.ones(2, 3, 3), "input_variance": torch.ones(2, 2)}, "second moments"),
        ({"skips": torch.ones(2, 3, 3), "form": "exact"}, "choose one of mean_field"),
        ({"skips": torch.ones(2, 3, 3), "read": torch.ones(3)}, "both read and write"),
        ({"skips": torch.ones(2, 3, 3), "form": "paper", "bias_scale": 1.0}, "no bias"),
        ({"skips": torch.ones(2, 3, 3), "bias_scale": math.nan}, "bias_scale must be finite and not negative"),
        ({"skips": torch.full((2, 3, 3), math.nan)}, "skips must be finite"),
        ({"skips": torch.ones(2, 3, 3) * 1j}, "skips must be real"),
        ({"skips": torch.eye(3), "depth": 2.5}, "depth must be a whole number, at least 1, got 2.5"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": "big"}, "weight_scale must be real numbers"),
        ({"skips": torch.ones(2, 3, 3), "read": torch.ones(4), "write": torch.ones(4)}, r"read must be \[L, n\]"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        propagate("tanh", **{"weight_scale": 1.0, **arguments})
