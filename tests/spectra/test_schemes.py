"""Schemes on problems whose fixed points are known: what all of them owe, and what each does on its own."""

import pytest
import torch

from jpmhc import paper
from jpmhc.spectra import SCHEMES, Anderson, Network, Newton, Plain, cauchy
from jpmhc.spectra.fixed_point import Equation, FixedPoints, Options, solve


class Map(Equation):
    """An equation given by its map, which takes unknowns and row numbers."""

    def __init__(self, image):
        self.map = image

    def image(self, x, z, index):
        return self.map(x, index)


def run(scheme, equation, start, tolerance, maximum):
    """Iterate an equation that has no spectral point."""
    points = torch.zeros(len(start), dtype=torch.complex128)
    return solve(equation, points, start, Options(scheme, tolerance, maximum))


def semicircle(z):
    """The Cauchy transform of the semicircle law of variance 1."""
    root = torch.sqrt(z - 2) * torch.sqrt(z + 2)
    return (z - root) / 2


@pytest.mark.parametrize("name", SCHEMES)
def test_semicircle_law_at_every_point_of_a_grid(name):
    z = torch.linspace(-3, 3, 41, dtype=torch.float64) + 0.1j

    class Semicircle(Equation):
        def image(self, x, z, index):
            return 1 / (z.unsqueeze(-1) - x)

        def admissible(self, x, z, index):
            return (x.imag < 0).all(-1)

    start = torch.full((41, 1), -0.5j, dtype=torch.complex128)
    found = solve(Semicircle(), z, start, Options(SCHEMES[name], 1e-12, 1000))
    assert found.converged.all()
    assert (found.residual <= 1e-12).all()
    assert (found.x.squeeze(-1) - semicircle(z)).abs().max() < 1e-9


@pytest.mark.parametrize("name", SCHEMES)
def test_what_does_not_converge_is_marked(name):
    problem = Map(lambda x, index: torch.where(index.unsqueeze(-1) == 1, x + 1, 0.5 * x))
    found = run(SCHEMES[name], problem, torch.ones(2, 1, dtype=torch.float64), 1e-9, 100)
    assert found.converged.tolist() == [True, False]
    assert found.residual[1] == 1


@pytest.mark.parametrize("name", SCHEMES)
def test_the_chain_with_every_scheme_is_the_same(name):
    network = Network.from_mixer("bistochastic", 3, 0.1)
    z = torch.tensor([0.2, 0.7, 1.0, 2.5], dtype=torch.float64) + 0.05j
    found = cauchy(network, z, scheme=name, maximum=2000)
    assert found.converged.all()
    assert (found.G - cauchy(network, z, tolerance=1e-12).G).abs().max() < 1e-7


@pytest.mark.parametrize("name", SCHEMES)
def test_one_layer_with_every_scheme_is_the_same(name):
    network = Network.from_mixer("gaussian", 1, 0.3)
    z = torch.tensor([0.2, 0.7, 1.0, 2.5], dtype=torch.float64) + 0.05j
    found = paper.cauchy(network, z, "dyson", scheme=name, maximum=5000)
    assert found.converged.all()
    assert (found.G - paper.cauchy(network, z, "dyson").G).abs().max() < 1e-9


def test_schemes_differ_in_what_they_need():
    z = torch.linspace(-1, 1, 5, dtype=torch.float64) + 1e-3j
    problem = Map(lambda x, index: 1 / (z[index].unsqueeze(-1) - x))
    start = torch.full((5, 1), -0.5j, dtype=torch.complex128)
    needed = [int(run(s, problem, start, 1e-10, 1000).iterations.max()) for s in (Newton(), Anderson(), Plain())]
    assert needed == sorted(needed)
    assert needed[2] > 2 * needed[0]


def test_linear_problem_ends_after_as_many_anderson_steps_as_it_has_unknowns():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 4, 4, dtype=torch.float64, generator=generator)  # not a contraction: plain steps diverge
    offset = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    problem = Map(lambda x, index: (matrix[index] @ x.unsqueeze(-1)).squeeze(-1) + offset[index])
    found = run(Anderson(), problem, torch.zeros(7, 4, dtype=torch.float64), 1e-9, 30)
    truth = torch.linalg.solve(torch.eye(4, dtype=torch.float64) - matrix, offset.unsqueeze(-1)).squeeze(-1)
    assert found.converged.all()
    assert (found.x - truth).abs().max() < 1e-7
    assert found.iterations.max() <= 9


def test_a_history_that_grows_spans_more_slow_directions():
    rate = torch.linspace(0.9, 0.999, 40, dtype=torch.float64)
    problem = Map(lambda x, index: rate * x + torch.sin(x) * 0.001)
    start = torch.ones(1, 40, dtype=torch.float64)
    short, grown = (
        run(Anderson(long_history=long, patience=1000), problem, start, 1e-9, 1000).iterations.max() for long in (5, 20)
    )
    assert grown < 0.7 * short


@pytest.mark.parametrize("scheme", [Anderson(history=1, long_history=1), Plain(step_length=0.9)])
def test_rows_that_have_converged_are_no_longer_evaluated(scheme):
    rate = torch.tensor([0.0] * 9 + [0.999], dtype=torch.float64)
    seen = []

    def image(x, index):
        seen.append(len(index))
        return torch.cos(rate[index].unsqueeze(-1) * x)

    found = run(scheme, Map(image), torch.zeros(10, 1, dtype=torch.float64), 1e-9, 500)
    assert found.converged.all()
    assert seen[0] == 10
    assert seen[-1] == 1
    assert found.iterations[:9].max() < found.iterations[9]


def test_inadmissible_anderson_candidates_are_replaced_by_plain_steps():
    inadmissible = []

    class Positive(Equation):
        def image(self, x, z, index):
            inadmissible.append(bool((x < 0).any()))
            return torch.exp(-3 * x)

        def admissible(self, x, z, index):
            return (x >= 0).all(-1)

    found = run(Anderson(), Positive(), torch.full((3, 1), 2.0, dtype=torch.float64), 1e-9, 500)
    assert found.converged.all()
    assert not any(inadmissible)
    assert (found.x - torch.exp(-3 * found.x)).abs().max() < 1e-9


def test_later_passes_replace_only_what_they_improve():
    def state(converged, residual):
        count = len(converged)
        x = torch.tensor(residual, dtype=torch.float64).unsqueeze(-1)
        return FixedPoints(x, torch.tensor(converged), x.squeeze(-1).clone(), torch.full((count,), 5))

    first = state([True, False, False, False], [1e-9, 0.5, 0.5, 1e-12])
    # a row that converges wins even over a smaller residual, which was that of an inadmissible root
    first.merge_pass(torch.tensor([1, 2, 3]), state([False, False, True], [0.4, 0.6, 1e-10]))
    assert first.converged.tolist() == [True, False, False, True]
    assert first.x.squeeze(-1).tolist() == [1e-9, 0.4, 0.5, 1e-10]
    assert first.iterations.tolist() == [5, 10, 10, 10]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_fixed_point_that_is_not_admissible_does_not_count(name):
    class Upper(Equation):
        def image(self, x, z, index):
            return torch.full_like(x, 0.3j)

        def admissible(self, x, z, index):
            return (x.imag < 0).all(-1)

    found = run(SCHEMES[name], Upper(), torch.full((2, 1), 0.3j, dtype=torch.complex128), 1e-9, 50)
    assert not found.converged.any()


def test_a_start_without_an_image_is_left():
    problem = Map(lambda x, index: torch.where(x == 0.5, torch.nan, torch.cos(x)))
    found = run(Anderson(), problem, torch.full((2, 1), 0.5, dtype=torch.float64), 1e-9, 100)
    assert found.converged.all()
    assert (found.x - 0.7390851332).abs().max() < 1e-8
