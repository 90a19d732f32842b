"""The chain against closed forms, simulation, and other ways to compute the same."""

import math

import pytest
import torch

from jpmhc import paper
from jpmhc.paper import matrix_cauchy
from jpmhc.spectra import Network, cauchy, moments, simulate
from jpmhc.spectra.chain import solve as chain
from jpmhc.spectra.chain.bases import separating_bases
from jpmhc.spectra.chain.sweep import sweep
from tests.spectra.problems import deep_identity_residual, identity_moments, normal, sampled

X = torch.tensor([0.02, 0.1, 0.3, 0.6, 0.9, 1.1, 1.4, 2.0, 3.0, 5.0], dtype=torch.float64)


def structured(mixer, depth, noise, structure, seed=0):
    skips = Network.from_mixer(mixer, depth, 0.0, seed=seed).skips
    if structure == "isotropic":
        return Network(skips, noise / depth)
    if structure == "block":
        return Network(skips, noise / depth, 0.5 + normal(depth, 4, seed=1).abs(), 0.5 + normal(depth, 4, seed=2).abs())
    return Network(skips, noise / depth, covariance=0.5 * normal(depth, 3, 4, 4, seed=3))


@pytest.mark.parametrize("structure", ["isotropic", "block", "general"])
@pytest.mark.parametrize(
    ("mixer", "depth"), [("bistochastic", 2), ("gaussian", 3), ("grassmann", 5), ("orthogonal", 4)]
)
def test_agrees_with_sampled_networks(mixer, depth, structure):
    network = structured(mixer, depth, 0.5, structure)
    z = X + 0.05j
    found = cauchy(network, z)
    truth, error = sampled(network, z, width=60, samples=12)
    assert found.converged.all()
    # five standard errors, and the finite width's own deviation
    assert ((found.G - truth).abs() < 5 * error + 0.01 * truth.abs()).all()


def test_the_scalar_theory_would_fail_the_same_test():
    network = Network.from_mixer("bistochastic", 2, 0.25, shared=True)
    z = X + 0.05j
    truth, error = sampled(network, z, width=60, samples=12)
    with pytest.warns(UserWarning, match="not multiples of orthogonal"):
        scalar = paper.cauchy(network, z, "z1").G
    assert ((scalar - truth).abs() > 5 * error + 0.1 * truth.abs()).any()


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_thousand_identity_layers_reach_the_continuum(noise):
    z = X[[2, 4, 7]] + 0.05j
    found = cauchy(Network.repeated(torch.eye(1), noise / 1000, 1000), z)
    assert found.converged.all()
    assert deep_identity_residual(z, found.G, noise).abs().max() < 3e-3 * max(1, noise)


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_moments_of_identity_skips_for_any_depth(depth):
    variance = 0.4 / depth
    network = Network.repeated(torch.eye(2), variance, depth)
    found = moments(network, 2, top=8.0)
    truth = torch.tensor(identity_moments(depth, variance), dtype=torch.float64)
    assert (found / truth - 1).abs().max() < 1e-8


def test_one_layer_is_the_subordination_equation():
    skip = normal(3, 3, seed=5)
    variance, z = 0.3, X + 0.01j
    green = cauchy(Network(skip.unsqueeze(0), variance), z, tolerance=1e-12).G
    u = 1 - variance * green
    spectrum = torch.linalg.svdvals(skip) ** 2
    assert (green - u * (1 / (z * u**2)[:, None].sub(spectrum)).mean(-1)).abs().max() < 1e-9


def test_without_noise_it_is_the_resolvent_of_the_product():
    network = Network.from_mixer("gaussian", 4, 0.0, seed=1)
    product = torch.linalg.multi_dot(list(network.skips.flip(0)))
    z = X + 0.1j
    truth = (1 / (z[:, None] - torch.linalg.svdvals(product) ** 2)).mean(-1)
    assert (cauchy(network, z).G - truth).abs().max() < 1e-9


def test_isotropic_noise_is_a_case_of_the_general_covariance():
    network = Network.from_mixer("bistochastic", 3, 0.1)
    units = torch.eye(16, dtype=torch.float64).view(16, 4, 4) / 2
    general = Network(network.skips, 0.1, covariance=units.expand(3, -1, -1, -1))
    z = X + 0.02j
    assert (cauchy(network, z).G - cauchy(general, z).G).abs().max() < 1e-8


def test_a_block_is_a_case_of_the_general_covariance():
    block = structured("bistochastic", 3, 0.3, "block")
    factors = (block.write.unsqueeze(-1) * block.read.unsqueeze(-2)).unsqueeze(1)
    general = Network(block.skips, 0.1, covariance=factors)
    z = X + 0.02j
    assert (cauchy(block, z).G - cauchy(general, z).G).abs().max() < 1e-7


def test_layers_without_noise_or_without_a_read_vector_are_no_obstacle():
    skips = Network.from_mixer("bistochastic", 3, 0.0).skips
    read = torch.ones(3, 4, dtype=torch.float64)
    read[1] = 0
    z = X + 0.05j
    silent = cauchy(Network(skips, 0.1, read, torch.ones(3, 4)), z)
    quiet = cauchy(Network(skips, [0.1, 0.0, 0.1], torch.ones(3, 4), torch.ones(3, 4)), z)
    assert silent.converged.all()
    assert (silent.G - quiet.G).abs().max() < 1e-8


@pytest.mark.parametrize("blocks", [2, 3, 7, 10])
@pytest.mark.parametrize("scalar", [True, False])
def test_blocks_of_layers_side_by_side_give_the_same_states(blocks, scalar):
    depth, n, points = 10, 3, 4
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.complex128, generator=generator)

    size = (depth, 2, points, 1, 1) if scalar else (depth, 2, points, n, n)
    add, sat = 0.2 * draw(*size), 0.2 * draw(*size)
    add, sat = add + add.mT, sat + sat.mT
    first, skips = draw(2, points, n, n), draw(2, depth, points if scalar else 1, n, n) / 2
    plain = sweep(first.clone(), skips, add, sat)
    side_by_side = sweep(first.clone(), skips, add, sat, blocks)
    assert (plain - side_by_side).abs().max() < 1e-9 * plain.abs().max()


@pytest.mark.parametrize(("mixer", "depth", "shared"), [("gaussian", 100, True), ("bistochastic", 30, False)])
def test_bases_separate_the_rates_of_growth(mixer, depth, shared):
    skips = Network.from_mixer(mixer, depth, 0.0, shared=shared).skips
    bases, moved = separating_bases(skips)
    assert float(torch.linalg.cond(bases).max()) < 1e3
    # what was cut off as zero was zero
    assert (bases[1:] @ skips - moved @ bases[:-1]).abs().max() < 1e-9
    assert (moved == 0).any()


def test_no_bases_where_nothing_is_to_be_separated():
    assert separating_bases(Network.from_mixer("orthogonal", 50, 0.0).skips) is None


def test_spectra_over_seventy_orders_of_magnitude_converge():
    # spectral radius 1.45: squared singular values from 1e-40 to 1e33, and rounding swallows all but the largest
    network = Network.from_mixer("gaussian", 100, 0.0005, shared=True, seed=0)
    assert torch.linalg.eigvals(network.skips[0]).abs().max() > 1.4
    z = X + 0.02j
    found = cauchy(network, z)
    assert found.converged.all()
    # of four bands three lie far below these points and one far above
    assert ((z * found.G).real - 0.75).abs().max() < 1e-3


def test_small_singular_values_keep_their_digits():
    network = Network.from_mixer("bistochastic", 10, 0.005, shared=True)
    sampled_values = simulate(network, 40, 6).log10()
    x = torch.logspace(-18, -4, 15, dtype=torch.float64)
    found = cauchy(network, 1j * x)
    below = (1j * x * found.G).real  # the mass below x, up to the kernel's width
    truth = (1 / (1 + 10 ** (2 * (sampled_values.flatten() - x.log10().unsqueeze(-1))))).mean(-1)
    assert found.converged.all()
    assert (below - truth).abs().max() < 0.01


def test_points_are_independent_of_their_company():
    network = Network.from_mixer("bistochastic", 5, 0.02)
    z = X + 0.02j
    together = cauchy(network, z)
    alone = torch.cat([cauchy(network, point.unsqueeze(0)).G for point in z])
    assert (together.G - alone).abs().max() < 1e-8


def test_chunks_do_not_change_the_answer(monkeypatch):
    network = Network.from_mixer("bistochastic", 5, 0.02)
    z = X + 0.02j
    whole = cauchy(network, z)
    monkeypatch.setitem(chain.MEMORY, "cpu", 3 * 16 * 6 * 16 * 2 * chain._ALIVE)
    parts = cauchy(network, z)
    assert (whole.G - parts.G).abs().max() < 1e-8
    assert torch.equal(whole.converged, parts.converged)


def test_what_has_not_converged_is_marked():
    network = Network.from_mixer("bistochastic", 5, 0.2)
    found = cauchy(network, X + 0.02j, maximum=3)
    assert not found.converged.any()
    assert (found.residual > 1e-9).all()
    assert (found.iterations == 3).all()


def test_continuation_reaches_a_small_eta():
    # A = 0: the law of a product of Gaussian matrices, whose equation is w (1 + w)^L = (w z) ... with w = z G - 1
    depth, x = 4, torch.tensor([0.5, 2.0, 8.0], dtype=torch.float64)
    z = x + 1e-8j
    found = cauchy(Network(torch.zeros(depth, 1, 1), 1.0), z)
    w = z * found.G - 1
    assert found.converged.all()
    assert ((1 + w) ** (depth + 1) - z * w).abs().max() < 1e-6
    assert (found.G.imag < 0).all()


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    network = Network.from_mixer("bistochastic", 100, 0.0005)
    z = torch.linspace(0.01, 4, 50, dtype=torch.float64) + 0.02j
    there = cauchy(network.to("cuda"), z.cuda())
    assert there.converged.all()
    assert (there.G.cpu() - cauchy(network, z).G).abs().max() < 1e-7


def test_residual_is_relative_to_the_unknowns():
    # at a gain of e^60 the unknowns differ by as much, and G is still right
    eye = torch.eye(2, dtype=torch.float64)
    network = Network.repeated(math.exp(3) * eye, 0.1, 10)
    z = torch.tensor([math.exp(60) * (1 + 0.1j)], dtype=torch.complex128)
    small = cauchy(Network.repeated(eye, 0.1 * math.exp(-6), 10), z * math.exp(-60))
    found = cauchy(network, z)
    assert (found.G * math.exp(60) / small.G - 1).abs().max() < 1e-8


def test_matrix_valued_transform_of_one_layer_is_that_of_the_matrix_dyson_equation():
    skip, z = normal(3, 3, seed=5), X + 0.05j
    found = cauchy(Network(skip.unsqueeze(0), 0.3), z, matrix=True, tolerance=1e-12)
    truth, converged = matrix_cauchy(z[:, None, None] * torch.eye(3, dtype=z.dtype), skip, 0.3)
    assert converged.all()
    assert (found.matrix - truth).abs().max() < 1e-9
    assert (found.matrix.diagonal(dim1=-2, dim2=-1).mean(-1) - found.G).abs().max() < 1e-12


@pytest.mark.parametrize("size", [1.0, 1e-12])
def test_matrix_valued_transform_without_noise_is_the_resolvent_of_the_product(size):
    """Also where the singular values are so far apart that the layers are solved in bases of their own."""
    network = Network.from_mixer("bistochastic", 10, 0.0, seed=1, shared=True)
    product = torch.linalg.multi_dot(list(network.skips.flip(0)))
    z = size * torch.tensor([[0.5 + 0.5j, 2 + 1j]], dtype=torch.complex128)
    gram = (product.T @ product).to(z.dtype)
    truth = torch.linalg.inv(z[..., None, None] * torch.eye(4, dtype=z.dtype) - gram)
    found = cauchy(network, z, matrix=True)
    assert found.matrix.shape == (1, 2, 4, 4)
    assert ((found.matrix - truth).abs().amax((-2, -1)) / truth.abs().amax((-2, -1))).max() < 1e-3


def test_general_noise_in_nilpotent_layers_is_solved_over_many_orders_of_magnitude():
    """Blocks of the resolvent whose directions differ by many orders of magnitude, against independent samples."""
    skips = 3.0 * normal(8, 3, 3, seed=5).triu(1)
    network = Network(skips, 0.01, covariance=normal(8, 2, 3, 3, seed=6))
    z = network.mean_square() * torch.logspace(-12, 1, 14, dtype=torch.float64) * 1j
    found = cauchy(network, z)
    assert found.converged.all()
    samples = simulate(network, 60, 4)
    truth = (z.unsqueeze(-1) / (z.unsqueeze(-1) - samples.flatten())).mean(-1)
    assert (z * found.G - truth).abs().max() < 0.02


def test_rounding_does_not_keep_points_from_converging():
    """Defective skips with little noise: below 1e-10 of the mean square the residual stays at 1e-6, and G is right."""
    chained = torch.diag(torch.ones(5, dtype=torch.float64), 1)
    values = torch.linspace(-0.6, 0.7, 20, dtype=torch.float64).view(-1, 1, 1)
    network = Network(values * torch.eye(6, dtype=torch.float64) + chained, 1e-5)
    z = network.mean_square() * torch.tensor([1e-13, 1e-12], dtype=torch.float64) * (1 + 0.05j)
    found = cauchy(network, z)
    assert found.converged.all()
    samples = simulate(network, 40, 6)
    truth = (z.unsqueeze(-1) / (z.unsqueeze(-1) - samples.flatten())).mean(-1)
    assert (z * found.G - truth).abs().max() < 0.05


def test_a_sweep_seeds_large_batches_and_keeps_their_order():
    network = Network.from_mixer("bistochastic", 5, 0.05)
    x = torch.logspace(-2, 1, 210, dtype=torch.float64)[torch.randperm(210, generator=torch.Generator().manual_seed(0))]
    z = x + 0.02j
    swept = cauchy(network, z)
    parts = [cauchy(network, part) for part in z.chunk(3)]
    assert swept.converged.all()
    assert (swept.G - torch.cat([part.G for part in parts])).abs().max() < 1e-7
    assert swept.iterations.sum() < 0.8 * sum(part.iterations.sum() for part in parts)
    assert (swept.known.z == z[swept.converged]).all()
