"""What the exact transform answers, and what it refuses."""

import math

import pytest
import torch

from jpmhc import paper
from jpmhc.spectra import Anderson, Network, cauchy
from jpmhc.spectra.solution import solve_points

Z = torch.tensor([0.3, 0.9, 1.5], dtype=torch.float64) + 0.05j


def network(streams=4, depth=3, mixer="bistochastic", shared=False, **structure):
    return Network.from_mixer(mixer, depth, 0.1, streams, shared=shared, **structure)


def test_tied_layers_are_solved_by_the_equation_of_all_pairs_and_all_others_by_the_chain():
    assert cauchy(network(depth=1), Z).method == "chain"
    assert cauchy(Network.repeated(torch.eye(2), 0.1, 2), Z).method == "chain"
    assert cauchy(Network(torch.eye(1).expand(2, 1, 1), 0.1, tied=[0, 0]), Z).method == "pencil"


def test_a_single_point_gives_a_single_value():
    found = cauchy(network(), Z[0], matrix=True)
    assert found.G.shape == found.converged.shape == ()
    assert found.matrix.shape == (4, 4)


def test_the_answer_has_the_shape_of_the_question():
    z = torch.complex(torch.rand(2, 3, dtype=torch.float64), torch.full((2, 3), 0.1, dtype=torch.float64))
    found = cauchy(network(), z)
    for part in (found.G, found.converged, found.residual, found.iterations):
        assert part.shape == (2, 3)


@pytest.mark.parametrize(
    ("z", "sentence"),
    [
        (torch.zeros(0, dtype=torch.complex128), "at least one"),
        (torch.tensor([1.0 + 0j]), "eta > 0"),
        (torch.tensor([1.0 - 1j]), "eta > 0"),
        (torch.tensor([complex(math.nan, 1)]), "finite"),
    ],
)
def test_bad_points_are_refused(z, sentence):
    with pytest.raises(ValueError, match=sentence):
        cauchy(network(), z)
    for method in paper.METHODS:
        asked = network(depth=1) if method == "dyson" else network(mixer="orthogonal")
        with pytest.raises(ValueError, match=sentence):
            paper.cauchy(asked, z, method)


def test_a_start_near_an_earlier_solution_gives_the_same_answer_sooner():
    asked = network(depth=20)
    z = torch.linspace(0.2, 1.5, 20, dtype=torch.float64) + 1e-3j
    first = cauchy(asked, z, tolerance=1e-11)
    again = cauchy(asked, z * 1.001, tolerance=1e-11, near=first)
    cold = cauchy(asked, z * 1.001, tolerance=1e-11)
    assert again.converged.all()
    assert (again.G - cold.G).abs().max() < 1e-8
    assert again.iterations.double().mean() < 0.8 * cold.iterations.double().mean()
    # a point far from all known ones starts as if nothing were known
    far = torch.tensor([50 + 1j], dtype=torch.complex128)
    assert torch.equal(cauchy(asked, far, near=first).G, cauchy(asked, far).G)


def test_schemes_may_be_names_or_objects():
    asked = network()
    by_name, by_object = (cauchy(asked, Z, scheme=scheme) for scheme in ("anderson", Anderson()))
    assert torch.equal(by_name.G, by_object.G)
    assert cauchy(asked, Z, scheme=Anderson(history=1, long_history=1)).iterations.max() > by_name.iterations.max()
    with pytest.raises(
        ValueError, match="no scheme is called 'broyden'; choose one of anderson, newton, anderson_newton, plain"
    ):
        cauchy(asked, Z, scheme="broyden")


def test_points_are_solved_in_parts_when_memory_runs_out():
    asked, z = network(mixer="bistochastic", depth=2), torch.complex(torch.linspace(0.1, 2, 7), torch.full((7,), 0.1))
    whole = cauchy(asked, z, matrix=True)
    sizes = []

    def small(points):
        sizes.append(len(points))
        if len(points) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return cauchy(asked, points, matrix=True)

    parts = solve_points(small, asked, z)
    assert sizes == [7, 4, 2, 2, 3, 2, 1]
    torch.testing.assert_close(parts.G, whole.G)
    torch.testing.assert_close(parts.matrix, whole.matrix)
    assert parts.converged.all()
    assert len(parts.known.z) == 7

    def never(points):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        solve_points(never, asked, z)
