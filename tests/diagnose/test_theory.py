"""The theory beside the measurement: networks that fulfil its assumptions, and networks that do not."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc import spectra
from jpmhc.diagnose.methods import spectrum_of
from jpmhc.diagnose.theory import compose_layers, kolmogorov_distance, make_network, predict_spectrum, rotate_sublayers
from tests.diagnose.models import Residual


def make_layers(depth, n=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    skips = [torch.linalg.qr(normal(n, n))[0] for _ in range(depth)]
    return [(normal(n).abs() / n, 1 + 0.2 * normal(n), skip) for skip in skips], normal


def test_gaussian_sublayers_are_as_the_theory_predicts():
    layers, normal = make_layers(5)
    matrices = [0.6 * normal(160, 160) / 160**0.5 for _ in layers]
    gains = torch.tensor([float(m.square().sum() / 160) for m in matrices], dtype=torch.float64)
    measured = spectrum_of(compose_layers(layers, matrices))
    predicted, note = predict_spectrum(make_network(layers, gains))
    assert note == ""
    w1, ks = predicted.wasserstein(measured.squares()), kolmogorov_distance(measured, predicted)
    assert w1 < 0.02
    assert ks < 0.01
    rotated, _ = rotate_sublayers(layers, matrices, seed=1)
    assert measured.quantile(0.99) / rotated.quantile(0.99) == pytest.approx(1, abs=0.05)


def test_orthogonal_sublayers_need_their_singular_values():
    """One plain layer 1 + 0.9 O: singular values √(1.81 + 1.8 cos φ), far from what Gaussian sublayers would give."""
    one = torch.ones(1, dtype=torch.float64)
    layers = [(one, one, one[:, None])]
    generator = torch.Generator().manual_seed(0)
    matrices = [0.9 * torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64, generator=generator))[0]]
    gains = torch.full((1,), 0.81, dtype=torch.float64)
    measured = spectrum_of(compose_layers(layers, matrices))
    law, _ = predict_spectrum(make_network(layers, gains, matrices))
    gaussian, _ = predict_spectrum(make_network(layers, gains))
    assert kolmogorov_distance(measured, law) < 0.02
    assert kolmogorov_distance(measured, gaussian) > 0.1


def test_a_sublayer_that_is_zero_has_no_law_of_its_own():
    layers, _ = make_layers(2)
    matrices = [torch.zeros(8, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)]
    network = make_network(layers, torch.tensor([0.0, 1.0], dtype=torch.float64), matrices)
    assert network.variance.tolist() == [0, 1]


def test_one_sublayer_in_every_layer_is_found_to_be_aligned():
    layers, normal = make_layers(1)
    one = torch.ones(1, dtype=torch.float64)
    layers = [(one, one, one[:, None])] * 6
    matrices = [0.4 * normal(120, 120) / 120**0.5] * 6
    measured, (rotated, _) = spectrum_of(compose_layers(layers, matrices)), rotate_sublayers(layers, matrices, seed=1)
    assert measured.quantile(0.99) / rotated.quantile(0.99) > 1.5
    predicted, _ = predict_spectrum(make_network(layers, torch.full((6,), 0.16, dtype=torch.float64)))
    assert kolmogorov_distance(measured, predicted) > 0.05


def test_equal_singular_values_are_no_distance():
    """Skips alone: three of four values are 0.7^4, one is 1, and the smoothed theory has them all."""
    n = 4
    skip = 0.7 * torch.eye(n, dtype=torch.float64) + 0.3 / n
    ones = torch.ones(n, dtype=torch.float64)
    layers = [(ones / n, ones, skip)] * 4
    predicted, _ = predict_spectrum(make_network(layers, torch.full((4,), 1e-10, dtype=torch.float64)))
    measured = spectrum_of(compose_layers(layers, [torch.zeros(20, 20, dtype=torch.float64)] * 4))
    w1, ks = predicted.wasserstein(measured.squares()), kolmogorov_distance(measured, predicted)
    assert ks < 0.01
    assert w1 < 0.01
    assert spectra.distances(predicted, measured.squares()).kolmogorov > 0.2


def test_layers_that_map_everything_to_zero_have_an_atom_there():
    zero = torch.zeros(1, dtype=torch.float64)
    predicted, note = predict_spectrum(make_network([(zero, zero, zero[:, None])], torch.zeros(1)))
    assert predicted is not None
    assert abs(predicted.below - 1) < 1e-12
    assert (predicted.mass, note) == (0.0, "")


@pytest.mark.parametrize("mixer", ["cayley", "sinkhorn"])
def test_a_fresh_network_of_some_width_is_as_predicted(mixer):
    torch.manual_seed(0)
    dim = 64
    blocks = []
    for index in range(3):
        mlp = nn.Sequential(
            nn.RMSNorm(dim), nn.Linear(dim, 256, bias=False), nn.GELU(), nn.Linear(256, dim, bias=False)
        )
        nn.init.normal_(mlp[1].weight, std=dim**-0.5)
        nn.init.normal_(mlp[3].weight, std=256**-0.5)
        block = jpmhc.HyperConnection(mlp, dim, 4, mixer, index=index)
        with torch.no_grad():
            block.map.bias.add_(0.5 * torch.randn_like(block.map.bias))
        blocks.append(block)
    stack = jpmhc.HyperConnectionStack(blocks)
    found = jpmhc.diagnose(stack, jpmhc.expand_streams(torch.randn(1, dim), 4), say=None)
    (item,) = found.comparisons
    assert item.measured.method == "dense"
    assert item.kolmogorov < 0.03
    assert item.wasserstein < 0.1
    assert item.aligned == pytest.approx(1, abs=0.25)
    assert item.own.kolmogorov < 0.05
    assert float(item.blocks.mean() * 4) == pytest.approx(item.measured.mean_square(), rel=1e-5)


def test_the_same_network_with_and_without_streams_has_the_same_theory():
    """Sublayers with a part along the identity, as training gives them: plain, and between identity skips."""
    torch.manual_seed(0)
    sublayers = [nn.Linear(24, 24, bias=False) for _ in range(4)]
    with torch.no_grad():
        for layer in sublayers:
            layer.weight.mul_(0.5).sub_(0.3 * torch.eye(24))

    connections = [jpmhc.HyperConnection(layer, 24, 4, "identity", index=k) for k, layer in enumerate(sublayers)]
    x = torch.randn(1, 1, 24)
    plain = jpmhc.diagnose(nn.Sequential(*map(Residual, sublayers)), x, say=None).comparisons[0]
    stack = jpmhc.HyperConnectionStack(connections, expand=True, reduce=True)
    streams = jpmhc.diagnose(stack, x, say=None).comparisons[0]
    for level in (0.1, 0.5, 0.9, 0.99):
        assert streams.own.measured.quantile(level) == pytest.approx(plain.measured.quantile(level), rel=1e-4)
        assert streams.own.predicted.quantile(level) == pytest.approx(plain.predicted.quantile(level), rel=1e-3)
    assert streams.own.kolmogorov == pytest.approx(plain.kolmogorov, abs=1e-3)
    assert plain.kolmogorov < 0.1
