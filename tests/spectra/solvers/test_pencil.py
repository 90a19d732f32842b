"""Tied weights against simulation, and against the chain where nothing is tied."""

import pytest
import torch

from jpmhc.spectra import Network, cauchy, density, simulate

X = torch.tensor([0.05, 0.3, 1.0, 3.0], dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sampled(network, z, width, samples):
    each = (1 / (z[:, None, None] - simulate(network, width, samples))).mean(-1)
    return each.mean(-1), each.std(-1).abs() / samples**0.5


def test_six_equal_layers_to_a_per_cent():
    # J = (1 + sigma X)^6 with L sigma^2 = 0.3
    network = Network(torch.eye(1).expand(6, 1, 1), 0.05, tied=[0] * 6)
    z = X + 0.3j
    truth, _ = sampled(network, z, width=700, samples=10)
    assert ((cauchy(network, z).G - truth).abs() / truth.abs()).max() < 0.01
    # Layers with weights of their own are far from it.
    independent = cauchy(Network(network.skips, network.variance), z).G
    assert ((independent - truth).abs() / truth.abs()).max() > 0.3


@pytest.mark.parametrize("ends", ["streams", "model"])
@pytest.mark.parametrize("block", [False, True])
def test_groups_of_layers_agree_with_sampled_networks(block, ends):
    skips = Network.from_mixer("orthogonal", 4, 0.0, streams=3, seed=1).skips
    vectors = (random(4, 3, seed=2), random(4, 3, seed=3)) if block else (None, None)
    network = Network(skips, 0.15, *vectors, tied=[0, 1, 0, 1], ends=ends)
    z = X + 0.2j
    found, (truth, error) = cauchy(network, z), sampled(network, z, width=100, samples=12)
    assert found.converged.all()
    assert found.method == "pencil"
    assert ((found.G - truth).abs() < 5 * error + 0.01 * truth.abs()).all()


@pytest.mark.parametrize("ends", ["streams", "model"])
def test_without_ties_it_is_the_chain(ends):
    skips = Network.from_mixer("bistochastic", 3, 0.0).skips
    network = Network(skips, 0.2, random(3, 4, seed=4), random(3, 4, seed=5), ends=ends)
    z = X + 0.05j
    assert (cauchy(network, z, "pencil").G - cauchy(network, z, "chain").G).abs().max() < 1e-7


def test_correlations_between_zero_and_one():
    skips = torch.eye(1).expand(2, 1, 1)
    half = Network(skips, 0.3, tied=[[1.0, 0.5], [0.5, 1.0]])
    z = X + 0.2j
    truth, error = sampled(half, z, width=200, samples=12)
    assert ((cauchy(half, z).G - truth).abs() < 5 * error + 0.01 * truth.abs()).all()


def test_a_density_of_tied_layers():
    network = Network(torch.eye(1).expand(3, 1, 1), 0.1, tied=[0, 0, 0])
    found, squares = density(network), simulate(network, 300, 6)
    assert found.mass == pytest.approx(1, abs=0.01)
    assert found.first_moment == pytest.approx(float(squares.mean()), rel=0.02)
    assert found.quantile(0.9) == pytest.approx(float(squares.sqrt().flatten().quantile(0.9)), rel=0.02)


@pytest.mark.parametrize("tied", [[0], [[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.1], [0.2, 1.0]]])
def test_bad_ties_are_refused(tied):
    with pytest.raises(ValueError, match="tied must be one label per layer"):
        Network(torch.eye(1).expand(2, 1, 1), 0.1, tied=tied)


def test_the_chain_names_the_method_for_ties():
    network = Network(torch.eye(1).expand(2, 1, 1), 0.1, tied=[0, 0])
    with pytest.raises(ValueError, match="use method 'pencil'"):
        cauchy(network, X + 0.1j, "chain")
