"""Which method answers, what it says about itself, and what it refuses."""

import math

import pytest
import torch

from jpmhc.spectra import METHODS, Anderson, Network, cauchy, choose

Z = torch.tensor([0.3, 0.9, 1.5], dtype=torch.float64) + 0.05j


def network(streams=4, depth=3, mixer="bistochastic", shared=False, **structure):
    return Network.from_mixer(mixer, depth, 0.1, streams, shared=shared, **structure)


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        (network(1, 1), "dyson"),
        (network(1, 4, "identity"), "z1"),
        (network(1, 4, "gaussian"), "subordination"),
        (network(4, 1), "dyson"),
        (network(4, 3), "chain"),
        (network(4, 3, shared=True), "chain"),
        (network(4, 1, read=torch.ones(4), write=torch.ones(4)), "chain"),
    ],
)
def test_selection_follows_the_table(asked, method):
    assert choose(asked) == method
    found = cauchy(asked, Z)
    assert found.method == method
    assert found.exact
    assert found.converged.all()
    # every exact method gives the chain's answer
    assert (found.G - cauchy(asked, Z, "chain").G).abs().max() < 1e-7


@pytest.mark.parametrize("method", ["z1", "subordination", "stransform"])
def test_scalar_methods_are_exact_for_orthogonal_skips_and_say_where_they_are_not(method):
    found = cauchy(network(mixer="orthogonal"), Z, method)
    assert found.exact
    assert (found.G - cauchy(network(mixer="orthogonal"), Z).G).abs().max() < 1e-6
    wrong = network(shared=True)
    with pytest.warns(UserWarning, match=rf"method '{method}'.*not multiples of orthogonal"):
        found = cauchy(wrong, Z, method)
    assert not found.exact
    assert "chain" in found.note
    assert ((found.G - cauchy(wrong, Z).G).abs() > 0.01 * found.G.abs()).any()


def test_one_skip_that_is_not_orthogonal_is_no_obstacle():
    skips = network(mixer="orthogonal", depth=3).skips.clone()
    skips[1] = network(depth=1).skips[0]
    asked = Network(skips, 0.1)
    found = cauchy(asked, Z, "subordination")
    assert found.exact
    assert (found.G - cauchy(asked, Z, "chain").G).abs().max() < 1e-6


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
@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_bad_points_are_refused_by_every_method(z, sentence, method):
    asked = network(depth=1) if method == "dyson" else network(mixer="orthogonal")
    with pytest.raises(ValueError, match=sentence):
        cauchy(asked, z, method)


def test_methods_refuse_what_they_cannot_solve():
    with pytest.raises(ValueError, match="no method is called"):
        cauchy(network(), Z, "newton")
    with pytest.raises(ValueError, match="one layer"):
        cauchy(network(), Z, "dyson")
    with pytest.raises(ValueError, match="differ"):
        cauchy(network(mixer="gaussian"), Z, "z1")
    block = network(read=torch.ones(4), write=torch.ones(4))
    for method in ("z1", "subordination", "stransform"):
        with pytest.raises(ValueError, match="isotropic"):
            cauchy(block, Z, method)
    with pytest.raises(ValueError, match="tolerance"):
        cauchy(network(), Z, tolerance=0.0)
    with pytest.raises(ValueError, match="iteration"):
        cauchy(network(), Z, maximum=0)


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


def test_points_are_solved_in_parts_when_memory_runs_out(monkeypatch):
    asked, z = network(mixer="bistochastic", depth=2), torch.complex(torch.linspace(0.1, 2, 7), torch.full((7,), 0.1))
    whole = cauchy(asked, z, "chain", matrix=True)
    sizes, chain = [], METHODS["chain"]

    def small(network, z, **options):
        sizes.append(len(z))
        if len(z) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return chain(network, z, **options)

    monkeypatch.setitem(METHODS, "chain", small)
    parts = cauchy(asked, z, "chain", matrix=True)
    assert sizes == [7, 4, 2, 2, 3, 2, 1]
    torch.testing.assert_close(parts.G, whole.G)
    torch.testing.assert_close(parts.matrix, whole.matrix)
    assert parts.converged.all()
    assert len(parts.known.z) == 7

    def never(network, z, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(METHODS, "chain", never)
    with pytest.raises(torch.OutOfMemoryError):
        cauchy(asked, z, "chain")
