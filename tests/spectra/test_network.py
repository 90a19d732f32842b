"""What a network may be, how it is made, and what it says of itself."""

import math

import pytest
import torch

from jpmhc import HyperConnection
from jpmhc.spectra import Network
from tests.spectra.problems import identity_moments, normal

EYE = torch.eye(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"skips": normal(2, 3, 4)}, "square"),
        ({"skips": normal(3, 3)}, "square"),
        ({"skips": [[[1.0, 0.0], [0.0]]]}, "equal rows"),
        ({"skips": torch.zeros(0, 3, 3)}, "at least one layer"),
        ({"skips": torch.full((1, 2, 2), math.nan)}, "NaN"),
        ({"skips": normal(1, 2, 2) * 1j}, "real"),
        ({"variance": -0.1}, "negative"),
        ({"variance": [0.1, 0.2]}, "one number or one per layer"),
        ({"variance": math.inf}, "NaN or infinity"),
        ({"read": normal(1, 3)}, "both"),
        ({"read": normal(1, 3), "write": normal(1, 2)}, "write must be"),
        ({"read": normal(1, 3), "write": normal(1, 3), "covariance": normal(1, 1, 3, 3)}, "either"),
        ({"covariance": normal(1, 3, 3)}, "covariance must be"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Network(**{"skips": EYE.unsqueeze(0), "variance": 0.1, **arguments})


@pytest.mark.parametrize("mixer", ["identity", "bistochastic", "orthogonal", "gaussian", "grassmann", "permutation"])
def test_random_skips_are_what_they_are_called(mixer):
    network = Network.from_mixer(mixer, 6, 0.05, streams=4, seed=1)
    again = Network.from_mixer(mixer, 6, 0.05, streams=4, seed=1)
    a = network.skips
    assert torch.equal(a, again.skips)
    eye = torch.eye(4, dtype=torch.float64)
    if mixer in ("bistochastic", "permutation"):
        assert (a.sum(-1) - 1).abs().max() < 1e-12
        assert (a.sum(-2) - 1).abs().max() < 1e-12
        assert (a >= 0).all()
    elif mixer == "orthogonal":
        assert (a @ a.mT - eye).abs().max() < 1e-12
    elif mixer == "grassmann":
        assert (a @ a - a).abs().max() < 1e-12
        assert (a.diagonal(dim1=-2, dim2=-1).sum(-1) - 2).abs().max() < 1e-12
    elif mixer == "identity":
        assert torch.equal(a, eye.expand(6, 4, 4))
    else:
        many = Network.from_mixer("gaussian", 4000, 0.0, streams=4).skips
        assert abs(float(many.square().mean()) * 4 - 1) < 0.02
    assert network.identical == (mixer == "identity")
    assert Network.from_mixer(mixer, 6, 0.05, seed=1, shared=True).identical


def test_mixer_names_are_those_of_the_connections():
    for name, skip in (("sinkhorn", "bistochastic"), ("cayley", "orthogonal"), ("unconstrained", "gaussian")):
        assert torch.equal(Network.from_mixer(name, 2, 0.1).skips, Network.from_mixer(skip, 2, 0.1).skips)


def test_coefficients_of_a_stack_become_a_block_network():
    blocks = [
        HyperConnection(torch.nn.Identity(), 8, 3, mixer, index=k) for k, mixer in enumerate(("cayley", "sinkhorn"))
    ]
    x = normal(5, 3, 8).float()
    layers = [type(c)(*(part[2] for part in c)) for c in (block.coefficients(x) for block in blocks)]
    network = Network.from_coefficients(layers, 0.2)
    assert not network.isotropic
    for number, layer in enumerate(layers):
        assert torch.allclose(network.skips[number], layer.skip.double())
        assert torch.allclose(network.read[number], layer.read.double())
        assert torch.allclose(network.write[number], layer.write.double())


def test_activation_sets_the_noise():
    # tanh is linear for small signals, so that the noise is the weights' variance
    network = Network.from_activation(EYE, "tanh", 0.3, input_variance=1e-8, depth=2)
    assert network.depth == 2
    assert (network.variance - 0.09).abs().max() < 1e-6
    # ReLU lets half of the slopes through, whatever the signal
    relu = Network.from_activation(EYE.expand(3, 3, 3), "relu", 0.4)
    assert (relu.variance - 0.08).abs().max() < 1e-12


@pytest.mark.parametrize("structure", ["isotropic", "block", "general"])
def test_gains_are_the_mean_square_of_a_sampled_network(structure):
    skips, n, width = normal(3, 2, 2, seed=3), 2, 400
    read, write, covariance = normal(3, 2, seed=4), normal(3, 2, seed=5), normal(3, 3, 2, 2, seed=6)
    structures = {"isotropic": {}, "block": {"read": read, "write": write}, "general": {"covariance": covariance}}
    network = Network(skips, [0.3, 0.2, 0.5], **structures[structure])
    factors = network.noise_factors()
    generator = torch.Generator().manual_seed(7)
    jacobian = torch.eye(n * width, dtype=torch.float64)
    for skip, kraus in zip(skips, factors):
        layer = torch.kron(skip, torch.eye(width, dtype=torch.float64))
        for factor in kraus:
            noise = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
            layer = layer + torch.kron(factor, noise)
        jacobian = layer @ jacobian
    sampled = float(jacobian.square().sum()) / (n * width)
    assert abs(float(network.gains().prod()) / sampled - 1) < 0.02


def test_gains_of_identity_skips_in_closed_form():
    network = Network.repeated(EYE, 0.01, 7)
    assert abs(float(network.gains().prod()) - identity_moments(7, 0.01)[0]) < 1e-12


def test_rescaling_divides_the_gain_out_and_refuses_what_no_float_holds():
    network = Network.from_mixer("gaussian", 5, 0.1, seed=2)
    scaled, gain = network.rescaled()
    assert (scaled.gains() - 1).abs().max() < 1e-12
    assert abs(gain - float(network.gains().prod())) < 1e-9
    with pytest.raises(ValueError, match="float64"):
        Network.repeated(3 * EYE, 0.1, 1000).rescaled()
