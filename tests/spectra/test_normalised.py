"""Networks with norms that are really run, beside what the theory says of them; and unequal slopes."""

import pytest
import torch

from jpmhc.spectra import MLP, Network, cauchy, density, distances, simulate_nonlinear
from jpmhc.spectra.activations import get_activation


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run_network(skips, read, write, mlp, width, seed, *, post):
    """Squared singular values of the Jacobian of a network with norms, by autograd at one input."""
    depth, n, _ = skips.shape
    hidden, phi = round(mlp.ratio * width), get_activation(mlp.activation).function
    first = random(depth, hidden, width, seed=seed) * (mlp.scales[0] / width) ** 0.5
    gate = random(depth, hidden, width, seed=seed + 1) * (mlp.scales[0] / width) ** 0.5
    last = random(depth, width, hidden, seed=seed + 2) * (mlp.scales[1] / hidden) ** 0.5

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

    start = norm(random(1, width, seed=seed + 3)).expand(n, -1).flatten()
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
    read, write = random(depth, n, seed=4).softmax(-1), 2 * (0.5 * random(depth, n, seed=5)).sigmoid()
    make = Network.postnorm if post else Network.prenorm
    predicted = density(make(skips, read, write, mlp), relative_eta=3e-3)
    squares = torch.cat([run_network(skips, read, write, mlp, width, 10 * k, post=post) for k in range(4)])
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
    read, write = random(3, 2, seed=1), random(3, 2, seed=2)
    z = torch.tensor([0.2, 0.8, 2.0], dtype=torch.float64) + 0.2j
    network = Network.from_activation(skips, "relu", 1.0, 1.0, read=read, write=write)
    squares = simulate_nonlinear(network, "relu", 1.0, 200, 10)
    truth = (1 / (z[:, None, None] - squares)).mean((-2, -1))
    assert ((cauchy(network, z).G - truth).abs() / truth.abs()).max() < 0.03
    linear = Network.from_activation(skips, "linear", 1.0, 1.0, read=read, write=write)
    assert linear.slopes is None
