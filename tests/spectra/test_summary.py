"""Theorems about gaps, geometric means and the model's own map, as properties of random networks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jpmhc.manifolds import birkhoff
from jpmhc.spectra import (
    Network,
    cauchy,
    density,
    gap_radii,
    geometric_mean,
    gradient_gains,
    share_below,
    simulate,
    summary,
)
from jpmhc.spectra.summary import shares_below
from tests.spectra.problems import normal

STRUCTURES = st.sampled_from(["isotropic", "block", "general"])
SEEDS = st.integers(0, 10_000)


def random_network(structure: str, seed: int, radius: float, depth: int = 3, streams: int = 3) -> Network:
    """A network whose layers all have the given spectral radius of A^-1 times their noise."""
    skips = torch.eye(streams, dtype=torch.float64) + 0.3 * normal(depth, streams, streams, seed=seed)
    parts = {}
    if structure == "block":
        # a write that the read sees through the skip: else the radius would need enormous noise
        read = normal(depth, streams, seed=seed + 1)
        write = (skips @ read.unsqueeze(-1)).squeeze(-1) + 0.3 * normal(depth, streams, seed=seed + 2)
        parts = {"read": read, "write": write}
    elif structure == "general":
        parts = {"covariance": normal(depth, 2, streams, streams, seed=seed + 3)}
    radii = gap_radii(Network(skips, 1.0, **parts))
    return Network(skips, (radius / radii).square(), **parts)


def mass_ratio(network: Network) -> float:
    """By how much the mass below y falls when y does by ten: a hundred where there is a gap at zero."""
    scaled, _ = network.rescaled()
    floor = float(torch.linalg.svdvals(scaled.skips).amin(-1).prod()) ** 2
    y = floor * torch.tensor([1e-5, 1e-6], dtype=torch.float64)
    mass = (1j * y * cauchy(scaled, 1j * y, tolerance=1e-10).G).real
    return float(mass[0] / mass[1])


@settings(max_examples=12, deadline=None)
@given(structure=STRUCTURES, seed=SEEDS)
def test_a_gap_opens_at_zero_exactly_below_the_threshold(structure, seed):
    assert mass_ratio(random_network(structure, seed, 0.6)) > 90
    assert mass_ratio(random_network(structure, seed, 1.4)) < 60


@settings(max_examples=8, deadline=None)
@given(structure=STRUCTURES, seed=SEEDS)
def test_the_geometric_mean_is_that_of_the_determinants(structure, seed):
    network = random_network(structure, seed, 0.7)
    sampled = float((0.5 * simulate(network, 120, 3).log()).mean())
    truth = float(torch.linalg.slogdet(network.skips).logabsdet.sum()) / network.streams
    assert math.isclose(math.log(geometric_mean(network)), truth, rel_tol=1e-9, abs_tol=1e-12)
    assert abs(sampled - truth) < 0.02


@pytest.mark.parametrize("structure", ["isotropic", "block"])
def test_the_geometric_mean_beyond_the_threshold(structure):
    network = random_network(structure, 5, 1.6)
    sampled = float((0.5 * simulate(network, 250, 4).log()).mean())
    assert abs(sampled - math.log(geometric_mean(network))) < 0.02


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS, depth=st.integers(1, 5), streams=st.integers(2, 5))
def test_the_models_own_map_does_not_depend_on_skips_with_row_sums_one(seed, depth, streams):
    reads = normal(depth, streams, seed=seed).softmax(-1)
    writes = torch.ones(depth, streams)
    skips = normal(depth, streams, streams, seed=seed + 1)
    any_rows = skips / skips.sum(-1, keepdim=True)
    plain = torch.eye(streams).expand(depth, -1, -1)
    ones = torch.ones(1)
    maps = [
        simulate(Network(kind, 0.4, reads, writes, ends="model"), 12, 1, seed)
        for kind in (plain, skips.softmax(-1), any_rows)
    ]
    single = simulate(Network(torch.eye(1).expand(depth, 1, 1), 0.4, ones, ones), 12, 1, seed)
    for found in maps:
        assert torch.allclose(found, single, rtol=1e-6, atol=1e-9)


def test_the_theory_knows_it_too():
    depth, streams = 4, 3
    reads, writes = normal(depth, streams).softmax(-1), torch.ones(depth, streams)
    z = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64) + 0.05j
    plain = cauchy(Network(torch.eye(1).expand(depth, 1, 1), 0.4), z).G
    for kind in (torch.eye(streams).expand(depth, -1, -1), normal(depth, streams, streams).softmax(-1)):
        assert (cauchy(Network(kind, 0.4, reads, writes, ends="model"), z).G - plain).abs().max() < 1e-6


@pytest.mark.parametrize("all_streams", [False, True])
def test_gradient_gains_are_those_of_a_sampled_network(all_streams):
    depth, n, width = 4, 3, 300
    skips, read, write = normal(depth, n, n, seed=1) / n**0.5, normal(depth, n, seed=2), normal(depth, n, seed=3)
    network = Network(skips, 0.3, read, write)
    eye = torch.eye(width, dtype=torch.float64)
    weights = normal(depth, width, width, seed=4) * (0.3 / width) ** 0.5
    ends = torch.eye(n, dtype=torch.float64) if all_streams else torch.full((1, n), 1 / n, dtype=torch.float64)
    back = torch.kron(ends, eye)  # d out / d x_L
    found = []
    for layer in range(depth - 1, -1, -1):
        found.append(float((back @ torch.kron(write[layer].unsqueeze(-1), eye)).square().sum()) / width)
        noise = torch.kron(torch.outer(write[layer], read[layer]), weights[layer])
        back = back @ (torch.kron(skips[layer], eye) + noise)
    gains = gradient_gains(network, ends if all_streams else None)
    assert torch.allclose(gains, torch.tensor(found[::-1], dtype=torch.float64), rtol=0.03)


@pytest.mark.parametrize("ends", ["streams", "model"])
def test_mean_squares_and_shares_are_those_of_sampled_networks(ends):
    network = Network.from_mixer("orthogonal", 6, 0.4, seed=3)
    network = Network(network.skips, 0.4, normal(6, 4, seed=1).softmax(-1), torch.ones(6, 4), ends=ends)
    squares = simulate(network, 100, 8)
    assert abs(float(squares.mean()) / float(network.gains().prod()) - 1) < 0.04
    assert abs(share_below(network, 0.5) - float((squares < 0.25).double().mean())) < 0.01
    assert abs(share_below(network, 0.5) - density(network).collapsed(0.5)) < 0.003


def test_a_summary_of_bistochastic_skips_tells_differences_from_the_mean():
    depth = 30
    skips = 0.8 * torch.eye(4, dtype=torch.float64) + 0.2 * Network.from_mixer("bistochastic", depth, 0.0).skips
    reads, writes = torch.full((4,), 0.25), torch.ones(4)
    found = summary(Network.prenorm(skips, reads, writes))
    assert found.direct_path == pytest.approx(1)
    assert found.collapsed_differences == pytest.approx(0.75, abs=0.01)
    assert found.collapsed_mean < 0.05
    assert found.gap_margin < 1
    assert found.geometric_mean == pytest.approx(float(torch.linalg.det(skips).abs().prod()) ** 0.25)
    # with row sums one the gradients are the plain network's, however much collapses
    plain = summary(Network.prenorm(torch.eye(4), reads, writes, depth=depth))
    assert torch.allclose(found.gradient_gains, plain.gradient_gains)
    assert found.model_mean_square == pytest.approx(plain.model_mean_square)


@pytest.mark.parametrize("make", [Network.prenorm, Network.postnorm])
def test_shares_of_several_networks_are_those_of_each(make):
    """Also for a network whose points are so small beside its gain that it needs bases of its own, and for T."""
    depth = 5
    read = (2 * torch.nn.functional.one_hot(torch.arange(depth) % 4, 4).double()).softmax(-1)
    write = torch.ones(depth, 4, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64).expand(depth, -1, -1)
    skips = [eye, 0.7 * eye + 0.3 / 4, birkhoff.sample(4, (depth,), generator=torch.Generator().manual_seed(0))]
    networks = [make(skip, read, write) for skip in skips]
    networks += [networks[1].end_to_end(), replace(networks[0], skips=8 * eye)]
    one_by_one = [share_below(network, 0.1, points=6, tolerance=1e-6) for network in networks]
    together = shares_below(networks, 0.1, points=6, tolerance=1e-6)
    assert max(one_by_one) > 0.7
    assert min(one_by_one) < 0.01
    assert np.allclose(together, one_by_one, atol=1e-5)
