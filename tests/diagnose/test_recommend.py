"""Recommendations against the theorems behind them and against networks that are run."""

import math

import pytest
import torch

import jpmhc
from jpmhc import spectra
from jpmhc.diagnose.recommend import drift_skips
from tests.spectra.test_propagation import run_normed_network


@pytest.fixture(scope="module")
def deep():
    return {one.mixer: one for one in jpmhc.recommend(48).candidates}


def test_the_first_choice_is_orthogonal_with_row_sums_one(deep):
    best = jpmhc.recommend(48).best
    skips = best.network.skips
    assert torch.allclose(skips @ skips.mT, torch.eye(4, dtype=torch.float64).expand(48, -1, -1), atol=1e-9)
    assert torch.allclose(skips.sum(-1), torch.ones(48, 4, dtype=torch.float64))
    assert math.isinf(best.layers_until_collapse)
    # nothing more collapses than in the plain network, whose gradients it has
    assert best.collapsed == pytest.approx(deep["identity"].collapsed, abs=0.01)
    assert torch.allclose(best.gradient_gains, deep["identity"].gradient_gains)


def test_every_mixer_drifts_as_far_as_asked(deep):
    for one in deep.values():
        away = one.network.skips - torch.eye(4, dtype=torch.float64)
        assert one.drift == pytest.approx(float(away.square().sum((-2, -1)).mean()) ** 0.5 / 2, abs=1e-9)
        if one.mixer not in ("identity", "grassmann"):
            assert one.drift == pytest.approx(0.1, rel=0.01)


def test_collapse_is_that_of_networks_that_are_run(deep):
    depth, width = 48, 32
    read = (2.0 * torch.nn.functional.one_hot(torch.arange(depth) % 4, 4).double()).softmax(-1)
    write = torch.ones(depth, 4, dtype=torch.float64)
    for name in ("sinkhorn", "rotation"):
        squares = torch.cat(
            [
                run_normed_network(deep[name].network.skips, read, write, spectra.MLP(), width, 7 * k, post=False)
                for k in range(3)
            ]
        )
        assert deep[name].collapsed == pytest.approx(float((squares < 0.01).double().mean()), abs=0.03)


def test_layers_until_collapse_of_bistochastic_skips(deep):
    one = deep["sinkhorn"]
    rate = float(torch.linalg.slogdet(one.network.skips).logabsdet.mean()) / 3
    assert one.layers_until_collapse == pytest.approx(math.log(0.1) / rate)
    # deeper than that, all differences between streams have collapsed
    assert one.layers_until_collapse < 48
    assert one.collapsed == pytest.approx(0.75, abs=0.05)


def test_costs_are_those_of_a_connection():
    one = jpmhc.recommend(3, dim=64, mixers=["cayley"]).best
    block = jpmhc.HyperConnection(torch.nn.Identity(), 64, 4, "cayley")
    assert one.parameters == sum(parameter.numel() for parameter in block.parameters())


def test_a_mixer_that_is_far_from_the_identity_keeps_its_start():
    mixer = jpmhc.MIXERS["grassmann"].by_default(4, True).double()
    start, drifted = drift_skips(mixer, 5, 0.1)
    assert torch.equal(start, drifted)


def test_post_norm_is_known_too():
    best = jpmhc.recommend(12, norm="post", scales=(1.0, 0.1), mixers=["sinkhorn", "rotation", "cayley"]).best
    assert best.mixer == "rotation"


def test_a_mixer_that_another_one_beats_is_not_first():
    """At two streams a rotation with row sums one is fixed, and Cayley skips lose more than it in every respect."""
    first = jpmhc.recommend(24, streams=2).best
    assert first.mixer in ("identity", "rotation")


def test_the_shrinking_of_post_norms_is_not_counted_as_collapse():
    """Twelve norms shrink all directions alike: 70 to 98 % were below 0.1, whatever the mixer."""
    rows = {one.mixer: one for one in jpmhc.recommend(24, norm="post", mixers=["identity", "sinkhorn"]).candidates}
    assert rows["identity"].collapsed < 0.15
    assert rows["sinkhorn"].collapsed > 0.25


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"depth": 0}, "depth must be a whole number"),
        ({"depth": 4, "norm": "both"}, "no norm is called 'both'"),
        ({"depth": 4, "mixers": ["none"]}, "no mixer is called 'none'"),
        ({"depth": 4, "mixers": "cayley"}, "mixers must be one or more names in a list"),
        ({"depth": 4, "mixers": []}, "mixers must be one or more names in a list"),
        ({"depth": 4, "drift": -1.0}, "drift must lie in"),
        ({"depth": 4, "activation": "x"}, "no activation is called 'x'"),
    ],
)
def test_bad_input_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        jpmhc.recommend(**arguments)


def test_it_prints_as_a_table_with_its_assumptions():
    found = jpmhc.recommend(3, mixers=["cayley", "sinkhorn"])
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == [one.mixer for one in found.candidates]
    assert lines[3].startswith("J lost: share of singular values below 0.1")
    assert " ".join(lines).endswith(found.assumptions)
    assert max(map(len, lines)) < 120


def test_a_notebook_shows_every_mixer_also_one_with_a_long_name():
    found = jpmhc.recommend(2, mixers=["cayley", "orthostochastic"])
    assert all(one.mixer in found._repr_html_() for one in found.candidates)
    assert len({len(line) for line in str(found).splitlines()[:3]}) == 1  # the columns are aligned


def test_one_stream_and_large_drifts_are_refused():
    with pytest.raises(ValueError, match="one stream has nothing to mix: streams must be at least 2"):
        jpmhc.recommend(12, 1)
    with pytest.raises(ValueError, match=r"drift must lie in \(0, 1\], got 2"):
        jpmhc.recommend(12, drift=2)
    with pytest.raises(ValueError, match="scales must be two numbers"):
        jpmhc.recommend(12, scales=3)
