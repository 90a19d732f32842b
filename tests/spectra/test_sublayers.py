"""Laws of sublayers: moments in closed form, and the chain with them against sampled networks."""

import math

import pytest
import torch

from jpmhc import paper
from jpmhc.spectra import Network, cauchy, density, distances, simulate, sublayers
from jpmhc.spectra.activations import Activation
from tests.spectra.problems import normal, sampled

Z = torch.tensor([0.05, 0.3, 0.8, 1.5, 4.0], dtype=torch.float64) + 0.2j


EXPONENTIAL = Activation("exp", torch.exp, torch.exp)
LAWS = {
    "gaussian": sublayers.gaussian(0.5),
    "haar": sublayers.haar(1.5),
    "relu": sublayers.two_matrix("relu", ratio=1.0),
    "gelu": sublayers.two_matrix("gelu"),
    "swiglu": sublayers.gated("silu", ratio=2.0),
    "measured": sublayers.measured(2 * normal(100).abs()),
}


@pytest.mark.parametrize("ends", ["streams", "model"])
@pytest.mark.parametrize("name", LAWS)
def test_the_chain_agrees_with_sampled_networks(name, ends):
    skips = Network.from_mixer("orthogonal", 3, 0.0, seed=1).skips
    read, write = normal(3, 4, seed=2).softmax(-1), 0.5 + normal(3, 4, seed=3).sigmoid()
    network = Network(skips, None, read, write, sublayers=LAWS[name], ends=ends)
    found, (truth, error) = cauchy(network, Z), sampled(network, Z, 100, 16)
    assert found.converged.all()
    assert found.method == "chain"
    assert ((found.G - truth).abs() < 5 * error + 0.02 * truth.abs()).all()


def test_singular_values_of_a_sublayer_alone_are_its_own():
    values = torch.tensor([0.3, 0.7, 1.1, 2.0], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    network = Network(torch.zeros(1, 1, 1), None, one, one, sublayers=sublayers.measured(values))
    green = cauchy(network, Z).G
    assert (green - (1 / (Z[:, None] - values.square())).mean(-1)).abs().max() < 1e-8


def test_a_wide_linear_hidden_layer_is_gaussian():
    skips, one = torch.eye(1).expand(3, 1, 1), torch.ones(1)
    wide = Network(skips, 0.3, one, one, sublayers=sublayers.two_matrix("linear", ratio=1e7))
    assert (cauchy(wide, Z).G - cauchy(Network(skips, 0.3, one, one), Z).G).abs().max() < 1e-6


def test_two_linear_matrices_are_two_layers():
    # W2 W1 at ratio 1 without a skip is the product of two layers without skips
    one = torch.ones(1)
    linear = sublayers.two_matrix("linear", ratio=1.0)
    single = Network(torch.zeros(1, 1, 1), None, one, one, sublayers=linear)
    double = Network(torch.zeros(2, 1, 1), 1.0, one, one)
    assert (cauchy(single, Z).G - cauchy(double, Z).G).abs().max() < 1e-7


def test_mean_squares_have_closed_forms():
    assert abs(LAWS["relu"].variance - 0.5) < 1e-12
    # E[phi'^2] E[h^2] + E[phi^2] of a gated linear layer with h of variance one
    assert abs(sublayers.gated("linear").variance - 2) < 1e-9
    assert abs(sublayers.two_matrix("relu", scales=(2.0, 3.0)).variance - 3) < 1e-12
    for law in LAWS.values():
        assert abs(float((law.squares * law.weights).sum()) - 1) < 1e-12


def test_nodes_keep_the_moments():
    values, weights = normal(500, seed=4).square(), normal(500, seed=5).square()
    nodes, new = sublayers.gauss_nodes(values, weights, 6)
    assert len(nodes) == 6
    for order in range(12):
        truth = float((weights * values**order).sum() / weights.sum())
        assert math.isclose(float((new * nodes**order).sum()), truth, rel_tol=1e-9)


def test_laws_with_heavy_tails_agree_with_networks_that_share_no_nodes_with_them():
    """Squared slopes of gated relu² reach thousands of times their mean; nodes in q = d² gave KS 0.27 and 0.29."""
    square = Activation("relu²", lambda x: x.relu().square(), lambda x: 2 * x.relu(), kinks=(0.0,))
    one = torch.ones(3, 1)
    for law in (sublayers.gated(square, ratio=2.0), sublayers.two_matrix(EXPONENTIAL, ratio=2.0)):
        network = Network(torch.zeros(3, 1, 1), 1.0, one, one, sublayers=law)
        assert distances(density(network), simulate(network, 150, 4)).kolmogorov < 0.07


@pytest.mark.parametrize("decades", [3, 5])
def test_measured_laws_over_many_decades_keep_their_small_values(decades):
    """One quadrature for all values gave KS 0.23 and 0.46 for a product of two such matrices."""
    values = torch.logspace(-decades, 0, 200, dtype=torch.float64)
    one = torch.ones(2, 1)
    network = Network(torch.zeros(2, 1, 1), None, one, one, sublayers=sublayers.measured(values))
    assert distances(density(network), simulate(network, 200, 3)).kolmogorov < 0.02


def test_samples_of_a_measured_law_have_its_singular_values():
    values = normal(40).abs().sort().values
    network = Network(
        torch.zeros(1, 1, 1), None, torch.ones(1, 1), torch.ones(1, 1), sublayers=sublayers.measured(values)
    )
    torch.testing.assert_close(simulate(network, 40, 1)[0].sqrt(), values)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: sublayers.measured([]), "at least one must be above zero"),
        (lambda: sublayers.measured([-1.0]), "must not be negative"),
        (lambda: sublayers.two_matrix("gelu", ratio=0.0), "ratio, hidden features over features"),
        (
            lambda: Network(torch.eye(2).expand(2, 2, 2), None, sublayers=LAWS["gelu"]),
            "sublayers need read and write vectors",
        ),
        (
            lambda: Network(torch.eye(2).expand(2, 2, 2), 1.0, torch.ones(2), torch.ones(2), sublayers=[LAWS["gelu"]]),
            "for each of the 2 layers",
        ),
    ],
)
def test_bad_laws_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_the_papers_methods_refuse_other_sublayers():
    network = Network(torch.eye(2).expand(2, 2, 2), None, torch.ones(2), torch.ones(2), sublayers=LAWS["gelu"])
    with pytest.raises(ValueError, match="not other sublayers"):
        paper.cauchy(network, Z, "twisted")
