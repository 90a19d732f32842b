"""Signal propagation, without norms and with them, against wide random networks that are really run."""

import numpy as np
import pytest
import torch

from jpmhc.spectra import MLP, Network, cauchy, density, distances, simulate_nonlinear
from jpmhc.spectra.activations import get_activation
from jpmhc.spectra.propagation import propagate
from tests.spectra.problems import normal

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
        ({"skips": torch.ones(2, 3, 4)}, "square matrices"),
        ({"skips": torch.ones(2, 3, 3), "depth": 3}, "contradicts"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": [1.0, 2.0, 3.0]}, "one per layer"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": -1.0}, "must not be negative"),
        ({"skips": torch.ones(2, 3, 3), "input_variance": -1.0}, "must not be negative"),
        ({"skips": torch.ones(2, 3, 3), "input_variance": torch.ones(2, 2)}, "second moments"),
        ({"skips": torch.ones(2, 3, 3), "form": "exact"}, "choose one of mean_field"),
        ({"skips": torch.ones(2, 3, 3), "read": torch.ones(3)}, "both read and write"),
        ({"skips": torch.ones(2, 3, 3), "form": "paper", "bias_scale": 1.0}, "no bias"),
        ({"skips": torch.eye(3), "depth": 2.5}, "depth must be a whole number, at least 1, got 2.5"),
        ({"skips": torch.ones(2, 3, 3), "weight_scale": "big"}, "weight_scale must be real numbers"),
        ({"skips": torch.ones(2, 3, 3), "read": torch.ones(4), "write": torch.ones(4)}, r"read must be \[L, n\]"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        propagate("tanh", **{"weight_scale": 1.0, **arguments})


def run_normed_network(skips, read, write, mlp, width, seed, *, post):
    """Squared singular values of the Jacobian of a network with norms, by autograd at one input."""
    depth, n, _ = skips.shape
    hidden, phi = round(mlp.ratio * width), get_activation(mlp.activation).function
    first = normal(depth, hidden, width, seed=seed) * (mlp.scales[0] / width) ** 0.5
    gate = normal(depth, hidden, width, seed=seed + 1) * (mlp.scales[0] / width) ** 0.5
    last = normal(depth, width, hidden, seed=seed + 2) * (mlp.scales[1] / hidden) ** 0.5

    def norm(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    def forward(flat):
        x = flat.view(n, width)
        for layer in range(depth):
            u = read[layer] @ x
            inner = first[layer] @ (u if post else norm(u))
            h = phi(inner) * (gate[layer] @ (u if post else norm(u))) if mlp.gated else phi(inner)
            x = skips[layer] @ x + torch.outer(write[layer], last[layer] @ h)
            x = norm(x) if post else x
        return x.flatten()

    start = norm(normal(1, width, seed=seed + 3)).expand(n, -1).flatten()
    jacobian = torch.func.jacrev(forward)(start)
    return torch.linalg.svdvals(jacobian).square()


CASES = {
    "gelu, orthogonal": (MLP(), "orthogonal", False),
    "tanh, bistochastic": (MLP("tanh", ratio=1.0), "bistochastic", False),
    "swiglu, orthogonal": (MLP("silu", ratio=2.0, gated=True), "orthogonal", False),
    "post-norm": (MLP(scales=(1.0, 0.3)), "orthogonal", True),
}


@pytest.mark.parametrize("name", CASES)
def test_networks_that_are_run_have_the_predicted_spectrum(name):
    mlp, mixer, post = CASES[name]
    depth, n, width = 6, 3, 96
    skips = Network.from_mixer(mixer, depth, 0.0, n, seed=3).skips
    if mixer == "bistochastic":
        skips = 0.8 * torch.eye(n, dtype=torch.float64) + 0.2 * skips
    read, write = normal(depth, n, seed=4).softmax(-1), 2 * (0.5 * normal(depth, n, seed=5)).sigmoid()
    make = Network.postnorm if post else Network.prenorm
    predicted = density(make(skips, read, write, mlp), relative_eta=3e-3)
    squares = torch.cat([run_normed_network(skips, read, write, mlp, width, 10 * k, post=post) for k in range(4)])
    apart = distances(predicted, squares)
    # a Gaussian of the same gains misses tanh by more than this
    assert apart.kolmogorov < 0.03
    assert apart.wasserstein / float(squares.sqrt().mean()) < 0.06


def test_the_plain_network_spends_its_noise_logarithmically():
    ones = torch.ones(1)
    network = Network.prenorm(torch.eye(1), ones, ones, MLP("relu"), depth=48)
    # rho^2 = v + (l - 1) kappa with kappa = 1/2, and sigma^2 = (1/2) / rho^2
    layer = torch.arange(48, dtype=torch.float64)
    assert torch.allclose(network.variance, 0.5 / (1 + 0.5 * layer))
    assert abs(float(Network.prenorm(torch.eye(1), ones, ones, depth=48).variance.sum()) - 3.5) < 0.05


def test_post_norm_shrinks_the_plain_network():
    ones = torch.ones(1)
    network = Network.postnorm(torch.eye(1), ones, ones, MLP("relu", scales=(1.0, 0.1)), depth=40)
    assert torch.allclose(network.skips.flatten(), torch.full((40,), 1.05**-0.5, dtype=torch.float64))


def test_a_sublayer_is_an_mlp():
    with pytest.raises(ValueError, match="the sublayer must be"):
        Network.prenorm(torch.eye(2), torch.ones(2), torch.ones(2), "gelu", depth=2)


def test_a_read_without_signal_is_refused():
    with pytest.raises(ValueError, match="a norm divides by zero"):
        Network.prenorm(torch.eye(2), torch.tensor([1.0, -1.0]), torch.ones(2), depth=2)


@pytest.mark.parametrize(("activation", "scale"), [("tanh", 1.28), ("relu", 2**0.5)])
def test_slopes_averaged_over_paths_replace_their_mean_square(activation, scale):
    # one layer with much noise, where the mean square of the slopes is far off
    skips = Network.from_mixer("orthogonal", 1, 0.0, streams=2).skips
    z = torch.tensor([0.1, 0.3, 0.6, 1.0, 1.6, 2.5], dtype=torch.float64) + 0.1j
    exact = Network.from_activation(skips, activation, scale, 1.0, paths=1024)
    mean = Network.from_activation(skips, activation, scale, 1.0, paths=1)
    squares = simulate_nonlinear(exact, activation, scale, 200, 16)
    truth = (1 / (z[:, None, None] - squares)).mean((-2, -1))

    def error(network):
        return float(((cauchy(network, z).G - truth).abs() / truth.abs()).max())

    assert error(exact) < 0.05
    assert error(mean) > 0.2


def test_slopes_of_the_block_agree_with_networks_that_are_run():
    skips = Network.from_mixer("orthogonal", 3, 0.0, streams=2, seed=2).skips
    read, write = normal(3, 2, seed=1), normal(3, 2, seed=2)
    z = torch.tensor([0.2, 0.8, 2.0], dtype=torch.float64) + 0.2j
    network = Network.from_activation(skips, "relu", 1.0, 1.0, read=read, write=write)
    squares = simulate_nonlinear(network, "relu", 1.0, 200, 10)
    truth = (1 / (z[:, None, None] - squares)).mean((-2, -1))
    assert ((cauchy(network, z).G - truth).abs() / truth.abs()).max() < 0.03
    linear = Network.from_activation(skips, "linear", 1.0, 1.0, read=read, write=write)
    assert linear.slopes is None
