"""Sampled networks: their laws, their independence of batches, and real nonlinear ones against signal propagation."""

import pytest
import torch

from jpmhc.spectra import Network, cauchy, simulate, simulate_nonlinear

X = torch.tensor([0.3, 0.8, 1.2, 2.0], dtype=torch.float64)


def green(squares, z):
    return (1 / (z[:, None, None] - squares)).mean((-2, -1))


def test_shape_order_and_seed():
    network = Network.from_mixer("bistochastic", 3, 0.1)
    squares = simulate(network, 10, 5, seed=1)
    assert squares.shape == (5, 40)
    assert (squares.diff(dim=-1) >= 0).all()
    assert torch.equal(squares, simulate(network, 10, 5, seed=1))
    assert not torch.equal(squares, simulate(network, 10, 5, seed=2))


@pytest.mark.parametrize("structure", ["isotropic", "block", "general"])
def test_batches_do_not_change_the_samples(structure):
    vectors = {"read": torch.ones(4), "write": torch.ones(4)} if structure == "block" else {}
    network = Network.from_mixer("bistochastic", 3, 0.1, **vectors)
    if structure == "general":
        network = Network(network.skips, 0.1, covariance=torch.randn(3, 2, 4, 4))
    told = []
    whole = simulate(network, 8, 7)
    parts = simulate(network, 8, 7, batch=3, progress=told.append)
    assert told == [3, 3, 1]
    assert (whole - parts).abs().max() < 1e-10


def test_exhausted_memory_halves_the_batch(monkeypatch):
    import importlib

    module = importlib.import_module("jpmhc.spectra.simulate")
    network = Network.from_mixer("bistochastic", 2, 0.1)
    whole = simulate(network, 8, 7)
    original, sizes = module._linear_jacobian, []

    def greedy(network, width, generators, skips):
        sizes.append(len(generators))
        if len(generators) > 2:
            raise torch.OutOfMemoryError("too large")
        return original(network, width, generators, skips)

    monkeypatch.setattr(module, "_linear_jacobian", greedy)
    assert (simulate(network, 8, 7, batch=7) - whole).abs().max() < 1e-10
    assert sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]

    def broken(network, width, generators, skips):
        raise RuntimeError("something else")

    monkeypatch.setattr(module, "_linear_jacobian", broken)
    with pytest.raises(RuntimeError, match="something else"):
        simulate(network, 8, 7)


def test_one_layer_is_the_matrix_it_should_be():
    network = Network.from_mixer("gaussian", 2, 0.0, seed=3)
    product = network.skips[1] @ network.skips[0]
    expected = (torch.linalg.svdvals(product) ** 2).flip(-1).repeat_interleave(5)
    assert (simulate(network, 5, 1)[0] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("vectors", [{}, {"read": torch.full((3,), 0.5), "write": torch.ones(3)}])
def test_a_linear_activation_is_the_linear_model(vectors):
    network = Network.from_mixer("orthogonal", 3, 0.2**2, streams=3, **vectors)
    z = X + 0.1j
    linear = green(simulate(network, 80, 10), z)
    nonlinear = green(simulate_nonlinear(network, "linear", 0.2, 80, 10), z)
    assert (linear - nonlinear).abs().max() < 0.02 * linear.abs().max()


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_real_networks_have_the_noise_that_signal_propagation_predicts(activation):
    skips = Network.from_mixer("orthogonal", 4, 0.0, streams=2).skips
    network = Network.from_activation(skips, activation, 0.8, 1.0)
    z = X + 0.1j
    squares = simulate_nonlinear(network, activation, 0.8, 150, 12)
    assert abs(float(squares.mean()) / float(network.gains().prod()) - 1) < 0.04
    # The slopes differ from neuron to neuron, which a noise of one variance does not know: G is close, not equal.
    theory = cauchy(network, z).G
    apart = (green(squares, z) - theory).abs().max()
    naive = (green(squares, z) - cauchy(Network(skips, 0.64), z).G).abs().max()
    assert apart < 0.12 * theory.abs().max()
    assert apart < naive / 2
