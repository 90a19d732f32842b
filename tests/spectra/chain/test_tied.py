"""Tied weights against simulation, and against the chain where nothing is tied."""

import pytest
import torch

from jpmhc.spectra import Network, cauchy, density, simulate
from jpmhc.spectra.chain import tied
from jpmhc.spectra.sublayers import haar, two_matrix
from tests.spectra.problems import normal, sampled

X = torch.tensor([0.05, 0.3, 1.0, 3.0], dtype=torch.float64)


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
    vectors = (normal(4, 3, seed=2), normal(4, 3, seed=3)) if block else (None, None)
    network = Network(skips, 0.15, *vectors, tied=[0, 1, 0, 1], ends=ends)
    z = X + 0.2j
    found, (truth, error) = cauchy(network, z), sampled(network, z, width=100, samples=12)
    assert found.converged.all()
    assert found.method == "pencil"
    assert ((found.G - truth).abs() < 5 * error + 0.01 * truth.abs()).all()


def test_six_equal_layers_of_two_matrices_to_a_per_cent():
    # J = (1 + W2 D W1)^6 with half of the slopes zero, drawn here
    law, depth, width, hidden = two_matrix("relu", scales=(1.0, 0.1), ratio=1.5), 6, 400, 600
    ones = torch.ones(depth, 1)
    network = Network(torch.eye(1).expand(depth, 1, 1), law.variance, ones, ones, sublayers=law, tied=[0] * depth)
    squares = []
    for seed in range(8):
        first, last = normal(hidden, width, seed=2 * seed), normal(width, hidden, seed=2 * seed + 1)
        first[::2] = 0
        layer = torch.eye(width, dtype=torch.float64) + (0.1 / hidden / width) ** 0.5 * last @ first
        squares.append(torch.linalg.svdvals(torch.linalg.matrix_power(layer, depth)).square())
    z = X + 0.2j
    truth = (1 / (z[:, None] - torch.cat(squares))).mean(-1)
    assert ((cauchy(network, z).G - truth).abs() / truth.abs()).max() < 0.01
    # Gaussian matrices of the same gain are not the same, however many layers share them.
    gaussian = cauchy(Network(network.skips, network.variance, ones, ones, tied=[0] * depth), z).G
    assert ((gaussian - truth).abs() / truth.abs()).max() > 0.03


@pytest.mark.parametrize("ends", ["streams", "model"])
def test_without_ties_it_is_the_chain(ends):
    skips = Network.from_mixer("bistochastic", 3, 0.0).skips
    network = Network(skips, 0.2, normal(3, 4, seed=4), normal(3, 4, seed=5), ends=ends)
    z = X + 0.05j
    assert (tied.solve_row(network, z, tied.DEFAULTS, None).G - cauchy(network, z).G).abs().max() < 1e-7


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


def test_tied_layers_have_no_matrix_valued_transform():
    network = Network(torch.eye(1).expand(2, 1, 1), 0.1, tied=[0, 0])
    with pytest.raises(ValueError, match="weights of their own"):
        cauchy(network, X + 0.1j, matrix=True)


def test_two_matrices_without_ties_are_the_chains_and_tied_ones_those_of_sampled_networks():
    skips = Network.from_mixer("bistochastic", 3, 0.0).skips
    read, write = normal(3, 4, seed=4), normal(3, 4, seed=5)
    law = two_matrix("gelu", ratio=2.0)
    z = X + 0.2j
    free = Network(skips, 0.2, read, write, sublayers=law)
    assert (tied.solve_row(free, z, tied.DEFAULTS, None).G - cauchy(free, z).G).abs().max() < 1e-7
    shared = Network(skips, 0.2, read, write, sublayers=law, tied=[0, 1, 0])
    found, (truth, error) = cauchy(shared, z), sampled(shared, z, width=100, samples=12)
    assert ((found.G - truth).abs() < 5 * error + 0.01 * truth.abs()).all()


def test_tied_laws_that_are_not_of_two_matrices_are_refused():
    ones = torch.ones(2, 1)
    network = Network(torch.eye(1).expand(2, 1, 1), 0.1, ones, ones, sublayers=haar(), tied=[0, 0])
    with pytest.raises(ValueError, match="layers with tied weights need the same sublayer law"):
        cauchy(network, X + 0.2j)


def test_points_near_solved_ones_start_there():
    """The same answer in a fraction of the iterations, for points between those of an earlier solution."""
    network = Network(torch.eye(2, dtype=torch.float64).expand(6, -1, -1), 0.05, tied=[0] * 6)
    x = torch.logspace(-1, 1, 40, dtype=torch.float64)
    known = cauchy(network, torch.complex(x[::2], 0.05 * x[::2]))
    between = torch.complex(x[1::2], 0.05 * x[1::2])
    cold, warm = cauchy(network, between), cauchy(network, between, near=known)
    assert cold.converged.all()
    assert warm.converged.all()
    assert (warm.G - cold.G).abs().max() < 1e-7
    assert int(warm.iterations.sum()) < 0.4 * int(cold.iterations.sum())
