"""A mixer of one's own goes where a name goes: as an object, or as MODULE:CLASS."""

import pytest
import torch
from torch import nn

import jpmhc
from jpmhc import spectra
from jpmhc.mixers import get_mixer, make_mixer
from tests.own import SQUARED_RELU, Shrinking, Weighted


def test_a_class_of_ones_own_is_found_by_its_module():
    assert get_mixer("tests.own:Shrinking") is Shrinking
    assert isinstance(make_mixer("tests.own:Shrinking", 3), Shrinking)
    block = jpmhc.HyperConnection(nn.Identity(), 8, 3, "tests.own:Shrinking")
    assert isinstance(block.mixer, Shrinking)
    skips = spectra.Network.from_mixer("tests.own:Shrinking", 5, 0.1, 3).skips
    assert torch.allclose(skips.sum(-1), torch.ones(5, 3, dtype=torch.float64))
    assert torch.equal(spectra.Network.from_mixer(Shrinking, 5, 0.1, 3).skips, skips)
    with pytest.raises(ValueError, match="drawn by a mixer's class: give Shrinking, not an object of it"):
        spectra.Network.from_mixer(Shrinking(3), 5, 0.1, 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no_such_module:Mine",
            "there is no module 'no_such_module', neither in this folder nor installed: 'no_such_module:Mine' must be",
        ),
        ("tests.no_such:Mine", r"there is no module 'tests\.no_such'"),
        (":Mine", "there is no module ''"),
        ("tests.own:Mine", "the module tests.own has no 'Mine'"),
        ("tests.own:SQUARED_RELU", "tests.own:SQUARED_RELU is not a class derived from jpmhc.mixers.Mixer"),
        ("shrinking", "no mixer is called 'shrinking'; choose one of identity"),
        (3, "no mixer is called 3"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        get_mixer(name)


class Misshapen(Shrinking):
    """A mixer whose `start` or `forward` does not keep to the number of logits or streams."""

    def __init__(self, streams, begun=1, size=3, double=False):
        super().__init__(streams)
        self.begun, self.size, self.wide = begun, size, double

    def start(self):
        return torch.zeros(self.begun)

    def forward(self, logits):
        matrices = super().forward(logits)[..., : self.size, : self.size]
        return matrices.double() if self.wide else matrices


@pytest.mark.parametrize(
    ("mixer", "sentence"),
    [
        (Misshapen(4, begun=3), r"Misshapen.start must return 1 logits, got the shape \[3\]"),
        (Misshapen(4, size=2), r"Misshapen must turn logits \[2, 1\] into matrices \[2, 4, 4\], got \[2, 2, 2\]"),
        (Misshapen(4, size=4, double=True), "matrices of its logits' type torch.float32, got torch.float64"),
        (Shrinking(3), "the mixer is for 3 streams, the connection has 4"),
        (Shrinking, r"or a Mixer, got .*Shrinking.*: give an object, Shrinking\(…\)"),
    ],
)
def test_a_mixer_that_does_not_fit_is_refused_by_the_connection(mixer, sentence):
    with pytest.raises(ValueError, match=sentence):
        jpmhc.HyperConnection(nn.Identity(), 8, 4, mixer)


def test_random_matrices_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"Misshapen must draw matrices \[5, 4, 4\] for 4 streams, got \[5, 3, 3\]"):
        spectra.Network.from_mixer(Misshapen, 5, 0.1, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mixer_with_weights_of_its_own_is_taken_in_their_precision(dtype):
    mixer = Weighted(4).to(dtype)
    with torch.device("meta"):  # as in a model that is being loaded
        assert jpmhc.HyperConnection(nn.Identity(), 8, 4, mixer).mixer is mixer


def test_an_activation_of_ones_own_goes_where_a_name_goes():
    skips = torch.eye(2, dtype=torch.float64)[None]
    by_object, by_name = (
        spectra.Network.from_activation(skips, activation, 1.0, 1.0)
        for activation in (SQUARED_RELU, "tests.own:SQUARED_RELU")
    )
    assert torch.equal(by_object.variance, by_name.variance)
    assert float(SQUARED_RELU.psi(1.0)) == pytest.approx(2.0)  # 4 · E Z² over the positive half
    for activation in ("tests.own:Shrinking", torch.relu):
        with pytest.raises(ValueError, match=r"must be a spectra\.Activation\(name, function, derivative\), got"):
            spectra.Network.from_activation(skips, activation, 1.0, 1.0)


def test_an_activation_with_a_wrong_derivative_is_refused():
    wrong = spectra.Activation("squared relu", SQUARED_RELU.function, torch.relu, kinks=(0.0,))
    with pytest.raises(ValueError, match=r"derivative of the activation 'squared relu' is 3 at 3, .* the slope 6"):
        jpmhc.recommend(4, activation=wrong, mixers=["cayley"])
