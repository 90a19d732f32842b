"""The derivatives that Newton's method uses, against differences of the equation itself."""

import pytest
import torch

from jpmhc.spectra import Network
from jpmhc.spectra.chain.derivative import LinearisedChain, gmres
from jpmhc.spectra.chain.equation import ChainEquation
from jpmhc.spectra.fixed_point import Equation

DEPTH, STREAMS = 5, 3


def make_equation(noise, apart):
    """Return an equation, its points, and an iterate that is not a solution."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Directions that grow at different rates, far below the mean square: the equation is solved in bases of its own.
    sizes = torch.tensor([10.0, 1.0, 0.1] if apart else [1.0, 1.0, 1.0], dtype=torch.float64)
    structure = {}
    if noise == "read and write":
        structure = {"read": normal(DEPTH, STREAMS), "write": normal(DEPTH, STREAMS)}
    elif noise == "general":
        structure = {"covariance": normal(DEPTH, 2, STREAMS, STREAMS)}
    elif noise == "slopes":
        structure = {"slopes": normal(4, DEPTH, STREAMS).square()}
    skips = normal(DEPTH, STREAMS, STREAMS) * sizes
    network = Network(skips, torch.linspace(0.1, 1, DEPTH), **structure).rescaled()[0]
    z = torch.tensor([1e-6 + 1e-6j if apart else 0.1 + 0.1j, 0.3 + 0.02j], dtype=torch.complex128)
    equation, index = ChainEquation(network, z), torch.arange(2)
    x = equation.start(z, index)
    for _ in range(3):
        x = equation.between(x, equation.image(x, z, index), 0.5)
    return equation, z, index, x


NOISES = ["isotropic", "read and write", "slopes", "general"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_products_with_the_derivative_are_those_of_finite_differences(noise, apart):
    equation, z, index, x = make_equation(noise, apart)
    generator = torch.Generator().manual_seed(1)
    change = torch.randn(x.shape, generator=generator, dtype=torch.complex128)
    moved = [equation.image(x + side * 1e-6 * change, z, index) for side in (1, -1)]
    expected = (moved[0] - moved[1]) / 2e-6
    product = LinearisedChain(equation, x, z).product(change)
    assert (product - expected).abs().max() < 1e-7 * expected.abs().max()


@pytest.mark.parametrize("noise", NOISES[:3])
def test_corrections_are_those_of_finite_differences(noise):
    equation, z, index, x = make_equation(noise, False)
    size, correction = equation.newton_correction(x, z, index)
    expected_size, expected = Equation.newton_correction(equation, x, z, index)
    assert torch.equal(size, expected_size)
    assert (correction - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize("noise", NOISES)
def test_corrections_square_the_residual(noise):
    equation, z, index, x = make_equation(noise, False)
    sizes = []
    for _ in range(6):
        size, correction = equation.newton_correction(x, z, index)
        sizes.append(size)
        x = equation.clamp(x + correction)
    assert (sizes[-1] < 1e-9).all(), sizes


def test_equations_with_few_large_directions_are_solved_in_few_products():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.complex128)

    columns, rows, right = normal(4, 60, 3), normal(4, 3, 60) / 60, normal(4, 60)
    matrix = columns @ rows + 0.01 * normal(4, 60, 60) / 60**0.5
    scale = torch.logspace(-6, 6, 60, dtype=torch.float64)
    matrix, right = matrix * scale.unsqueeze(-1) / scale, right * scale
    counted = []

    def product(change):
        counted.append(1)
        return (matrix @ change.unsqueeze(-1)).squeeze(-1)

    found = gmres(product, right, 1 / scale.expand(4, -1), steps=20, tolerance=1e-10)
    truth = torch.linalg.solve(torch.eye(60, dtype=torch.complex128) - matrix, right)
    assert ((found - truth).abs() / scale).max() < 1e-8
    assert len(counted) <= 12
