"""The paper's methods: where they agree with the exact equation, what they say of themselves, and what they refuse."""

import pytest
import torch

from jpmhc import paper, spectra
from jpmhc.spectra import Network

Z = torch.tensor([0.3, 0.9, 1.5], dtype=torch.float64) + 0.05j


def network(streams=4, depth=3, mixer="bistochastic", shared=False, **structure):
    return Network.from_mixer(mixer, depth, 0.1, streams, shared=shared, **structure)


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        (network(1, 1), "dyson"),
        (network(4, 1), "dyson"),
        (network(1, 4, "identity"), "z1"),
        (network(1, 4, "gaussian"), "subordination"),
        (network(1, 4, "gaussian"), "stransform"),
        (network(4, 2), "twisted"),
    ],
)
def test_methods_give_the_exact_answer_where_they_are_exact(asked, method):
    found = paper.cauchy(asked, Z, method)
    assert found.method == method
    assert found.exact
    assert found.converged.all()
    assert (found.G - spectra.cauchy(asked, Z).G).abs().max() < 1e-7


@pytest.mark.parametrize("method", ["z1", "subordination", "stransform"])
def test_scalar_methods_are_exact_for_orthogonal_skips_and_say_where_they_are_not(method):
    found = paper.cauchy(network(mixer="orthogonal"), Z, method)
    assert found.exact
    assert (found.G - spectra.cauchy(network(mixer="orthogonal"), Z).G).abs().max() < 1e-6
    wrong = network(shared=True)
    with pytest.warns(UserWarning, match=rf"method '{method}'.*not multiples of orthogonal"):
        found = paper.cauchy(wrong, Z, method)
    assert not found.exact
    assert "chain" in found.note
    assert ((found.G - spectra.cauchy(wrong, Z).G).abs() > 0.01 * found.G.abs()).any()


def test_one_skip_that_is_not_orthogonal_is_no_obstacle():
    skips = network(mixer="orthogonal", depth=3).skips.clone()
    skips[1] = network(depth=1).skips[0]
    asked = Network(skips, 0.1)
    found = paper.cauchy(asked, Z, "subordination")
    assert found.exact
    assert (found.G - spectra.cauchy(asked, Z).G).abs().max() < 1e-6


def test_methods_refuse_what_they_cannot_solve():
    with pytest.raises(ValueError, match="no method is called"):
        paper.cauchy(network(), Z, "newton")
    with pytest.raises(ValueError, match="no method is called"):
        paper.transform("chain")
    with pytest.raises(ValueError, match=r"eq\. dyson-fp, G = m/z, has no density"):
        paper.transform("dyson-fp")
    with pytest.raises(ValueError, match="one layer"):
        paper.cauchy(network(), Z, "dyson")
    with pytest.raises(ValueError, match="differ"):
        paper.cauchy(network(mixer="gaussian"), Z, "z1")
    block = network(read=torch.ones(4), write=torch.ones(4))
    for method in ("z1", "subordination", "stransform"):
        with pytest.raises(ValueError, match="isotropic"):
            paper.cauchy(block, Z, method)


def test_the_matrix_power_is_said_to_be_no_law():
    asked = network(shared=True)
    with (
        pytest.warns(UserWarning, match="'z1-matrix'"),
        pytest.raises(ValueError, match="'z1-matrix' does not give the transform of a law: it has a mass of"),
    ):
        spectra.moments(asked, 2, 8.0, paper.transform("z1-matrix"))
